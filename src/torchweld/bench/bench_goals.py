"""What a preset claims: how fast our first backend has to be, over whom, in which cells.

A `Goal` is data. `judge_goals` says of each whether a bench met it, missed it, or did not measure
it. Cells without a figure are counted, never assumed, and a part of the grid proves a part.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torchweld.bench.bench_cases import Case, MlpShape, ModelCase
from torchweld.bench.bench_results import Bench, Cell
from torchweld.bench.relative_speeds import RelativeSpeed, geometric_mean, over, over_best
from torchweld.bench.training_step import TrainingStep
from torchweld.core.not_measured import NotMeasured

BEST, PEAK = "the best peer", "the FMA peak"
GoalWord = Literal["met", "met in part", "missed", "not measured"]


@dataclass(frozen=True, kw_only=True)
class Goal:
    """Our speed over that of `over` must be at least `least`, in the cells that the goal covers.

    over:         a side by name, the fastest of all others (eager included), or the FMA peak
    ours:         which of our sides; empty: the first
    every_cell:   each of them; otherwise their geometric mean
    within_noise: an interval that reaches `least` is enough
    dtypes:       what is computed in
    hot:          cells with emptied caches are not covered
    rows:         the fewest and the most
    width:        the fewest features of x
    mlps:         the only blocks that are covered; empty: all
    blocks:       how many follow each other; empty: any number
    steps:        the kinds of training steps, autocast aside; empty: calls without gradients
    native_bf16:  only where CPUs multiply bfloat16 themselves, or only where not; None: anywhere
    target:       a whole model in training, and no block
    """

    name: str
    over: str
    least: float
    ours: str = ""
    every_cell: bool = False
    within_noise: bool = False
    dtypes: tuple[str, ...] = ("float32",)
    hot: bool = False
    rows: tuple[int, float] = (1, math.inf)
    width: int = 1
    mlps: tuple[MlpShape, ...] = ()
    blocks: tuple[int, ...] = (1,)
    steps: tuple[TrainingStep, ...] = ()
    native_bf16: bool | None = None
    target: str = ""

    def covers(self, what: Case | ModelCase | None) -> bool:
        """Whether it is about a cell of this; None, a model without gradients, never is."""
        if isinstance(what, ModelCase):
            return what.target == self.target and self._covers_step(what.step)
        if what is None or self.target:
            return False
        return (
            what.computed_dtype in self.dtypes
            and not (self.hot and what.cold)
            and self.rows[0] <= what.rows <= self.rows[1]
            and what.mlp.sizes[0] >= self.width
            and (not self.mlps or what.mlp in self.mlps)
            and (not self.blocks or what.blocks in self.blocks)
            and self._covers_step(what.training)
        )

    def _covers_step(self, step: TrainingStep | None) -> bool:
        if step is None:
            return not self.steps
        return replace(step, autocast="") in self.steps

    def applies(self, bench: Bench) -> bool:
        """Whether it is about machines like this one."""
        return self.native_bf16 is None or self.native_bf16 == bench.native_bf16

    def value(self, bench: Bench, cell: Cell) -> RelativeSpeed | None:
        if self.over == BEST:
            best = over_best(bench, cell)
            return None if best is None else best[1]
        if self.over == PEAK:
            return _of_peak(bench, cell)
        known = self.over in bench.names and (self.ours or bench.first) in bench.names
        return over(bench, cell, self.over, self.ours) if known else None


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
    goals: Sequence[Goal],
    bench: Bench,
    whole: Sequence[Case | ModelCase],
    everybody: Sequence[str],
) -> list[GoalVerdict]:
    """`whole` is the grid that the goals are about, `everybody` all of its peers.

    Goals about other machines are left out.
    """
    return [_judged(goal, bench, whole, everybody) for goal in goals if goal.applies(bench)]


def _judged(
    goal: Goal, bench: Bench, whole: Sequence[Case | ModelCase], everybody: Sequence[str]
) -> GoalVerdict:
    cells = [cell for cell in bench.cells if goal.covers(cell.what)]
    asked = {case for case in whole if goal.covers(case)}
    in_part = not asked <= {cell.what for cell in cells}
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
    assert worst.what is not None
    return f"{held}, least {ratio.value:.2f} at {worst.what.place}{tail}", not below and reached
