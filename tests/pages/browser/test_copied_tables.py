"""What is copied from the table of a plot are the figures in the page's data, column by column."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import pytest
from tests.support.shown_figures import PARTS, parts_us, widths_us
from tests.support.watched_pages import Opener, Watched

from torchweld.core.not_measured import NotMeasured
from torchweld.pages.page_records import FRAME_KINDS, Page

pytestmark = pytest.mark.browser

Rows = list[tuple[Any, ...]]
# A column whose text is made by the script; other tests look at it.
ANY = object()


def reason(*values: object) -> str:
    return next((value.reason for value in values if isinstance(value, NotMeasured)), "")


def account(page: Page) -> Rows:
    splits = [side.account for side in page.sides if not isinstance(side.account, NotMeasured)]
    bars = [parts_us(split) for split in splits]
    found: Rows = []
    for i in range(len(PARTS)):
        shares = [figure for bar in bars for figure in (bar[i], bar[i] / sum(bar))]
        before = bars[0][i]
        change = [(bars[-1][i] - before) / before if before else ""] if len(bars) > 1 else []
        found.append((ANY, *shares, *change, ANY))
    return found


def flame(page: Page) -> Rows:
    side = page.sides[-1]
    one = side.flame
    assert one is not None
    levels: list[int] = []
    for parent in one.parent:
        levels.append(levels[parent] + 1 if parent >= 0 else 1)
    return [
        (
            one.names[one.name[i]],
            FRAME_KINDS[one.kind[i]],
            levels[i],
            side.modules[one.module[i]].path if one.module[i] >= 0 else "",
            width,
            one.own_us[i],
            one.calls[i],
        )
        for i, width in enumerate(widths_us(one))
    ]


def change(page: Page) -> Rows:
    one = page.diff
    assert one is not None
    columns = zip(one.name, one.kind, one.state, one.before_us, one.after_us, strict=True)
    return [
        (one.names[name], FRAME_KINDS[kind], ANY, state, before, after, after - before)
        for name, kind, state, before, after in columns
    ]


def course(page: Page) -> Rows:
    return [
        (side.name, at, size)
        for side in page.sides
        if side.memory is not None
        for at, size in zip(side.memory.at_us, side.memory.bytes, strict=True)
    ]


def alive(page: Page) -> Rows:
    memory = page.sides[-1].memory
    assert memory is not None
    return [
        (one.module or "the model", one.op, one.phase, one.count, one.bytes)
        for one in memory.at_peak
    ]


def blocks(page: Page) -> Rows:
    """Those that are not one row for many layers."""
    return [
        (row.path, row.what, row.outcome, ANY, row.speedup, row.interval,
         row.reason or reason(row.speedup))
        for row in page.blocks
    ]  # fmt: skip


def best(page: Page) -> Rows:
    one = page.maps[0]
    return [
        (one.rows[cell.row], one.columns[cell.column], cell.best, cell.speedup,
         reason(cell.speedup))
        for cell in one.cells
    ]  # fmt: skip


def curves(page: Page) -> Rows:
    return [
        (curve.name, point.x, point.speedup, point.interval, point.verdict, reason(point.speedup))
        for curve in page.curves[0].curves
        for point in curve.points
    ]


def history(page: Page) -> Rows:
    return [
        (one.run, one.name, one.kind, one.created, one.commit, one.speedup, one.interval,
         one.verdict, reason(one.speedup))
        for one in page.history[0].points
    ]  # fmt: skip


def errors(page: Page) -> Rows:
    return [
        (row.block, row.tensor, row.eager, row.fused, row.of_allowed, "yes" if row.ok else "no",
         reason(row.of_allowed, row.fused, row.eager))
        for row in page.errors
    ]  # fmt: skip


def rounds(page: Page) -> Rows:
    return [
        (one.name, one.speedup, one.interval, one.verdict, what, ratio)
        for one in page.strips
        for what, ratios in (("round", one.ratios), ("itself", one.control))
        for ratio in ratios
    ]


def points(page: Page) -> Rows:
    names = [side.name for side in page.sides]
    found = [
        (point.name, "block" if point.block else "op", name, point.phase, point.calls,
         point.time_us, point.flops, point.moved_bytes, point.flops / point.time_us / 1e3,
         point.of_roofline, point.bound)
        for side, name in zip(page.sides, names, strict=True)
        for point in side.points
    ]  # fmt: skip
    return [*found, *[(roof.name, "roof", *[ANY] * 9) for roof in page.sides[-1].roofs]]


TABLES: dict[str, Callable[[Page], Rows]] = {
    "account": account,
    "flame-now-plot": flame,
    "flame-diff-plot": change,
    "memory-plot": course,
    "roofline-plot": points,
    "bench-map-0": best,
    "bench-curves-0": curves,
    "history-0": history,
    "numerics-plot": errors,
    "samples-plot": rounds,
}
TITLED: dict[str, Callable[[Page], Rows]] = {"memory-alive": alive, "blocks": blocks}


@pytest.mark.parametrize("plot", TABLES)
def test_the_table_of_a_plot_has_the_figures_of_the_data(plot: str, opened: Opener) -> None:
    page = opened("made")
    if plot == "flame-diff-plot":
        page.one("#tab-flame-diff").click()
    tools = page.one(f"#{plot} + .tools")
    tools.locator("summary").click()
    compare(page, tools.get_by_role("button", name="Copy as TSV"), TABLES[plot](page.page))


@pytest.mark.parametrize("table", TITLED)
def test_a_table_of_its_own_has_the_figures_of_the_data(table: str, opened: Opener) -> None:
    page = opened("made")
    button = page.one(f"#{table}").get_by_role("button", name="Copy as TSV")
    compare(page, button, TITLED[table](page.page))


def compare(page: Watched, button: Any, wanted: Rows) -> None:
    head, *rows = page.copied(button)
    assert len(wanted) > 1
    assert {len(row) for row in rows} == {len(head)}
    expected = [tuple(map(copied, row)) for row in wanted]
    assert len(rows) <= len(expected)
    missing = [row for row in rows if not any(same(row, one) for one in expected)]
    assert missing == []
    unmatched = [one for one in expected if not any(same(row, one) for row in rows)]
    if len(rows) == len(expected):
        assert unmatched == []


def copied(value: object) -> object:
    """The text, or the figure, that a cell is to have."""
    if isinstance(value, NotMeasured):
        return "not measured"
    if value is None:
        return ""
    if isinstance(value, tuple):
        return tuple(value)
    return value


def same(row: Sequence[str], wanted: tuple[object, ...]) -> bool:
    return len(row) == len(wanted) and all(map(fits, row, wanted))


def fits(cell: str, wanted: object) -> bool:
    if wanted is ANY:
        return True
    if isinstance(wanted, str):
        return " ".join(cell.split()) == " ".join(wanted.split())
    if isinstance(wanted, tuple):
        return [*numbers(cell.split(" to "))] == pytest.approx([*wanted], rel=1e-9, nan_ok=True)
    assert isinstance(wanted, (int, float))
    return [*numbers([cell])] == [pytest.approx(wanted, rel=1e-9, abs=1e-6, nan_ok=True)]


def numbers(texts: Sequence[str]) -> Iterator[float]:
    for text in texts:
        with suppress(ValueError):
            yield float(text)
