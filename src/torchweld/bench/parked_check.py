"""Whether sides that wait their turn leave the one that runs alone: the proof that parking works.

In: names of block runtimes. Out: a `ParkedCheck`, whose sentences go into the notes of a bench. One
block is timed in eager right after each other process was driven and parked, and again when that
has long been idle.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchweld.bench.bench_cases import Case
from torchweld.bench.bench_grid import BLOCKS
from torchweld.bench.bench_stages import Stage, StageSide
from torchweld.bench.eager_block import BlockSource
from torchweld.bench.stage_timing import paired
from torchweld.bench.workers.worker_process import WorkerError, WorkerProcess
from torchweld.core.not_measured import NotMeasured
from torchweld.timing import Comparison

CASE = Case(mlp=BLOCKS["small"], lead=(32,))
EQUAL_WITHIN = 1.03
IDLE_S = 0.1  # longer than any pool spins; ONNX Runtime's does for 70 ms
# A busy machine spoils rounds; twice the time finds enough of them.
PATIENCE = 2


@dataclass(frozen=True, kw_only=True)
class ParkedCheck:
    """Eager beside parked processes, against eager alone: the ratio has to be 1.

    beside: eager when a process has long been idle, against eager right after it was driven
    cpu_ms: processor time of each process right after its calls: left to run, and parked
    """

    beside: Mapping[str, Comparison]
    cpu_ms: Mapping[str, tuple[float, float]]

    def sentences(self) -> Iterator[str]:
        for name, (running_ms, parked_ms) in self.cpu_ms.items():
            yield (
                f"{name} in the {IDLE_S * 1e3:.0f} ms after its calls: {running_ms:.1f} ms of "
                f"processor time if left to run, {parked_ms:.1f} ms parked"
            )
        for name, comparison in self.beside.items():
            yield f"eager right after {name}: {_beside_words(comparison)}"


def _beside_words(comparison: Comparison) -> str:
    if isinstance(comparison.interval, NotMeasured) or isinstance(comparison.speedup, NotMeasured):
        return str(comparison.interval)
    low, high = comparison.interval
    if low > 1 / EQUAL_WITHIN and high < EQUAL_WITHIN:
        word = "equal"
    elif high < 1.0 or low > 1.0:
        word = "NOT EQUAL: do not trust the cells it took part in"
    else:
        word = "equal as far as can be told"
    span = f"{1 / high:.3f} to {1 / low:.3f}"
    return f"{1 / comparison.speedup:.3f} of its time alone ({span}), {word}"


def check_parking(names: Sequence[str], threads: int, seconds: float, seed: int) -> ParkedCheck:
    """`names` includes eager. A side that cannot run the block is left out; the cells say why."""
    beside: dict[str, Comparison] = {}
    cpu_ms: dict[str, tuple[float, float]] = {}
    with Stage(threads, processes=True) as stage:
        stage.start(names)
        for name in stage.names:
            try:
                stage.ask(name, "load", BlockSource(mlp=CASE.mlp, seed=seed))
                stage.ask(name, "prepare", *CASE.lead)
            except WorkerError:
                continue
            running_s, parked_s = (_cpu_after_call_s(stage, name, park) for park in (False, True))
            if math.isfinite(running_s + parked_s):
                cpu_ms[name] = (running_s * 1e3, parked_s * 1e3)
            if name != "eager":
                beside |= paired(
                    [EagerAfter(stage, name, gap_s) for gap_s in (IDLE_S, 0.0)],
                    ["eager alone", name],
                    seconds=seconds,
                    threads=threads,
                    seed=seed,
                    patience=PATIENCE,
                )
    return ParkedCheck(beside=beside, cpu_ms=cpu_ms)


def _cpu_after_call_s(stage: Stage, name: str, parked: bool) -> float:
    """Processor time that a side uses in the `IDLE_S` seconds after a call."""
    stage.ask(name, "visit", 1, False)
    if parked:
        stage.park_all()
    worker = stage.workers[name]
    assert isinstance(worker, WorkerProcess)
    before_s = cpu_s(worker.pid)
    time.sleep(IDLE_S)
    return cpu_s(worker.pid) - before_s


def cpu_s(pid: int) -> float:
    """Processor time of all threads of a process so far; NaN where the system does not tell."""
    files = list(Path(f"/proc/{pid}/task").glob("*/schedstat"))
    return sum(int(f.read_text().split()[0]) for f in files) / 1e9 if files else math.nan


class EagerAfter(StageSide):
    """Eager, timed after `before` was driven and parked: at once, or when `gap_s` have passed.

    The caches are in the same state either way, so only a pool that still runs makes a difference.
    """

    def __init__(self, stage: Stage, before: str, gap_s: float) -> None:
        super().__init__(stage, "eager")
        self._before, self._gap_s = before, gap_s

    def time(self, calls: int) -> float:
        self._stage.ask(self._before, "visit", calls, False)
        self._stage.park_all()
        time.sleep(self._gap_s)
        return super().time(calls)
