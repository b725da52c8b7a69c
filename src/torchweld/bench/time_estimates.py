"""About how long cells take, for the time that is left; from typical rates."""

from __future__ import annotations

import time
from collections.abc import Sequence

from torchweld.bench.bench_cases import Case
from torchweld.bench.bench_participants import why_not
from torchweld.bench.bench_results import Bench
from torchweld.bench.block_truth import JUDGED_ROWS
from torchweld.bench.runtimes.runtime_names import is_apart
from torchweld.bench.stage_timing import MIN_ROUNDS, MOST_CELL_S, MOST_TRAINING_S, WINDOW_S

# Shares of the fp32 peak: of eager's products, of those in 16 bits, of the reference in fp64 with
# its scales.
USUAL_SHARE, SLOW_SHARE, TRUTH_SHARE = 0.6, 0.12, 0.02
USUAL_GFLOPS = 100.0
COMPILE_S, START_S = 10.0, 0.3
PROCESS_S = 2.5  # for one to start, several at a time


def expected_s(bench: Bench, case: Case, latency: bool) -> float:
    """About how long a case takes."""
    peak = bench.peaks.fma_gflops("float32", bench.threads) if bench.peaks else None
    flops_s = 1e9 * (peak or USUAL_GFLOPS)
    names = [name for name in bench.names if not why_not(bench, name, case)]
    flops, others = case.flops, len(names) - 1
    visits_s = 0.0
    for name in names:
        slow = case.dtype != "float32" and name not in bench.backends
        call_s = 20e-6 + flops / ((SLOW_SHARE if slow else USUAL_SHARE) * flops_s)
        visits_s += 2 * max(call_s, 3e-3 if bench.cold or case.cold else 1e-3)
    training = case.training is not None
    most_s = MOST_TRAINING_S if training else MOST_CELL_S
    total_s = START_S + max(bench.seconds * others, min(1.2 * MIN_ROUNDS * visits_s, most_s))
    judged = flops if training else case.mlp.flops(min(case.rows, JUDGED_ROWS))
    total_s += judged / (TRUTH_SHARE * flops_s)
    total_s += COMPILE_S * (1 + training) * sum(name.startswith("compile") for name in names)
    if latency:
        total_s += bench.seconds * (others + 1)
    if bench.callers:
        total_s += max(bench.seconds * others, 3.0 * MIN_ROUNDS * WINDOW_S * (others + 2))
    return total_s


def startup_s(bench: Bench) -> float:
    """About how long it takes until the first cell begins."""
    apart = bench.training or any(map(is_apart, bench.names))
    return PROCESS_S * len(bench.names) if apart else 0.0


class Pace:
    """How far a run is: expected seconds per cell, corrected by what finished cells have taken."""

    def __init__(self, shares_s: Sequence[float]) -> None:
        self._shares_s, self._done = list(shares_s), 0
        self._begun_s = time.perf_counter()

    def one_done(self) -> None:
        self._done += 1

    @property
    def left_s(self) -> float:
        done_s = sum(self._shares_s[: self._done])
        pace = (time.perf_counter() - self._begun_s) / done_s if done_s else 1.0
        return pace * sum(self._shares_s[self._done :])

    def __str__(self) -> str:
        left_s = self.left_s
        text = f"{left_s / 60:.0f} min" if left_s >= 90 else f"{max(left_s, 1):.0f} s"
        return f"{self._done + 1} of {len(self._shares_s)}, about {text} left"
