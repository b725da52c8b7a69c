"""axe-core finds no violation of WCAG 2, levels A and AA, in either theme, on laptop and phone."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from axe_playwright_python.sync_playwright import Axe
from tests.support.watched_pages import LAPTOP, PHONE, Opener, Size, Watched

pytestmark = pytest.mark.browser

LEVELS = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]
OPTIONS = {"runOnly": {"type": "tag", "values": LEVELS}, "resultTypes": ["violations"]}
OPEN_ALL = "for (const one of document.querySelectorAll('details')) one.open = true"
# Rows of a table are alike, and each costs time.
FEW_ROWS = "for (const one of document.querySelectorAll('tr:nth-child(n+9)')) one.remove()"


def violations(page: Watched, part: str = "html") -> list[str]:
    page.ask(FEW_ROWS)
    page.ask("scrollTo(0, 0)")  # so that the bar on top lies over nothing
    page.settled()
    found: dict[str, Any] = Axe().run(page.tab, part, OPTIONS).response
    assert len(found["passes"]) > 3
    return [
        f"{one['id']}: {one['help']}: {[node['target'] for node in one['nodes'][:3]]}"
        for one in found["violations"]
    ]


LOOKS = [(size, theme) for size in (LAPTOP, PHONE) for theme in ("light", "dark")]


@pytest.mark.parametrize(
    ("size", "theme"), LOOKS, ids=["laptop-light", "laptop-dark", "phone-light", "phone-dark"]
)
@pytest.mark.parametrize("name", ["made", "gpt fused", "a100_alexnet_inference"])
def test_everybody_can_read_it(
    name: str, size: Size, theme: Literal["light", "dark"], opened: Opener
) -> None:
    page = opened(name, size=size, theme=theme)
    page.ask(OPEN_ALL)
    page.settled()
    assert violations(page) == []


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_view_can_be_read(theme: Literal["light", "dark"], opened: Opener) -> None:
    page = opened("made", theme=theme)
    page.one("#flame-now input[type=search]").fill("aten")
    for view in ("flame-diff", "flame-before", "flame-device", "timeline-before"):
        page.one(f"#tab-{view}").click()
        if view == "flame-diff":
            page.one("#flame-vanished").check()
        page.settled()
        assert violations(page, f"#{view}") == []


def test_pages_without_times_can_be_read(opened: Opener) -> None:
    assert violations(opened("unmeasured", theme="dark")) == []
