"""What builds and checks the site: not part of the `fsdp_ref` package."""
