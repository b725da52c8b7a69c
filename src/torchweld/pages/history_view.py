"""Kept runs as a page shows them: speed-ups over time, with what gates said about them.

In: runs of the history, and what a gate found just now. Out: one `HistoryPlot` for each thing that
was measured on one machine. Speeds of different machines or set-ups are never in one plot.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchweld.core.errors import TorchweldError
from torchweld.core.not_measured import NotMeasured
from torchweld.core.records import UNMEASURED
from torchweld.gates.gate_baseline import TIME
from torchweld.gates.gate_outcome import Outcome
from torchweld.gates.gate_timing import KeptTime
from torchweld.history.kept_runs import Run, RunCell
from torchweld.history.kept_samples import to_comparison
from torchweld.machine.fingerprint import Fingerprint
from torchweld.pages.page_numbers import Interval, brief
from torchweld.pages.page_records import HistoryPlot, HistoryPoint
from torchweld.report.gate_text import WORDS
from torchweld.timing import Comparison

ACCEPTED = "accepted"
UNKNOWN = NotMeasured("the run does not say")
# More plots than this nobody looks through; those with most points are kept.
MOST_PLOTS = 40


@dataclass(frozen=True, kw_only=True)
class KeptSpeed:
    """One speed-up of a kept run: of what, how much, and what a gate said."""

    what: str
    speedup: float | NotMeasured
    interval: Interval | None = None
    verdict: str = ""


@dataclass(frozen=True, kw_only=True)
class GatedNow:
    """What a gate found just now, which no history has yet."""

    outcome: Outcome
    created: str
    fingerprint: Fingerprint


def history_plots(runs: Sequence[Run], now: GatedNow | None = None) -> tuple[HistoryPlot, ...]:
    """In the order in which things were first measured; within a plot, oldest first."""
    found: dict[tuple[str, str], list[HistoryPoint]] = {}
    for run in sorted(runs, key=lambda one: one.id):
        for speed in speeds_of(run):
            point = _point(speed, run.id, run.name, run.kind, run.created, run.fingerprint)
            found.setdefault((speed.what, run.fingerprint.key), []).append(point)
    for speed in _gated(now.outcome) if now is not None else ():
        assert now is not None
        point = _point(speed, 0, now.outcome.baseline, "check", now.created, now.fingerprint)
        found.setdefault((speed.what, now.fingerprint.key), []).append(point)
    titles = [what for what, _ in found]
    plots = [
        HistoryPlot(title=_title(what, key, titles.count(what) > 1), points=tuple(points))
        for (what, key), points in found.items()
    ]
    most = sorted(plots, key=lambda plot: -len(plot.points))[:MOST_PLOTS]
    return tuple(plot for plot in plots if plot in most)


def _title(what: str, key: str, several: bool) -> str:
    return f"{what}, machine {key}" if several else what


def _point(
    speed: KeptSpeed, run: int, name: str, kind: str, created: str, where: Fingerprint
) -> HistoryPoint:
    return HistoryPoint(
        run=run,
        name=name,
        kind=kind,
        created=created,
        commit=(where.commit or "")[:12],
        speedup=speed.speedup,
        interval=speed.interval,
        verdict=speed.verdict,
    )


# ---- speed-ups of one run ----


def speeds_of(run: Run) -> Iterator[KeptSpeed]:
    """What a run says about speeds; a profile says nothing."""
    if run.kind == "fuse":
        yield from (_of_fuse(run, cell) for cell in run.cells if cell.cell != "plan")
    elif run.kind == "bench":
        yield from _of_bench(run)
    elif run.kind == "gate":
        yield from _of_gate(run)
    elif run.kind == "check":
        yield from (_of_check(run, cell) for cell in run.cells)


def _of_fuse(run: Run, cell: RunCell) -> KeptSpeed:
    speedup = kept_figure(cell.data.get("speedup", cell.data.get("speed")))
    interval = kept_interval(cell.data.get("interval"))
    return KeptSpeed(what=f"{run.what}: {cell.cell}", speedup=speedup, interval=interval)


def _of_bench(run: Run) -> Iterator[KeptSpeed]:
    """Of the first backend, which is the one that is judged."""
    backends = run.settings.get("backends")
    first = backends[0] if isinstance(backends, list) and backends else None
    for cell in run.cells:
        data = cell.data.get(str(first))
        if isinstance(data, Mapping):
            yield KeptSpeed(
                what=f"{cell.cell}, {first}",
                speedup=kept_figure(data.get("speedup")),
                interval=kept_interval([data.get("low"), data.get("high")]),
            )


def _of_gate(run: Run) -> Iterator[KeptSpeed]:
    """A baseline: the comparisons of a workload as one."""
    workloads: dict[str, list[Comparison]] = {}
    for cell in run.cells:
        data = dict(cell.data)
        workload = data.pop("workload", None)
        if cell.cell.startswith(TIME) and isinstance(workload, str):
            try:
                compared = to_comparison(data, cell.samples)
            except TorchweldError:
                continue  # of an earlier version, or edited; the others still count
            workloads.setdefault(workload, []).append(compared)
    for workload, comparisons in workloads.items():
        kept = KeptTime(workload=workload, comparisons=tuple(comparisons))
        what = f"{run.what}: {workload}"
        if not kept.seen:
            yield KeptSpeed(what=what, speedup=UNKNOWN, verdict=ACCEPTED)
            continue
        low, high = kept.interval
        yield KeptSpeed(
            what=what,
            speedup=brief(kept.speedup),
            interval=(brief(low), brief(high)),
            verdict=ACCEPTED,
        )


def _of_check(run: Run, cell: RunCell) -> KeptSpeed:
    """What a gate found, as `gate --save` keeps it."""
    verdict = (run.summary or {}).get("verdict")
    return KeptSpeed(
        what=f"{run.what}: {cell.cell.removeprefix(TIME)}",
        speedup=kept_figure(cell.data.get("speedup")),
        interval=kept_interval(cell.data.get("interval")),
        verdict=verdict if isinstance(verdict, str) else "",
    )


def _gated(found: Outcome) -> Iterator[KeptSpeed]:
    for one in found.times:
        speedup = one.speedup
        yield KeptSpeed(
            what=f"{found.what}: {one.workload}",
            speedup=brief(speedup) if isinstance(speedup, float) else speedup,
            interval=kept_interval(one.interval),
            verdict=WORDS[found.code].lower(),
        )


def kept_figure(value: Any) -> float | NotMeasured:
    """A kept figure; anybody may have edited the file."""
    if isinstance(value, Mapping) and isinstance(value.get(UNMEASURED), str):
        return NotMeasured(value[UNMEASURED])
    return brief(value) if _is_ratio(value) else UNKNOWN


def kept_interval(value: Any) -> Interval | None:
    if isinstance(value, (list, tuple)) and len(value) == 2 and all(map(_is_ratio, value)):
        return brief(value[0]), brief(value[1])
    return None


def _is_ratio(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < 1e60
