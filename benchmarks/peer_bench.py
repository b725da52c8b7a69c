"""Measures the cells: verifies every runtime at a spot, then compares them, torchweld as baseline.

`Bench.measure` takes a spot of the grid and gives a `Cell`. `Parked` is the proof that the runtimes
which wait their turn do not disturb the one that runs.
"""

import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from peer_grid import BLOCKS, FIXED, Spot, takes_part
from peer_summary import Cell
from torch import Tensor

from torchweld.bench.block_truth import BlockTruth
from torchweld.bench.cases import SEED, MlpShape
from torchweld.bench.stage_timing import MIN_ROUNDS, paired
from torchweld.bench.worker_processes import AfterSide, Stage, WorkerError, WorkerSide
from torchweld.core.errors import TorchweldError
from torchweld.core.not_measured import NotMeasured
from torchweld.timing import Comparison, Side

# A burst of other work spoils the rounds it meets, and a comparison that cannot get enough of them
# gives up early; in an hour some cells meet one. Each attempt takes longer than the one before.
ATTEMPTS = 3
PROBE_S = 0.2

CHECK_BLOCK, CHECK_ROWS = BLOCKS[2], 32
CHECK_WITHIN = 1.03
IDLE_S = 0.1  # longer than any pool spins; ONNX Runtime's does for 70 ms


@dataclass(frozen=True, kw_only=True)
class Parked:
    """Torch beside the others, parked, against torch alone: 1 is what it has to be.

    alone_us:  eager's time before any other process was started
    beside:    eager when all have long been idle, against eager right after each was driven
    cpu_ms:    processor time of each right after it was driven: left to run, and parked
    """

    alone_us: float
    beside: Mapping[str, Comparison]
    cpu_ms: Mapping[str, tuple[float, float]]

    def sentences(self) -> Iterator[str]:
        for name, (running_ms, parked_ms) in self.cpu_ms.items():
            yield (
                f"{name} in the {IDLE_S * 1e3:.0f} ms after its calls: {running_ms:.1f} ms of "
                f"processor time if left to run, {parked_ms:.1f} ms parked"
            )
        for name, comparison in self.beside.items():
            if isinstance(comparison.interval, NotMeasured):
                yield f"eager right after {name}: {comparison.interval}"
                continue
            low, high = comparison.interval
            if low > 1 / CHECK_WITHIN and high < CHECK_WITHIN:
                word = "equal"
            elif high < 1.0 or low > 1.0:
                word = "NOT EQUAL: do not trust the cells it took part in"
            else:
                word = "equal as far as can be told"
            span = f"{1 / high:.3f} to {1 / low:.3f}"
            ratio = 1.0 / comparison.speedup
            yield f"eager right after {name}: {ratio:.3f} of its time alone ({span}), {word}"
        times = [comparison.baseline_us for comparison in self.beside.values()]
        now_us = [us for us in times if not isinstance(us, NotMeasured)]
        if now_us:
            ratio = statistics.median(now_us) / self.alone_us
            yield (
                f"eager with all others parked: {ratio:.3f} of its time before they were started "
                f"({self.alone_us:.1f} µs); not paired, so the machine's drift is in it"
            )


