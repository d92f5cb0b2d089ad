"""A real Chromium on the versioned site: collected only by `nox -s docs-browser`.

That session builds the site as it is deployed, two versions beside each other, and says in
FSDP_REF_BROWSER_SITE where it lies.
"""

from __future__ import annotations

import functools
import http.server
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

TREE = os.environ.get("FSDP_REF_BROWSER_SITE", "")
collect_ignore_glob = [] if TREE else ["test_*.py"]

QUIET_CHROMIUM = [
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-gpu",
    "--disable-quic",
    "--disable-sync",
    "--no-first-run",
    "--no-sandbox",  # it looks at this site only, often as root in a container
]


class _Handler(http.server.SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Say nothing: failed requests are found by the tests."""


@pytest.fixture(scope="session")
def site() -> Iterator[str]:
    """The address of the versioned site, served on this machine."""
    handler = functools.partial(_Handler, directory=TREE)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """A running Chromium."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=shutil.which("chromium"), args=QUIET_CHROMIUM
        )
        yield browser
        browser.close()


@pytest.fixture
def open_page(site: str, chromium: Any) -> Iterator[Callable[..., Any]]:
    """Open a page of the site: `open_page("latest/", color_scheme="dark")`.

    After the test, whatever went wrong on any page that it opened fails it: an error on the
    console, an exception, an answer other than success, a request to another host.
    """
    contexts: list[Any] = []
    faults: list[str] = []

    def watch(page: Any) -> None:
        def requested(request: Any) -> None:
            if not request.url.startswith((site, "data:", "blob:")):
                faults.append(f"a request to another host: {request.url}")

        def answered(response: Any) -> None:
            if response.status >= 400:
                faults.append(f"{response.status} for {response.url}")

        def told(message: Any) -> None:
            if message.type in ("error", "warning"):
                faults.append(f"on the console of {page.url}: {message.text}")

        page.on("request", requested)
        page.on("response", answered)
        page.on("console", told)
        page.on("pageerror", lambda error: faults.append(f"exception on {page.url}: {error}"))

    def open_one(path: str, width: int = 1280, height: int = 900, **options: Any) -> Any:
        context = chromium.new_context(
            viewport={"width": width, "height": height},
            permissions=["clipboard-read", "clipboard-write"],
            **options,
        )
        context.set_default_timeout(10_000)
        contexts.append(context)
        page = context.new_page()
        watch(page)
        page.goto(site + path)
        if path:  # the selector comes last, once the list of versions has arrived
            page.locator(".md-version").wait_for(state="attached")
        return page

    yield open_one
    for context in contexts:
        context.close()
    assert faults == []


def latest() -> Path:
    """The folder of the version that is the latest."""
    return Path(TREE) / "latest"
