"""A `Diff` as text: what changed most, in one line per kind of module.

In: a `Diff`. Out: `rich` renderables.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from torchweld.core.not_measured import NotMeasured
from torchweld.core.number_text import (
    MINUS,
    counted,
    duration,
    figure,
    listed,
    signed,
    size,
    unit_of,
)
from torchweld.core.safe_text import clean
from torchweld.profiles.accounting.profile_diff import Change, Diff
from torchweld.report.profile_sections import notices_section
from torchweld.report.text_style import WIDTH, Column, Sheet, cut_left, heading

ROWS_SHOWN = 25
# With equal counts, a change under this share of the step gets no line.
SMALL = 0.002


def diff_sections(diff: Diff, force: bool = False, width: int = WIDTH) -> Iterator[RenderableType]:
    """All of it. `force` shows times that are not comparable, too."""
    timed = (force or not diff.not_comparable) and _step_us(diff) is not None
    yield _sentence(diff, timed)
    for reason in diff.not_comparable:
        words = "not comparable" if timed else "times not measured, since not comparable"
        yield Text(f"{words}: {clean(reason)}", style="yellow")
    yield ""
    shown = [c for c in diff.changes if _matters(c, diff, timed)]
    yield heading("modules", "what changed most first; ops and round trips are for one module")
    if not shown:
        yield Text("  nothing changed")
    yield _table(diff, shown[:ROWS_SHOWN], timed, width)
    rest = len(diff.changes) - min(len(shown), ROWS_SHOWN)
    if rest:
        yield Text(f"  and {counted(rest, 'line')} that changed less or not at all", style="dim")
    for name, paths in (("a", diff.only_a), ("b", diff.only_b)):
        if paths:
            words = listed([clean(path) for path in paths], 8)
            yield Text(f"ran only in {name}, so compared as part of the modules around: {words}")
    yield from notices_section(diff.notes)


def _sentence(diff: Diff, timed: bool) -> Text:
    before, after = diff.step.before, diff.step.after
    text = Text(style="bold")
    names = dict.fromkeys((clean(diff.a.what), clean(diff.b.what)))
    text.append(f"{' → '.join(names)}: ")
    times = _step_us(diff)
    if timed and times is not None:
        text.append(f"a step takes {duration(times[0])} → {duration(times[1])}")
        text.append(f", {_speed(*times)}; ")
    unit = _unit(diff)
    text.append(f"{before.launches} {unit} → {after.launches}")
    trips = after.round_trips - before.round_trips
    if trips:
        text.append(
            f", {signed(_whole(trips))} {'round trip' if abs(trips) == 1 else 'round trips'}"
        )
    return text.append(".")


def _step_us(diff: Diff) -> tuple[float, float] | None:
    """None where one of the two was not measured."""
    one, two = diff.step_us
    return None if isinstance(one, NotMeasured) or isinstance(two, NotMeasured) else (one, two)


def _longest_us(diff: Diff) -> float:
    return max(_step_us(diff) or (0.0,))


def _unit(diff: Diff) -> str:
    return "kernels" if diff.on_device else "ops that do work"


def _matters(change: Change, diff: Diff, timed: bool) -> bool:
    before, after = change.before, change.after
    if (before.launches, before.round_trips) != (after.launches, after.round_trips):
        return True
    if change.kinds[0] != change.kinds[1] or before.round_trip_bytes != after.round_trip_bytes:
        return True
    saved = change.saved_device_us if diff.on_device else change.saved_us
    return timed and abs(saved) >= SMALL * _longest_us(diff)


def _table(diff: Diff, changes: Sequence[Change], timed: bool, width: int) -> Table:
    unit, scale = unit_of(_longest_us(diff))
    work = "kernels" if diff.on_device else "ops"
    columns = [Column("count", 5, spare=True)]
    if timed:
        columns += [Column(unit, 5, spare=True), Column("→", 5, spare=True)]
        columns += [Column("saved", 6), Column("speed", 6)]
    columns += [Column(work, 11), Column("trips", 5, spare=True)]
    columns.append(Column("trip bytes", 10, spare=True))
    sheet = Sheet("module", columns, width)
    for change in changes:
        before, after, many = change.before, change.after, change.modules
        times = (before.time_us, after.time_us)
        if diff.on_device:
            times = (before.device_us, after.device_us)
        saved_us = times[0] - times[1]
        trips = (after.round_trips - before.round_trips) // many
        trip_bytes = (after.round_trip_bytes - before.round_trip_bytes) // many
        style = ""
        if timed and abs(saved_us) >= SMALL * _longest_us(diff):
            style = "green" if saved_us > 0 else "red"
        sheet.add(
            _label(change, sheet.label_width),
            {
                "count": f"{many} x" if many > 1 else "",
                unit: figure(times[0] / scale),
                "→": figure(times[1] / scale),
                "saved": figure(saved_us / scale),
                "speed": _speed(*times),
                work: _arrow(before.launches // many, after.launches // many),
                "trips": signed(_whole(trips)) if trips else "",
                "trip bytes": signed(size(trip_bytes)) if trip_bytes else "",
            },
            style,
        )
    return sheet.table


def _label(change: Change, width: int) -> str:
    one, two = map(clean, change.kinds)
    path = clean(change.path) or "the model"
    what = f"{path} itself" if change.own else path
    kinds = f"  {one} → {two}" if one != two else f"  {one}"
    if len(what) + len(kinds) + 2 > width:
        kinds = f"  → {two}" if one != two else ""
    return "  " + cut_left(what, max(width - 2 - len(kinds), 8)) + kinds


def _arrow(before: int, after: int) -> str:
    return str(before) if before == after else f"{before} → {after}"


def _whole(number: int) -> str:
    return str(number).replace("-", MINUS)


def _speed(before_us: float, after_us: float) -> str:
    return f"{figure(before_us / after_us)}x" if before_us > 0 and after_us > 0 else "–"
