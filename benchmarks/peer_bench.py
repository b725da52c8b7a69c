"""Measures the cells: verifies every runtime at a spot, then compares them, torchweld as baseline.

`Bench.measure` takes a spot of the grid and gives a `Cell`.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from peer_grid import FIXED, Spot, takes_part
from peer_summary import Cell
from torch import Tensor

from torchweld.bench.block_truth import BlockTruth
from torchweld.bench.cases import SEED, MlpShape
from torchweld.bench.eager_block import BlockSource
from torchweld.bench.stage_timing import MIN_ROUNDS, paired
from torchweld.bench.stages import ProcessSide, ProcessStage
from torchweld.bench.workers.worker_process import WorkerError
from torchweld.core.errors import TorchweldError
from torchweld.timing import Comparison, Side

# A burst of other work spoils the rounds it meets, and a comparison that cannot get enough of them
# gives up early; in an hour some cells meet one. Each attempt takes longer than the one before.
ATTEMPTS = 3
PROBE_S = 0.2


class Bench:
    """Measures spots, keeping what the workers have loaded for as long as it serves."""

    def __init__(self, stage: ProcessStage, seconds: float, spots: Sequence[Spot]) -> None:
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

    def _compared(self, others: Sequence[str], spot: Spot) -> dict[str, Comparison]:
        names = ["torchweld", *others]
        sides = [ProcessSide(self.stage, name, spot.cold) for name in names]
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
            self.stage.ask(name, "load", BlockSource(mlp=block, dtype=dtype))
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
