"""Names from models and traces are shown, never run, and do not break the page."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from playwright.sync_api import Browser
from tests.pages.browser.conftest import Reports
from tests.support.hostile_pages import HOSTILE, LONG
from tests.support.watched_pages import LAPTOP, PHONE, Opener, Report, Size, Watched, open_report

from torchweld.pages.page_html import html_of
from torchweld.pages.page_records import Page
from torchweld.pages.page_sections import sections_of

pytestmark = pytest.mark.browser

TABS = "[role=tab]"
# Elements that only a name could have made.
FOREIGN = "document.querySelectorAll('img, iframe, object, embed, b, svg[onload]').length"
# Attributes that could run something, or load something.
ACTIVE = """[...document.querySelectorAll("*")].flatMap((one) =>
  one.getAttributeNames().filter((name) => name.startsWith("on") || name === "src"))"""


def look_everywhere(page: Watched) -> None:
    """Everything that can be unfolded, shown and pointed at."""
    page.ask("for (const one of document.querySelectorAll('details')) one.open = true")
    page.one(".module-table").get_by_role("button", name="Unfold all").click()
    for tab in page.one(TABS).all():
        tab.click()
        page.settled()
    for selector in ("#welded-map g.place rect", "#flame g[data-frame] rect", ".dot", ".sample"):
        shown = [one for one in page.one(selector).all()[:4] if one.is_visible()]
        for one in shown:
            one.hover(force=True)
    page.settled()


@pytest.mark.parametrize("name", ["hostile", "hostile model"])
def test_names_are_shown_as_text(name: str, opened: Opener) -> None:
    page = opened(name)
    look_everywhere(page)
    sections = page.ask("[...document.querySelectorAll('main > section')].map((one) => one.id)")
    assert sections == list(sections_of(page.page))
    assert page.ask(FOREIGN) == 0
    assert page.ask(ACTIVE) == []
    assert page.ask("document.scripts.length") == 2
    shown = page.ask(
        "[...document.querySelectorAll('#module-table .name')].map((one) => one.textContent)"
    )
    rows = page.page.sides[-1].modules
    if name == "hostile model":
        assert {one.replace(".", "_") for one in HOSTILE} <= set(shown)
    else:
        assert {row.path or row.kind for row in rows} <= set(shown)
    everything: str = page.ask("document.body.textContent")
    for row in rows:
        assert row.kind in everything


@pytest.mark.parametrize("size", [LAPTOP, PHONE], ids=["laptop", "phone"])
@pytest.mark.parametrize("name", ["hostile", "hostile model"])
def test_a_long_name_does_not_stretch_the_page(name: str, size: Size, opened: Opener) -> None:
    page = opened(name, size=size)
    look_everywhere(page)
    assert len(LONG) == 10_000
    assert page.ask("document.documentElement.scrollWidth") <= size[0]


def test_a_name_that_turns_text_around_stays_in_its_place(opened: Opener) -> None:
    page = opened("hostile model")
    page.one(".module-table").get_by_role("button", name="Unfold all").click()
    turned = page.one("#module-table tr").filter(has_text="evil").first
    isolated = turned.locator(".name").evaluate("(one) => getComputedStyle(one).unicodeBidi")
    assert isolated in ("isolate", "isolate-override", "plaintext")


def test_names_in_saved_drawings_are_text(opened: Opener) -> None:
    page = opened("hostile model")
    drawing = page.saved_svg(page.one("#flame-now .save, #flame .save").first)
    tags = {one.tag.rsplit("}", 1)[-1] for one in drawing.iter()}
    assert tags <= {"svg", "title", "rect", "g", "text", "pattern", "path", "defs", "tspan", "line"}


def test_a_copied_name_stays_in_its_cell(opened: Opener) -> None:
    page = opened("hostile")
    button = page.one(".module-table").get_by_role("button", name="Copy as TSV")
    head, *rows = page.copied(button)
    assert {len(row) for row in rows} == {len(head)}


def test_no_spreadsheet_takes_a_name_for_a_formula(
    browser: Browser, tmp_path: Path, reports: Reports
) -> None:
    made = reports["made"].page
    formulas = ("=cmd|'/c calc'!A1", "+1+2", "-2-3", "@SUM(A1)", " =1+1", "\t=1", "-1e5", "+.5")
    rows = zip(made.errors, formulas, strict=False)
    errors = tuple(replace(row, block=name, tensor=name) for row, name in rows)
    side = made.sides[-1]
    modules = [replace(row, kind=f"={row.kind}") for row in side.modules]
    sides = (replace(side, name="", modules=tuple(modules)),)
    path = tmp_path / "formulas.html"
    path.write_text(html_of(replace(made, sides=sides, diff=None, errors=errors)))
    watched = open_report(browser, Report(path, made))
    tools = watched.one("#numerics-plot + .tools")
    tools.locator("summary").click()
    _, *copied = watched.copied(tools.get_by_role("button", name="Copy as TSV"))
    shown = [name.replace("\t", " ") for name in formulas[: len(errors)]]
    wanted = [name if name in ("-1e5", "+.5") else f"'{name}" for name in shown]
    assert len(errors) > 3
    assert [row[0] for row in copied] == wanted
    button = watched.one(".module-table").get_by_role("button", name="Copy as TSV")
    head, *found = watched.copied(button)
    assert all(row[head.index("kind")].startswith("'=") for row in found)
    watched.tab.context.close()


def test_a_long_name_does_not_fill_tooltips_and_lines(opened: Opener) -> None:
    page = opened("hostile model")
    frames = page.one("#flame-now g[data-frame] rect")
    longest = 0
    for frame in frames.all()[:12]:
        frame.hover(force=True)
        page.settled()
        for selector in (".tooltip", "#flame-now .flame-said", "#flame-now .crumbs"):
            longest = max(longest, *map(len, page.texts(selector)), 0)
    page.ask("document.querySelectorAll('#flame-now g[data-frame]').forEach((one) => one.focus())")
    longest = max(longest, *map(len, page.texts("#flame-now .flame-said")))
    labels = page.ask(
        "[...document.querySelectorAll('#flame-now [aria-label]')].map((one) => one.ariaLabel)"
    )
    assert 0 < longest < 1500
    assert max(map(len, labels)) < 1500
    blanks = page.ask("document.body.textContent.length")
    assert blanks > 10_000  # the names are there, in the tables


def test_what_a_name_must_not_do_would_be_noticed(browser: Browser, tmp_path: Path) -> None:
    """The same names as markup: stopped by the policy, and seen by these tests."""
    page = Page(title="a", verdict="b.")
    doctored = html_of(page).replace(
        "</main>", f"{HOSTILE[0]}<img src='https://example.invalid/x'></main>"
    )
    path = tmp_path / "doctored.html"
    path.write_text(doctored)
    watched = open_report(browser, Report(path, page))
    stopped = " ".join(watched.violations())
    assert "script-src" in stopped
    assert "img-src" in stopped
    assert len(watched.complaints) >= 2
    assert not any(said.startswith("dialog") for said in watched.complaints)
    path.write_text(re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", doctored))
    unguarded = open_report(browser, Report(path, page))
    assert "dialog: 1" in unguarded.complaints
    assert "https://example.invalid/x" in unguarded.requests
    for one in (watched, unguarded):
        one.tab.context.close()


def test_a_redacted_page_has_none_of_the_names(opened: Opener) -> None:
    page = opened("redacted")
    look_everywhere(page)
    text = page.report.path.read_text()
    shown: str = page.ask("document.documentElement.outerHTML")
    plain = page.ask(
        "JSON.stringify(JSON.parse(document.getElementById('torchweld-report').textContent))"
    )
    for name in HOSTILE:
        for word in ("alert", "onerror", "onload", "evil", "gnp", "example.com", "xxxx", "Named"):
            assert word not in plain
        assert name.replace(".", "_") not in shown
    assert "alert(" not in text
    assert page.ask("document.querySelectorAll('#module-table tr').length") > len(HOSTILE)
