"""What a preset claims: how fast our first backend has to be, over whom, in which cells.

A `Goal` is data. `judge_goals` says of each whether a bench met it, missed it, or did not measure
it. Cells without a figure are counted, never assumed, and a part of the grid proves a part.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torchweld.bench.bench_cases import Case
from torchweld.bench.bench_results import Bench, Cell
from torchweld.bench.relative_speeds import RelativeSpeed, geometric_mean, over, over_best
from torchweld.core.not_measured import NotMeasured

BEST, PEAK = "the best peer", "the FMA peak"
GoalWord = Literal["met", "met in part", "missed", "not measured"]


@dataclass(frozen=True, kw_only=True)
class Goal:
    """Our speed over that of `over` must be at least `least`, in the cells that the goal covers.

    over:         a side by name, the fastest of all others (eager included), or the FMA peak
    every_cell:   each of them; otherwise their geometric mean
    within_noise: an interval that reaches `least` is enough
    hot:          cells with emptied caches are not covered
    rows:         the fewest and the most
    width:        the fewest features of x
    sizes:        of the only block that is covered
    """

    name: str
    over: str
    least: float
    every_cell: bool = False
    within_noise: bool = False
    dtypes: tuple[str, ...] = ("float32",)
    hot: bool = False
    rows: tuple[int, float] = (1, math.inf)
    width: int = 1
    sizes: tuple[int, ...] = ()

    def covers(self, case: Case) -> bool:
        sizes = case.mlp.sizes
        return (
            case.dtype in self.dtypes
            and not (self.hot and case.cold)
            and self.rows[0] <= case.rows <= self.rows[1]
            and sizes[0] >= self.width
            and self.sizes in ((), sizes)
        )

    def value(self, bench: Bench, cell: Cell) -> RelativeSpeed | None:
        if self.over == BEST:
            best = over_best(bench, cell)
            return None if best is None else best[1]
        if self.over == PEAK:
            return _of_peak(bench, cell)
        return over(bench, cell, self.over) if self.over in bench.names else None


def _of_peak(bench: Bench, cell: Cell) -> RelativeSpeed | None:
    gflops = cell.gflops(bench.first)
    peak = bench.peaks.fma_gflops(cell.dtype, bench.threads) if bench.peaks else None
    if isinstance(gflops, NotMeasured) or not peak:
        return None
    return RelativeSpeed(value=gflops / peak, low=gflops / peak, high=gflops / peak)


@dataclass(frozen=True, kw_only=True)
class GoalVerdict:
    """What was found, in words, over hot and over cold cells, and whether the goal is met."""

    goal: Goal
    hot: str
    cold: str
    verdict: GoalWord


def judge_goals(
    goals: Sequence[Goal], bench: Bench, whole: Sequence[Case], everybody: Sequence[str]
) -> list[GoalVerdict]:
    """`whole` is the grid that the goals are about, `everybody` all of its peers."""
    return [_judged(goal, bench, whole, everybody) for goal in goals]


def _judged(
    goal: Goal, bench: Bench, whole: Sequence[Case], everybody: Sequence[str]
) -> GoalVerdict:
    cells = [cell for cell in bench.cells if cell.case is not None and goal.covers(cell.case)]
    asked = {case for case in whole if goal.covers(case)}
    in_part = not asked <= {cell.case for cell in cells}
    in_part |= goal.over == BEST and not set(everybody) <= set(bench.against)
    _, reached = _found(goal, bench, cells)
    words: dict[bool | None, GoalWord] = {None: "not measured", False: "missed", True: "met"}
    hot, cold = ([c for c in cells if _is_cold(bench, c) is cold] for cold in (False, True))
    return GoalVerdict(
        goal=goal,
        hot=_found(goal, bench, hot)[0],
        cold=_found(goal, bench, cold)[0],
        verdict="met in part" if reached and in_part else words[reached],
    )


def _is_cold(bench: Bench, cell: Cell) -> bool:
    return bench.cold or (cell.case is not None and cell.case.cold)


def _found(goal: Goal, bench: Bench, cells: Sequence[Cell]) -> tuple[str, bool | None]:
    """What the cells say, and whether that reaches the goal; None: not known."""
    pairs = [(cell, goal.value(bench, cell)) for cell in cells]
    known = [(cell, ratio) for cell, ratio in pairs if ratio is not None]
    missing = len(cells) - len(known)
    tail = f", {missing} not measured" if missing else ""
    if not known:
        return (f"{missing} not measured" if cells else "–"), None
    # Missing cells may spoil a goal that is reached without them, but cannot mend one.
    reached = None if missing else True
    if not goal.every_cell:
        mean = geometric_mean(ratio.value for _, ratio in known)
        return f"{mean:.2f} of {len(known)} cells{tail}", reached if mean >= goal.least else False
    worst, ratio = min(known, key=lambda pair: pair[1].value)
    below = [r for _, r in known if (r.high if goal.within_noise else r.value) < goal.least]
    held = f"{len(known) - len(below)} of {len(known)} cells"
    assert worst.case is not None
    where = f"{worst.case.rows_text} × {worst.case.mlp.name}"
    return f"{held}, least {ratio.value:.2f} at {where}{tail}", False if below else reached
