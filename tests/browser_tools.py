"""A real browser for the tests of pages."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import AsyncIterator

from playwright.async_api import Browser, async_playwright


def find_browser() -> str:
    """A Chromium on this machine; fails, and says what to install, where there is none."""
    for name in ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable"):
        if found := shutil.which(name):
            return found
    raise AssertionError("no Chromium found: run `sh agent/serve/install_chromium.sh` (Debian's package is `chromium`)")


@contextlib.asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    """A headless browser."""
    async with async_playwright() as playwright:
        # Chromium's own sandbox does not work as root; nothing but our page is opened.
        browser = await playwright.chromium.launch(executable_path=find_browser(), args=["--no-sandbox"])
        try:
            yield browser
        finally:
            await browser.close()
