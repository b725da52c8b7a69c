"""Is the paired comparison right about itself?

Compares work with itself and with the same work plus 5 % and 2 %, many times, and counts the
verdicts: on an op of about 5 us with one thread and a block of about 3 ms with two, on the machine
as it is and with another process that loads one core. Prints a table, exits 1 if a figure is missed.

    python benchmarks/trust.py --quick
    python benchmarks/trust.py --json trust.json
"""

import argparse
import contextlib
import json
import math
import os
import platform
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

from torchweld.measuring import CallableSide, Comparison, compare

OP_S = 5e-6
BLOCK_S = 3e-3
BLOCK_LAYERS = 100

Work = Callable[[], Tensor]


@dataclass(frozen=True, kw_only=True)
class Case:
    """Where to compare. `found` says whether differences have to be found, or only never denied."""

    name: str
    work: str
    threads: int
    load: bool
    found: bool


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What to compare with the baseline: `factor` times its work, `count` times over."""

    name: str
    factor: float
    count: int
    budget_s: float
    found_share: float


@dataclass(kw_only=True)
class Outcome:
    """The verdicts of one trial in one case, and whether they keep what is promised."""

    case: Case
    trial: Trial
    verdicts: Counter[str] = field(default_factory=Counter)
    speedups: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    rounds: list[int] = field(default_factory=list)

    def add(self, comparison: Comparison) -> None:
        self.verdicts[comparison.verdict] += 1
        self.speedups.append(comparison.speedup)
        self.seconds.append(comparison.elapsed_s)
        self.rounds.append(comparison.rounds)

    @property
    def right(self) -> str:
        return "same" if self.trial.factor == 1.0 else "slower"

    @property
    def wrong(self) -> int:
        return sum(n for verdict, n in self.verdicts.items() if verdict not in self.allowed)

    @property
    def allowed(self) -> tuple[str, str]:
        return self.right, "not measured"

    @property
    def goal(self) -> str:
        if self.must_find:
            return f">= {self.trial.found_share:.0%} found, <= {WRONG_SHARE:.0%} wrong"
        return f"<= {WRONG_SHARE:.0%} wrong"

    @property
    def must_find(self) -> bool:
        return self.case.found and self.trial.factor != 1.0

    @property
    def kept(self) -> bool:
        count = self.trial.count
        found = self.verdicts[self.right] >= self.trial.found_share * count
        # A difference missed in a trial that has to find it counts as not found, not as a lie.
        denied = self.verdicts["same"] if self.must_find else 0
        return self.wrong - denied <= WRONG_SHARE * count and (found or not self.must_find)


WRONG_SHARE = 0.02

CASES = (
    Case(name="op", work="op", threads=1, load=False, found=True),
    Case(name="op-loaded", work="op", threads=1, load=True, found=True),
    Case(name="block", work="block", threads=2, load=False, found=False),
    Case(name="block-loaded", work="block", threads=2, load=True, found=False),
)

TRIALS = (
    Trial(name="itself", factor=1.0, count=200, budget_s=3.0, found_share=0.0),
    Trial(name="5% slower", factor=1.05, count=100, budget_s=3.0, found_share=0.95),
    Trial(name="2% slower", factor=1.02, count=30, budget_s=20.0, found_share=0.80),
)


class Slowed:
    """A side that does `factor` times the work of a callable: more calls, by the exact share."""

    def __init__(self, work: Work, factor: float) -> None:
        self._side = CallableSide(work)
        self._factor = factor

    @property
    def preempted(self) -> bool:
        return self._side.preempted

    def time(self, calls: int) -> float:
        wanted = calls * self._factor
        run = math.ceil(wanted)
        return self._side.time(run) * wanted / run


def op_work(width: int) -> Work:
    """One Linear and its activation on one row."""
    x = torch.randn(1, width)
    weight, bias = torch.randn(width, width) / math.sqrt(width), torch.randn(width)
    return lambda: F.relu(F.linear(x, weight, bias))


def block_work(width: int, layers: int = BLOCK_LAYERS) -> Work:
    """A chain of many narrow layers, so that 2 % and 5 % are whole layers: real extra work."""
    x = torch.randn(32, width)
    weight = torch.randn(width, width) / math.sqrt(width)

    def run() -> Tensor:
        hidden = x
        for _ in range(layers):
            hidden = F.linear(hidden, weight)
        return hidden

    return run


def nearest(build: Callable[[int], Work], widths: Sequence[int], wanted_s: float) -> int:
    """The width whose time is nearest to `wanted_s`, by the best of a few blocks of calls."""

    def distance(width: int) -> float:
        side = CallableSide(build(width))
        calls = max(1, round(wanted_s and 1e-3 / wanted_s))
        best_s = min(side.time(calls) / calls for _ in range(20))
        return abs(math.log(best_s / wanted_s))

    return min(widths, key=distance)


def sides(work: str, factor: float, width: int) -> tuple[Work, Any]:
    """The baseline, and a candidate that does `factor` times as much."""
    if work == "op":
        baseline = op_work(width)
        return baseline, baseline if factor == 1.0 else Slowed(baseline, factor)
    return block_work(width), block_work(width, round(BLOCK_LAYERS * factor))


@contextlib.contextmanager
def loaded(on: bool) -> Iterator[None]:
    """Another process that computes all the time."""
    if not on:
        yield
        return
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def run_case(case: Case, trials: Sequence[Trial], seed: int, console: Console) -> Iterator[Outcome]:
    torch.set_num_threads(case.threads)
    torch.manual_seed(seed)
    if case.work == "op":
        width = nearest(op_work, (16, 64, 128, 192, 256), OP_S)
    else:
        width = nearest(block_work, (128, 192, 256, 320, 384, 448, 512), BLOCK_S)
    with loaded(case.load), Progress(console=console, transient=True) as progress:
        for trial in trials:
            outcome = Outcome(case=case, trial=trial)
            for number in progress.track(
                range(trial.count), description=f"{case.name}: {trial.name}"
            ):
                baseline, candidate = sides(case.work, trial.factor, width)
                outcome.add(
                    compare(baseline, candidate, budget_s=trial.budget_s, seed=seed + number)
                )
            yield outcome


def table(outcomes: Sequence[Outcome]) -> Table:
    result = Table(title="the paired comparison against known truth")
    for name in ("case", "threads", "against", "n", "right", "not measured", "wrong"):
        result.add_column(name)
    for name in ("median s", "most s", "to keep", "kept"):
        result.add_column(name)
    for outcome in outcomes:
        seconds = sorted(outcome.seconds)
        result.add_row(
            outcome.case.name,
            str(outcome.case.threads),
            outcome.trial.name,
            str(outcome.trial.count),
            str(outcome.verdicts[outcome.right]),
            str(outcome.verdicts["not measured"]),
            str(outcome.wrong),
            f"{seconds[len(seconds) // 2]:.2f}",
            f"{seconds[-1]:.2f}",
            outcome.goal,
            "yes" if outcome.kept else "NO",
        )
    return result


def as_json(outcomes: Sequence[Outcome], elapsed_s: float) -> dict[str, Any]:
    return {
        "torch": torch.__version__,
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "elapsed_s": elapsed_s,
        "kept": all(outcome.kept for outcome in outcomes),
        "outcomes": [
            {
                "case": asdict(outcome.case),
                "trial": asdict(outcome.trial),
                "verdicts": dict(outcome.verdicts),
                "wrong": outcome.wrong,
                "goal": outcome.goal,
                "kept": outcome.kept,
                "speedups": [value if math.isfinite(value) else None for value in outcome.speedups],
                "seconds": outcome.seconds,
                "rounds": outcome.rounds,
            }
            for outcome in outcomes
        ],
    }


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Is the paired comparison right about itself? Compares work with itself and "
        "with 5 %% and 2 %% more of it, and counts the verdicts.",
        epilog="All cases take about 15 minutes on a quiet machine with two cores, --quick "
        "about 2. Exits 1 if a figure is missed.",
    )
    names = [case.name for case in CASES]
    parser.add_argument("--case", choices=names, action="append", help="only this one; repeatable")
    parser.add_argument("--scale", type=float, default=1.0, help="of the numbers of comparisons")
    parser.add_argument("--quick", action="store_true", help="a tenth of the comparisons")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the outcomes there")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    scale = options.scale * (0.1 if options.quick else 1.0)
    trials = [
        Trial(**{**asdict(trial), "count": max(1, round(trial.count * scale))}) for trial in TRIALS
    ]
    console = Console()
    start_s = time.perf_counter()
    outcomes: list[Outcome] = []
    with torch.inference_mode():
        for case in CASES:
            if options.case and case.name not in options.case:
                continue
            for outcome in run_case(case, trials, options.seed, console):
                outcomes.append(outcome)
                counts = ", ".join(f"{n} {verdict}" for verdict, n in outcome.verdicts.items())
                console.print(f"{case.name}: {outcome.trial.name}: {counts}")
    elapsed_s = time.perf_counter() - start_s
    console.print(table(outcomes))
    if options.json:
        options.json.write_text(json.dumps(as_json(outcomes, elapsed_s), indent=1) + "\n")
    missed = [outcome for outcome in outcomes if not outcome.kept]
    console.print(f"{elapsed_s:.0f} s; " + (f"{len(missed)} missed" if missed else "all kept"))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
