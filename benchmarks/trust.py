"""Is the paired comparison right about itself?

Compares work with itself and with the same work plus 5 % and 2 %, many times, and counts the
verdicts: on an op of about 5 us with one thread and a block of about 3 ms with two, on the machine
as it is and with another process that loads one core. Then in a budget for a few rounds alone, with
itself and with three times the work. Prints a table; exits 1 if it misses a figure.

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
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor
from torch.nn.functional import linear, relu

from torchweld.core.not_measured import NotMeasured
from torchweld.core.records import to_plain
from torchweld.timing import CallableSide, Comparison, compare

OP_S = 5e-6
BLOCK_S = 3e-3
BLOCK_LAYERS = 100

Work = Callable[[], Tensor]


@dataclass(frozen=True, kw_only=True)
class ComparedWork:
    """What to compare with the baseline: `factor` times its work, `count` times over.

    `found` is the share of differences to be found within the budget, or `late` times that; None
    asks for nothing but that no wrong verdict is given.
    """

    name: str
    factor: float
    count: int
    budget_s: float
    found: float | None = None
    # What ends a run is looked at between blocks, so that the last one may overrun it a little.
    late: float = 1.05


@dataclass(frozen=True, kw_only=True)
class TrustCase:
    """What to compare, and where."""

    name: str
    work: str
    threads: int
    load: bool
    trials: tuple[ComparedWork, ...]


WRONG_SHARE = 0.02

FIND = (
    ComparedWork(name="itself", factor=1.0, count=200, budget_s=3.0),
    ComparedWork(name="5% slower", factor=1.05, count=100, budget_s=3.0, found=0.95),
    ComparedWork(name="2% slower", factor=1.02, count=30, budget_s=20.0, found=0.80),
)
DO_NOT_LIE = (
    ComparedWork(name="itself", factor=1.0, count=100, budget_s=3.0),
    ComparedWork(name="5% slower", factor=1.05, count=50, budget_s=3.0),
    ComparedWork(name="2% slower", factor=1.02, count=30, budget_s=20.0),
)
# Time for 5 to 15 rounds: a plain difference is told, and nothing is made up.
FEW_ROUNDS = (
    ComparedWork(name="itself", factor=1.0, count=300, budget_s=0.2),
    ComparedWork(name="20% slower", factor=1.2, count=100, budget_s=0.2),
    ComparedWork(name="3x slower", factor=3.0, count=100, budget_s=0.8, found=0.9, late=2.0),
)
FEW_ROUNDS_LOADED = tuple(replace(trial, found=None) for trial in FEW_ROUNDS)
CASES = (
    TrustCase(name="op", work="op", threads=1, load=False, trials=FIND),
    TrustCase(name="op-loaded", work="op", threads=1, load=True, trials=FIND),
    TrustCase(name="block", work="block", threads=2, load=False, trials=DO_NOT_LIE),
    TrustCase(name="block-loaded", work="block", threads=2, load=True, trials=DO_NOT_LIE),
    TrustCase(name="few", work="block", threads=2, load=False, trials=FEW_ROUNDS),
    TrustCase(name="few-loaded", work="block", threads=2, load=True, trials=FEW_ROUNDS_LOADED),
)
ON_REQUEST = (
    TrustCase(name="block-alone", work="block", threads=1, load=False, trials=FIND),
    TrustCase(name="block-alone-loaded", work="block", threads=1, load=True, trials=FIND),
)


@dataclass(kw_only=True)
class TrustOutcome:
    """The verdicts of one trial in one case, and whether they keep what is promised."""

    case: TrustCase
    trial: ComparedWork
    verdicts: Counter[str] = field(default_factory=Counter)
    in_time: int = 0
    speedups: list[float | NotMeasured] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def add(self, comparison: Comparison) -> None:
        self.verdicts[comparison.verdict] += 1
        in_time = comparison.elapsed_s <= self.trial.late * self.trial.budget_s
        self.in_time += comparison.verdict == self.truth and in_time
        self.speedups.append(comparison.speedup)
        self.seconds.append(comparison.elapsed_s)

    @property
    def truth(self) -> str:
        return "same" if self.trial.factor == 1.0 else "slower"

    @property
    def wrong(self) -> int:
        """Verdicts against the truth. "same" denies a difference that does not have to be found."""
        harmless = {self.truth, "not measured"}
        if self.trial.found is not None:
            harmless.add("same")
        return sum(n for verdict, n in self.verdicts.items() if verdict not in harmless)

    @property
    def goal(self) -> str:
        if self.trial.found is None:
            return f"wrong <= {WRONG_SHARE:.0%}"
        return f"right >= {self.trial.found:.0%}"

    @property
    def kept(self) -> bool:
        found = self.in_time >= (self.trial.found or 0.0) * self.trial.count
        return found and self.wrong <= WRONG_SHARE * self.trial.count


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
    return lambda: relu(linear(x, weight, bias))


def block_of(width: int) -> Callable[[int], Work]:
    """A chain of many narrow layers, so that 2 % and 5 % are whole layers: real extra work.

    All lengths share their tensors. Two copies of one block differ measurably, by where their
    memory happens to lie: a real difference, but not the one that is known here.
    """
    x = torch.randn(32, width)
    weight = torch.randn(width, width) / math.sqrt(width)

    def of_length(layers: int) -> Work:
        def run() -> Tensor:
            hidden = x
            for _ in range(layers):
                hidden = linear(hidden, weight)
            return hidden

        return run

    return of_length


def block_work(width: int) -> Work:
    return block_of(width)(BLOCK_LAYERS)


def nearest(build: Callable[[int], Work], widths: Sequence[int], wanted_s: float) -> int:
    """The width whose time is nearest to `wanted_s`, by the best of a few blocks of calls."""

    def distance(width: int) -> float:
        side = CallableSide(build(width))
        calls = math.ceil(1e-3 / wanted_s)
        best_s = min(side.time(calls) / calls for _ in range(20))
        return abs(math.log(best_s / wanted_s))

    return min(widths, key=distance)


def sides(work: str, factor: float, width: int) -> tuple[Work, Any]:
    """The baseline, and a candidate that does `factor` times as much."""
    if work == "op":
        baseline = op_work(width)
        return baseline, baseline if factor == 1.0 else Slowed(baseline, factor)
    block = block_of(width)
    baseline = block(BLOCK_LAYERS)
    return baseline, baseline if factor == 1.0 else block(round(BLOCK_LAYERS * factor))


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


def run_case(case: TrustCase, scale: float, seed: int, console: Console) -> Iterator[TrustOutcome]:
    torch.set_num_threads(case.threads)
    torch.manual_seed(seed)
    if case.work == "op":
        width = nearest(op_work, (16, 64, 128, 192, 256), OP_S)
    else:
        width = nearest(block_work, (128, 192, 256, 320, 384, 448, 512), BLOCK_S)
    with loaded(case.load), Progress(console=console, transient=True) as progress:
        for trial in case.trials:
            trial = replace(trial, count=max(1, round(scale * trial.count)))
            outcome = TrustOutcome(case=case, trial=trial)
            for number in progress.track(
                range(trial.count), description=f"{case.name}: {trial.name}"
            ):
                baseline, candidate = sides(case.work, trial.factor, width)
                outcome.add(
                    compare(baseline, candidate, budget_s=trial.budget_s, seed=seed + number)
                )
            yield outcome


def table(outcomes: Sequence[TrustOutcome]) -> Table:
    result = Table(
        title="The paired comparison against known truth (times in s)",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    result.add_column("case", no_wrap=True)
    result.add_column("against", no_wrap=True)
    for name in ("n", "right", "same", "unmeasured", "wrong", "median", "longest"):
        result.add_column(name, justify="right")
    result.add_column("to keep", no_wrap=True)
    result.add_column("kept")
    for outcome in outcomes:
        seconds = sorted(outcome.seconds)
        result.add_row(
            outcome.case.name,
            outcome.trial.name,
            str(outcome.trial.count),
            str(outcome.verdicts[outcome.truth]),
            str(outcome.verdicts["same"]),
            str(outcome.verdicts["not measured"]),
            str(outcome.wrong),
            f"{seconds[len(seconds) // 2]:.2f}",
            f"{seconds[-1]:.2f}",
            outcome.goal,
            "yes" if outcome.kept else "NO",
        )
    return result


def as_json(outcomes: Sequence[TrustOutcome], elapsed_s: float) -> dict[str, Any]:
    return {
        "torch": torch.__version__,
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "elapsed_s": elapsed_s,
        "kept": all(outcome.kept for outcome in outcomes),
        "outcomes": [
            {
                "case": outcome.case.name,
                "threads": outcome.case.threads,
                "loaded": outcome.case.load,
                "trial": asdict(outcome.trial),
                "verdicts": dict(outcome.verdicts),
                "right_in_time": outcome.in_time,
                "wrong": outcome.wrong,
                "goal": outcome.goal,
                "kept": outcome.kept,
                "speedups": to_plain(outcome.speedups),
                "seconds": outcome.seconds,
            }
            for outcome in outcomes
        ],
    }


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    defaults = ", ".join(case.name for case in CASES)
    parser = argparse.ArgumentParser(
        description="Is the paired comparison right about itself? Compares work with itself and "
        "with 5 %% and 2 %% more of it, and counts the verdicts. Exits 1 if a figure is missed.",
        epilog="The default cases take 15 to 20 minutes on a quiet machine with two cores, --quick "
        "about 2, and twice that beside other work; the other two cases up to 15 each.",
    )
    parser.add_argument(
        "--case",
        choices=[case.name for case in (*CASES, *ON_REQUEST)],
        action="append",
        help=f"only this one; may be given again; by default {defaults}",
    )
    parser.add_argument("--scale", type=float, default=1.0, help="of the numbers of comparisons")
    parser.add_argument("--quick", action="store_true", help="a tenth of the comparisons")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the outcomes there")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    scale = options.scale * (0.1 if options.quick else 1.0)
    wanted = options.case or [case.name for case in CASES]
    console = Console()
    if not console.is_terminal:
        console.width = 100
    start_s = time.perf_counter()
    outcomes: list[TrustOutcome] = []
    with torch.inference_mode():
        for case in (*CASES, *ON_REQUEST):
            if case.name not in wanted:
                continue
            for outcome in run_case(case, scale, options.seed, console):
                outcomes.append(outcome)
                counts = ", ".join(f"{n} {verdict}" for verdict, n in outcome.verdicts.items())
                console.print(f"{case.name}, {outcome.trial.name}: {counts}")
    elapsed_s = time.perf_counter() - start_s
    console.print(table(outcomes))
    if options.json:
        options.json.write_text(json.dumps(as_json(outcomes, elapsed_s), indent=1) + "\n")
    missed = sum(not outcome.kept for outcome in outcomes)
    console.print(f"{elapsed_s:.0f} s; " + (f"{missed} figures missed" if missed else "all kept"))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
