"""A real browser for tests of pages: the system's Chromium, driven by playwright.

Where there is none the tests are skipped, or fail where LAYOUTOPT_REQUIRE_BROWSER=1 says that there is one.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

__all__ = ["chromium", "opened", "png_size"]

FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]


def _absent(reason: str) -> None:
    if os.environ.get("LAYOUTOPT_REQUIRE_BROWSER") == "1":
        pytest.fail(f"{reason}, and LAYOUTOPT_REQUIRE_BROWSER=1 says that there is one", pytrace=False)
    pytest.skip(reason)


@contextmanager
def chromium() -> Iterator[Any]:
    """The browser, for a fixture of a module: while playwright runs, no event loop of asyncio can."""
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None:
        _absent("no Chromium here: apt-get install chromium")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        _absent("no playwright here: pip install 'layoutopt[dev]'")
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, headless=True, args=FLAGS)
        yield started
        started.close()


@contextmanager
def opened(browser: Any, file: Path, size: tuple[int, int], scheme: str, said: list[str]) -> Iterator[Any]:
    """A page in a window; what the console says, asks of a network or fails at goes to ``said``."""
    context = browser.new_context(
        viewport={"width": size[0], "height": size[1]}, color_scheme=scheme, reduced_motion="reduce"
    )
    page = context.new_page()
    page.on("console", lambda message: said.append(f"console: {message.text}"))
    page.on("pageerror", lambda error: said.append(f"error: {error}"))
    page.on("dialog", lambda dialog: said.append(f"dialog: {dialog.message}"))
    page.on("request", lambda request: said.append(f"request: {request.url}"))
    page.goto(file.as_uri())
    try:
        yield page
    finally:
        context.close()


def png_size(data: bytes) -> tuple[int, int]:
    """Width and height from a PNG's header."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    return int.from_bytes(data[16:20]), int.from_bytes(data[20:24])
