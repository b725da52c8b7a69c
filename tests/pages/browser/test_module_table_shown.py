"""The table of modules folds, by mouse and by keys, and can be copied."""

from __future__ import annotations

import pytest
from tests.support.watched_pages import Opener, Watched

from torchweld.core.not_measured import NotMeasured

pytestmark = pytest.mark.browser

ROWS = "#module-table tbody tr"


def names(page: Watched) -> list[str]:
    return page.texts(f"{ROWS} .name")


@pytest.mark.parametrize("name", ["gpt", "gpt fused", "a100_training_step"])
def test_rows_fold_and_unfold(name: str, opened: Opener) -> None:
    page = opened(name)
    buttons = page.one(".module-table .controls")
    buttons.get_by_role("button", name="Fold all", exact=True).click()
    assert page.one(ROWS).count() == 1
    buttons.get_by_role("button", name="Unfold all").click()
    everything = names(page)
    assert len(everything) >= len(page.page.sides[-1].modules)
    folding = page.one(f"{ROWS}[aria-expanded]")
    for number in range(min(2, folding.count())):
        row = folding.nth(number)
        level = int(row.get_attribute("aria-level") or 0)
        row.locator(".name").click()
        assert row.get_attribute("aria-expanded") == "false"
        assert len(names(page)) < len(everything)
        # What is left below is not inside it.
        place = names(page).index(" ".join(row.locator(".name").inner_text().split()))
        levels = [int(one) for one in page.ask(LEVELS)]
        assert all(one <= level for one in levels[place + 1 : place + 2])
        row.locator(".name").click()
        assert names(page) == everything


LEVELS = f"[...document.querySelectorAll('{ROWS}')].map((row) => row.ariaLevel)"


def test_keys_fold_and_move(opened: Opener) -> None:
    page = opened("gpt fused")
    page.one(".module-table").get_by_role("button", name="Unfold all").click()
    everything = names(page)
    page.one(f"{ROWS}[tabindex='0']").focus()

    def at() -> str:
        found: str = page.ask("document.activeElement.querySelector('.name').textContent")
        return found

    page.press("ArrowDown")
    assert at() == everything[1]
    page.press("End")
    assert at() == everything[-1]
    page.press("Home")
    assert at() == everything[0]
    page.press("ArrowLeft")
    assert names(page) == everything[:1]
    page.press("ArrowRight")
    assert names(page) == everything
    page.press("Enter")
    assert names(page) == everything[:1]
    page.press("Space", "ArrowRight")
    assert at() == everything[1]
    page.press("ArrowUp")
    assert at() == everything[0]


@pytest.mark.parametrize("name", ["gpt fused", "a100_training_step"])
def test_the_copy_has_every_module_with_numbers_in_full(name: str, opened: Opener) -> None:
    page = opened(name)
    button = page.one(".module-table").get_by_role("button", name="Copy as TSV")
    head, *rows = page.copied(button)
    found = {row[0]: dict(zip(head, row, strict=True)) for row in rows}
    modules = page.page.sides[-1].modules
    assert set(found) == {row.path for row in modules}
    for row in modules:
        shown = found[row.path]
        assert int(shown["calls"]) == row.calls
        assert int(shown["flops"]) == row.flops
        assert not isinstance(row.time_us, NotMeasured)
        for column in ("time_us", "forward_us", "backward_us", "roofline_us"):
            assert float(shown[column]) == getattr(row, column), column
        for column in ("launches", "moved_bytes", "round_trip_bytes"):
            assert int(shown[column]) == getattr(row, column), column
        assert shown["bound"] == row.bound
        assert shown["why"] == row.why
        assert shown["fate"] == row.fate
        assert shown["kind"] == row.kind


def test_a_place_on_the_map_leads_to_its_row(opened: Opener) -> None:
    page = opened("gpt fused")
    path = "layers.1.mlp"
    page.one(f"#welded-map g[data-path='{path}'] rect").first.click()
    assert page.ask("document.activeElement.dataset.path") == path
    fate = page.ask("document.activeElement.querySelector('.fate').textContent")
    assert "welded" in fate


def test_the_map_is_as_large_as_the_times(opened: Opener) -> None:
    """Places of modules without children cover as much as their share of the step."""
    page = opened("gpt fused")
    modules = page.page.sides[-1].modules
    parents = {row.parent for row in modules}
    boxes = page.ask(
        """[...document.querySelectorAll("#welded-map g.place:not(.around)")].map((one) => {
          const { width, height } = one.querySelector("rect").getBBox();
          return [one.dataset.path, width * height];
        })"""
    )
    svg = page.one("#welded-map svg").bounding_box()
    assert svg is not None
    whole = svg["width"] * svg["height"]
    step_us = modules[0].time_us
    assert isinstance(step_us, float)
    shown: dict[str, float] = {}
    for path, area in boxes:
        shown[path] = shown.get(path, 0.0) + area
    for number, row in enumerate(modules):
        if number in parents or isinstance(row.time_us, NotMeasured):
            continue
        # Gaps, frames and heads of modules around take room, so a place is never larger.
        assert shown.get(row.path, 0.0) <= whole * row.time_us / step_us + 60, row.path
