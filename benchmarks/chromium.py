"""A headless Chromium of the system, driven by playwright: for what is to be seen in a browser.

`opened_chromium` gives a browser without the user's settings. Nothing is downloaded: a browser that
is not installed is an error with the remedy.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import Browser, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome")
REMEDY = "`make browser` installs one"
# Playwright makes a new profile in a temporary folder, and asks for no sandbox: all pages are ours.
OPTIONS = (
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def chromium_path() -> str | None:
    """The path of Chromium; None if there is none."""
    return next(filter(None, map(shutil.which, NAMES)), None)


@contextmanager
def opened_chromium() -> Iterator[Browser]:
    path = chromium_path()
    if path is None:
        raise SystemExit(f"none of {', '.join(NAMES)} is installed; {REMEDY}")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=OPTIONS)
        yield browser
        browser.close()
