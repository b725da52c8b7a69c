"""Two kept runs side by side: cells of the same name, figure by figure. Data in, data out.

A ratio is above 1 if the second run is better. The two were measured at different times, so a ratio
has no interval; if their fingerprints differ, there is no ratio.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torchweld.core.records import UNMEASURED
from torchweld.history.kept_records import holds_record
from torchweld.history.kept_runs import Run, RunCell
from torchweld.history.kept_samples import CONTROL, LOG_RATIOS


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A median time, in the unit of its series, or a speed-up."""

    label: str
    kind: Literal["time", "speed-up"]
    value: float


def figures_of(cell: RunCell) -> list[Figure]:
    """What a cell has to compare: medians of its series, and times and speed-ups in its data."""
    found: dict[str, Figure] = {}
    for figure in (*_of_samples(cell), *_of_data(cell.data)):
        # A series and the figure made from it say the same; the series is more reliable.
        found.setdefault(figure.label, figure)
    # A figure may be unmeasured although there are samples: they were too few.
    unknown = {_label(name) for name, _ in _unmeasured(cell.data)}
    return [
        figure
        for figure in found.values()
        if 0 < figure.value < math.inf and figure.label not in unknown
    ]


def _label(name: str) -> str:
    """The label of the series that a figure was made from: "cpu speedup" -> "cpu speed-up"."""
    return name.replace("callers_ratio", "callers speed-up").replace("speedup", "speed-up")


def _of_samples(cell: RunCell) -> Iterator[Figure]:
    for name, series in cell.samples.items():
        if not series or name.endswith(CONTROL):
            continue
        middle = statistics.median(series)
        if name.endswith(LOG_RATIOS):
            prefix = name.removesuffix(LOG_RATIOS).rstrip(" _./:")
            label = f"{prefix} speed-up".lstrip()
            yield Figure(label=label, kind="speed-up", value=_exp(middle))
        else:
            yield Figure(label=name, kind="time", value=middle)


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:  # in a file that somebody has edited
        return math.inf


def _of_data(data: Mapping[str, Any], prefix: str = "") -> Iterator[Figure]:
    for key, value in data.items():
        if isinstance(value, Mapping):
            yield from _of_data(value, f"{prefix}{key} ")
        elif isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0:
            if key == "speedup":
                yield Figure(label=f"{prefix}speed-up", kind="speed-up", value=value)
            elif key.endswith("_us"):
                yield Figure(label=f"{prefix}{key}", kind="time", value=value)


def unmeasured_of(run: Run) -> dict[str, list[str]]:
    """Why figures of a run were not measured -> which: "8 rows cpu speedup"."""
    found: dict[str, list[str]] = {}
    for cell in run.cells:
        for name, reason in _unmeasured(cell.data):
            found.setdefault(reason, []).append(f"{cell.cell} {name}")
    return found


def _unmeasured(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in data.items():
        if isinstance(value, Mapping):
            reason = value.get(UNMEASURED)
            if value.keys() == {UNMEASURED} and isinstance(reason, str):
                yield f"{prefix}{key}", reason
            else:
                yield from _unmeasured(value, f"{prefix}{key} ")


@dataclass(frozen=True, kw_only=True)
class CellsCompared:
    """One figure of both runs."""

    cell: str
    figure: str
    kind: Literal["time", "speed-up"]
    a: float
    b: float

    @property
    def ratio(self) -> float:
        """How many times better B is."""
        return self.a / self.b if self.kind == "time" else self.b / self.a


@dataclass(frozen=True, kw_only=True)
class RunsCompared:
    """`differences` are those of the fingerprints; nothing is `comparable` if the keys differ."""

    a: Run
    b: Run
    comparable: bool
    differences: tuple[str, ...]
    rows: tuple[CellsCompared, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]


def compare_runs(a: Run, b: Run) -> RunsCompared:
    """Compares figures of the same name in cells of the same name."""
    ours, theirs = (
        {cell.cell: cell for cell in run.cells if not holds_record(cell)} for run in (a, b)
    )
    comparable = a.fingerprint.key == b.fingerprint.key
    rows = []
    for name in ours if comparable else ():
        if name not in theirs:
            continue
        others = {figure.label: figure for figure in figures_of(theirs[name])}
        rows += [
            CellsCompared(
                cell=name,
                figure=figure.label,
                kind=figure.kind,
                a=figure.value,
                b=others[figure.label].value,
            )
            for figure in figures_of(ours[name])
            if figure.label in others and others[figure.label].kind == figure.kind
        ]
    return RunsCompared(
        a=a,
        b=b,
        comparable=comparable,
        differences=tuple(a.fingerprint.differences(b.fingerprint)),
        rows=tuple(rows),
        only_a=tuple(name for name in ours if name not in theirs),
        only_b=tuple(name for name in theirs if name not in ours),
    )
