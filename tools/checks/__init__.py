"""One module per kind of check that `docs-test` makes; each check returns a `Result`."""
