"""A headless Chromium for tests, which talks to nothing but this machine; skips where there is none."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from typing import Any, NoReturn

import pytest

NAMES = ("chromium", "google-chrome")
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def missing(what: str) -> NoReturn:
    """Skip, or fail where `make test-browser` asks for the real thing."""
    if os.environ.get("FSM_TEST_BROWSER") == "required":
        pytest.fail(what)
    pytest.skip(what)


@contextlib.contextmanager
def chromium() -> Iterator[Any]:
    """A started browser with an empty profile, as playwright's `Browser`."""
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        missing(f"needs Chromium: none of {', '.join(NAMES)} is installed (`make test-browser` does that)")
    api = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, headless=True, args=list(FLAGS))
        yield browser
        browser.close()