class Bench:
    """Measures spots, keeping what the workers have loaded for as long as it serves."""

    def __init__(self, stage: Stage, seconds: float, spots: Sequence[Spot]) -> None:
        self.stage, self.seconds, self.spots = stage, seconds, spots
        self.peaks_gflops: list[float] = []
        self._loaded: dict[str, tuple[MlpShape, str]] = {}
        self._prepared: dict[str, tuple[MlpShape, str, int]] = {}
        self._outputs: dict[str, Tensor] = {}
        self._truth: tuple[tuple[MlpShape, str], BlockTruth] | None = None

    def measure(self, spot: Spot) -> Cell:
        names = [name for name in self.stage.workers if takes_part(name, spot)]
        errors: dict[str, float] = {}
        refused: dict[str, str] = {}
        for name in ("eager", *(name for name in names if name != "eager")):
            problem = self._problem(name, spot)
            if problem is not None:
                refused[name] = problem
            if name in self._outputs:
                errors[name] = self._truth_of(spot).error(self._outputs[name])
        comparisons: dict[str, Comparison] = {}
        if not refused.keys() & set(FIXED):
            others = [name for name in names if name not in refused and name != "torchweld"]
            try:
                comparisons = self._compared(others, spot)
            except TorchweldError as error:
                refused["timing"] = str(error)
        return Cell(
            spot=spot,
            comparisons=comparisons,
            errors=errors,
            refused=refused,
            details={name: self._details(name) for name in names if name not in refused},
        )

    def probe_peak(self) -> None:
        """Adds a figure of the FMA peak; the best of all is taken, for a share never too kind."""
        self.peaks_gflops.append(self.stage.ask("torchweld", "fma_gflops", PROBE_S))

    def eager_us(self) -> float:
        """Eager alone at the spot of the parked check."""
        self._prepare("eager", CHECK_BLOCK, "float32", CHECK_ROWS)
        side, begun_s = WorkerSide(self.stage, "eager"), time.perf_counter()
        found: list[float] = []
        while len(found) < MIN_ROUNDS or time.perf_counter() - begun_s < self.seconds / 2:
            found.append(side.time(2) / 2)
        return statistics.median(found) * 1e6

    def parked(self, alone_us: float) -> Parked:
        """Whether a parked process costs the running one anything."""
        beside, cpu_ms = {}, {}
        for name in self.stage.workers:
            if not self._can_prepare(name):  # the grid says why
                continue
            cpu_s = [self.stage.cpu_after_visit_s(name, IDLE_S, parked) for parked in (False, True)]
            if all(math.isfinite(seconds) for seconds in cpu_s):
                cpu_ms[name] = (cpu_s[0] * 1e3, cpu_s[1] * 1e3)
            if name != "eager":
                sides = [AfterSide(self.stage, "eager", name, gap_s) for gap_s in (IDLE_S, 0.0)]
                beside.update(self._paired(sides, ["eager alone", name], patience=2))
        return Parked(alone_us=alone_us, beside=beside, cpu_ms=cpu_ms)

    def _can_prepare(self, name: str) -> bool:
        try:
            self._prepare(name, CHECK_BLOCK, "float32", CHECK_ROWS)
        except WorkerError:
            return False
        return True

    def _compared(self, others: Sequence[str], spot: Spot) -> dict[str, Comparison]:
        names = ["torchweld", *others]
        sides = [WorkerSide(self.stage, name, spot.cold) for name in names]
        for attempt in range(ATTEMPTS):
            found = self._paired(sides, names, patience=attempt + 1)
            if all(comparison.rounds >= MIN_ROUNDS for comparison in found.values()):
                break
        return {name: replace(comparison, cold=spot.cold) for name, comparison in found.items()}

    def _paired(
        self, sides: Sequence[Side], names: Sequence[str], patience: int = 1
    ) -> dict[str, Comparison]:
        return paired(
            sides,
            names,
            seconds=self.seconds,
            threads=self.stage.threads,
            seed=SEED,
            patience=patience,
        )

    def _problem(self, name: str, spot: Spot) -> str | None:
        """Why a runtime cannot be timed at a spot: it cannot run there, or its output is wrong."""
        try:
            self._prepare(name, spot.block, spot.dtype, spot.rows)
        except WorkerError as error:
            return str(error)
        eager = None if name == "eager" else self._outputs.get("eager")
        reason = self._truth_of(spot).judge(self._outputs[name], eager).reason
        return None if reason is None else f"wrong: {reason}"

    def _prepare(self, name: str, block: MlpShape, dtype: str, rows: int) -> None:
        """Gets a worker ready, if it is not, and keeps its output."""
        if self._prepared.get(name) == (block, dtype, rows):
            return
        self._prepared.pop(name, None)
        self._outputs.pop(name, None)
        if self._loaded.get(name) != (block, dtype):
            self._loaded.pop(name, None)
            self.stage.ask(name, "load", block, dtype)
            self._loaded[name] = (block, dtype)
        (output,) = self.stage.ask(name, "prepare", rows)
        self._outputs[name] = torch.from_numpy(output).to(getattr(torch, dtype))
        self._prepared[name] = (block, dtype, rows)

    def _truth_of(self, spot: Spot) -> BlockTruth:
        key = (spot.block, spot.dtype)
        if self._truth is None or self._truth[0] != key or len(self._truth[1].scale) < spot.rows:
            rows = max(other.rows for other in (spot, *self.spots) if other.block == spot.block)
            self.stage.park_all()
            with torch.no_grad():
                self._truth = (key, BlockTruth.of(spot.block, getattr(torch, spot.dtype), rows))
        return self._truth[1]

    def _details(self, name: str) -> dict[str, Any]:
        try:
            return dict(self.stage.ask(name, "details"))
        except WorkerError as error:
            return {"gone": str(error)}
