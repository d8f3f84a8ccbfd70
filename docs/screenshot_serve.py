"""Use the page of a running server in Chromium as a reader would, and keep a picture of it.

python docs/screenshot_serve.py docs/serve_page.png --url 'http://127.0.0.1:8000/#key=...'

For charts that show something, let simulated users in first: `python -m agent.simulate http://127.0.0.1:8000`.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
WAIT_MS = 60_000


def ask(page: Page, text: str, verdict: str) -> None:
    """Send `text`, wait for the answer, press the button `verdict`."""
    answers = page.locator(".message.model")
    before = answers.count()
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")
    answer = answers.nth(before)
    answer.get_by_role("button", name=verdict).click()
    answer.get_by_text("· reward").wait_for()


def main(argv: list[str] | None = None) -> int:
    """Command line; 0, or 2 where there is no browser."""
    description, _, example = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=description, epilog=example, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, metavar="OUT.png")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the link that the server prints, with its key")
    parser.add_argument("--say", action="append", default=[], metavar="TEXT=VERDICT", help="e.g. 'Hello=Good'")
    parser.add_argument("--size", default="1360x850", help="of the window (default: %(default)s)")
    parser.add_argument("--dark", action="store_true")
    arguments = parser.parse_args(argv)
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        print("error: no Chromium; run `sh agent/serve/install_chromium.sh`", file=sys.stderr)
        return 2
    width, height = map(int, arguments.size.split("x"))
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        page = running.new_page(
            viewport={"width": width, "height": height}, color_scheme="dark" if arguments.dark else "light"
        )
        page.set_default_timeout(WAIT_MS)
        page.goto(arguments.url)
        page.locator("#state", has_text="live").wait_for()
        for said in arguments.say:
            text, _, verdict = said.rpartition("=")
            ask(page, text, verdict)
        page.locator("#chart-queue .main-svg").first.wait_for()
        page.evaluate("document.activeElement.blur()")
        page.wait_for_timeout(2500)  # two more events, so that what was said is in the charts
        page.screenshot(path=str(arguments.out))
        running.close()
    print(f"{arguments.out}: {arguments.out.stat().st_size / 1024:.0f} KiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
