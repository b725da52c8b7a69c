"""On paper nothing can be pointed at or chosen: every view is there, with its largest figures."""

from __future__ import annotations

import pytest
from tests.support.watched_pages import Opener, Watched

pytestmark = pytest.mark.browser

HIDDEN = "[...document.querySelectorAll('[role=tabpanel]')].map((one) => one.hidden)"
EMPTY = """[...document.querySelectorAll('[role=tabpanel]')]
    .filter((one) => one.querySelector('svg, canvas') === null || one.clientHeight < 60)
    .map((one) => one.id)"""


def send(page: Watched, event: str) -> None:
    """What a browser sends before and after it prints."""
    page.ask(f"dispatchEvent(new Event('{event}'))")


def test_every_view_is_printed_and_hidden_again(opened: Opener) -> None:
    page = opened("gpt fused")
    before = page.ask(HIDDEN)
    assert sorted(set(before)) == [False, True]
    page.one("#tab-flame-diff").click()
    chosen = page.ask(HIDDEN)
    send(page, "beforeprint")
    # At once: a browser that prints does not wait for a frame.
    assert set(page.ask(HIDDEN)) == {False}
    assert page.ask(EMPTY) == []
    assert page.one("#flame-before svg g[data-frame]").count() > 5
    send(page, "afterprint")
    assert page.ask(HIDDEN) == chosen != before


def test_the_largest_figures_of_a_plot_are_printed_below_it(opened: Opener) -> None:
    page = opened("gpt fused")
    assert page.one(".printed").count() == 0
    send(page, "beforeprint")
    page.tab.emulate_media(media="print")
    flame = page.page.sides[1].flame
    assert flame is not None
    table = page.one("#flame-now .printed")
    assert table.is_visible()
    assert table.locator("tbody tr").count() == 12
    assert table.locator("tbody tr").first.inner_text().startswith(flame.names[flame.name[0]])
    assert f"The first 12 of {len(flame.name):,} rows" in table.inner_text()
    for figure in ("#account", "#roofline-plot", "#numerics-plot"):
        assert page.one(f"{figure} ~ .printed tbody tr").count() > 1, figure
    page.tab.emulate_media(media="screen")
    assert not table.is_visible()
    send(page, "afterprint")
    assert page.one(".printed").count() == 0


def test_what_was_folded_is_printed_and_folded_again(opened: Opener) -> None:
    page = opened("made")
    rows = page.one("#module-table tbody tr").count()
    notices = page.one("details.notices")
    page.one("#module-table tbody tr").first.press("Enter")
    folded = page.one("#module-table tbody tr").count()
    assert folded < rows
    assert notices.count() == 1
    send(page, "beforeprint")
    assert page.one("#module-table tbody tr").count() >= rows
    assert notices.get_attribute("open") is not None
    send(page, "afterprint")
    assert page.one("#module-table tbody tr").count() == folded
    assert notices.get_attribute("open") is None
