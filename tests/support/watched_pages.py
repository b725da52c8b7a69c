"""Pages in a browser that are watched: what they complain about, ask for, and show."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from xml.etree import ElementTree

from playwright.sync_api import Browser, Dialog, Locator
from playwright.sync_api import Page as Tab

from torchweld.pages.page_records import Page

Size = tuple[int, int]
LAPTOP: Size = (1280, 800)
PHONE: Size = (390, 844)
TRACE_FOLDER = Path(__file__).parents[1] / "traces"
TRACES = sorted(path.name.removesuffix(".json.gz") for path in TRACE_FOLDER.glob("*.json.gz"))
SVG = "{http://www.w3.org/2000/svg}"
# Runs before the page does. Violations are complaints even where nothing reaches the console.
WATCH = """
window.violations = [];
document.addEventListener("securitypolicyviolation", (event) => {
  window.violations.push(`${event.violatedDirective}: ${event.blockedURI}`);
});
"""
FRAMES = "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"


@dataclass
class Report:
    """A page in a file."""

    path: Path
    page: Page


@dataclass
class Watched:
    """A report in the browser, with everything that went wrong."""

    tab: Tab
    report: Report
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    @property
    def page(self) -> Page:
        return self.report.page

    def one(self, selector: str) -> Locator:
        return self.tab.locator(selector)

    def texts(self, selector: str) -> list[str]:
        """What elements show, as one line each."""
        return [" ".join(text.split()) for text in self.one(selector).all_inner_texts()]

    def ask(self, script: str, given: Any = None) -> Any:
        return self.tab.evaluate(script, given)

    def settled(self) -> None:
        """Everything that waits for a frame is drawn."""
        self.tab.evaluate(FRAMES)

    def press(self, *keys: str) -> None:
        for key in keys:
            self.tab.keyboard.press(key)
        self.settled()

    def violations(self) -> list[str]:
        found: list[str] = self.tab.evaluate("window.violations")
        return found

    def saved_svg(self, button: Locator) -> ElementTree.Element:
        """The drawing that a button saves."""
        with self.tab.expect_download() as download:
            button.click()
        assert download.value.suggested_filename.endswith(".svg")
        return ElementTree.fromstring(Path(download.value.path()).read_text())

    def copied(self, button: Locator) -> list[list[str]]:
        """The table that a button copies."""
        button.click()
        said = button.locator("xpath=following-sibling::*[@role='status']")
        said.filter(has_text="Copied").wait_for()
        text: str = self.ask("navigator.clipboard.readText()")
        assert text.endswith("\n")
        return [line.split("\t") for line in text[:-1].split("\n")]


# `opened("gpt")`, with `size` and `theme`: the fixture of the tests in a browser.
Opener = Callable[..., Watched]


def open_report(
    browser: Browser,
    report: Report,
    size: Size = LAPTOP,
    theme: Literal["light", "dark"] = "light",
) -> Watched:
    """The report from disk, as a user opens it."""
    width, height = size
    context = browser.new_context(
        viewport={"width": width, "height": height},
        color_scheme=theme,
        permissions=["clipboard-read", "clipboard-write"],
        reduced_motion="reduce",
    )
    context.add_init_script(WATCH)
    tab = context.new_page()
    tab.set_default_timeout(120_000)  # a machine may be busy
    watched = Watched(tab, report)

    def dialog(shown: Dialog) -> None:
        watched.complaints.append(f"dialog: {shown.message}")
        shown.dismiss()

    tab.on("dialog", dialog)
    tab.on("pageerror", lambda error: watched.complaints.append(f"error: {error}"))
    tab.on(
        "console",
        lambda said: (
            watched.complaints.append(f"console: {said.text}")
            if said.type in ("error", "warning")
            else None
        ),
    )
    tab.on("request", lambda request: watched.requests.append(request.url))
    tab.goto(report.path.as_uri())
    watched.settled()
    return watched
