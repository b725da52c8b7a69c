"""What a bench found: dataclasses that save to JSON and load again."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from torchweld.benching.cases import Case
from torchweld.errors import TorchweldError
from torchweld.hardware import Peaks
from torchweld.measuring import Comparison
from torchweld.records import Count, Length, Measured, Ratio, from_plain, short

KIND, VERSION = "torchweld.bench", 2
PERCENTILES = (50, 95, 99)
# So many calls have to lie beyond a percentile for it to be one.
CALLS_BEYOND = 5


@dataclass(frozen=True, kw_only=True)
class Check:
    """The numerical rule on one output, ratios being to what it allows.

    `error_ratio`: the largest error to eager's largest; NaN where eager is exact.
    """

    ok: bool
    error_ratio: Measured
    row_ratio: Measured
    rms_ratio: Measured
    reason: str | None


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a call costs beside its time; None where that cannot be told.

    ops, buffers: what it dispatches and allocates; None too where an op leaves the work to torch
    host_us:      Python, dispatch and allocation: the same call with nothing to compute; of a whole
                  model, by its profile
    cpu_us:       processor time of all threads
    cuda_us:      on a CUDA device, where there is one and it was asked for
    """

    ops: Count | None = None
    buffers: Count | None = None
    host_us: Measured | None = None
    cpu_us: Measured | None = None
    cuda_us: Measured | None = None


@dataclass(frozen=True, kw_only=True)
class Latency:
    """Single calls, as a user meets them."""

    calls_us: tuple[Ratio, ...]

    def percentile(self, percent: int) -> float:
        """NaN where too few calls lie beyond it."""
        ordered = sorted(self.calls_us)
        if len(ordered) * (100 - percent) / 100 < CALLS_BEYOND:
            return math.nan
        place = (len(ordered) - 1) * percent / 100
        low = int(place)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (place - low) * (ordered[high] - ordered[low])


@dataclass(frozen=True, kw_only=True)
class Result:
    """One implementation in one cell.

    us:         a call, the median over rounds; NaN where nothing was timed
    check:      None for eager, which others are judged beside, and where it did not run
    refused:    why nothing was timed
    comparison: with eager; None for eager
    callers:    the same with several callers at once; `us` in it are between calls that finish
    """

    name: str
    us: Ratio = math.nan
    kernel: str = ""
    check: Check | None = None
    refused: str = ""
    comparison: Comparison | None = None
    cost: Cost = field(default_factory=Cost)
    copied_bytes: Count = 0
    latency: Latency | None = None
    callers: Comparison | None = None

    @property
    def measured(self) -> bool:
        """Whether there is a verdict on it."""
        return self.comparison is not None and self.comparison.verdict != "not measured"


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One shape, eager first, then everybody else in the order of `Bench.names`.

    name:        as it is found again: in the history, in CSV
    case:        None for a whole model
    moved_bytes: what has to move at least: weights, inputs and outputs, each once
    """

    name: str
    case: Case | None
    dtype: str
    flops: Count
    moved_bytes: Count
    weight_bytes: Count
    results: tuple[Result, ...]

    def result(self, name: str) -> Result:
        return next(result for result in self.results if result.name == name)

    def gflops(self, name: str) -> float:
        return self.flops / (1e3 * self.result(name).us)

    def gbps(self, name: str) -> float:
        return self.moved_bytes / (1e3 * self.result(name).us)


@dataclass(frozen=True, kw_only=True)
class Bench:
    """All cells, and what they were measured with.

    backends: ours, the first of which is judged
    against:  the peers that take part
    left_out: who does not, and why
    notes:    what a reader has to know
    target:   the whole model that was measured; empty for blocks
    preset:   the series that was measured, where it has a name
    peaks:    what the machine was seen to do at best
    cache:    bytes of its last-level cache
    """

    torch: str
    cpu: str
    isa: str | None
    threads: Count
    backends: Annotated[tuple[str, ...], Length(1)]
    against: tuple[str, ...]
    cold: bool
    seconds: float
    seed: int
    left_out: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    target: str = ""
    preset: str = ""
    callers: Count = 0
    peaks: Peaks | None = None
    cache: Count = 0
    cells: tuple[Cell, ...] = ()
    interrupted: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """Everybody, eager first and ours last, as columns stand."""
        return ("eager", *self.against, *reversed(self.backends))

    def problems(self) -> Iterator[str]:
        """What is wrong with one that was read from a file."""
        for i, cell in enumerate(self.cells):
            there = [result.name for result in cell.results]
            if sorted(there) != sorted(self.names):
                listed = ", ".join(there) or "nobody"
                yield f"has cells[{i}] with results of {listed}; needed are {', '.join(self.names)}"

    @property
    def first(self) -> str:
        return self.backends[0]

    def of_peak(self, cell: Cell, name: str) -> tuple[float, str] | None:
        """The share of what this machine allows for the cell, and what holds it back.

        The least time is that of its FLOPs at the peak, or of its bytes at the bandwidth measured
        for so many: whichever is longer.
        """
        us = cell.result(name).us
        if self.peaks is None or not math.isfinite(us):
            return None
        gflops = self.peaks.fma_gflops(cell.dtype, self.threads)
        cold = self.cold or (cell.case is not None and cell.case.cold)
        gbps = self._gbps(self.peaks, cell.moved_bytes, cold)
        if not gflops or not gbps:
            return None
        compute_us, memory_us = cell.flops / (1e3 * gflops), cell.moved_bytes / (1e3 * gbps)
        what = "compute" if compute_us >= memory_us else "memory"
        return max(compute_us, memory_us) / us, what

    def _gbps(self, peaks: Peaks, size: int, cold: bool) -> float | None:
        """The rate measured for a working set that lies where this one does: in cache, or not."""
        if cold:
            return peaks.read_gbps(1 << 62, self.threads)
        cached = [
            row.working_set_bytes for row in peaks.read if row.working_set_bytes <= self.cache
        ]
        if size <= self.cache and cached:
            size = min(size, max(cached))
        return peaks.read_gbps(size, self.threads)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; a float that JSON cannot hold becomes "nan" or "inf"."""
        return {"kind": KIND, "version": VERSION, **_plain(self)}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Bench:
        """The opposite of `to_dict`; a TorchweldError that says what does not fit."""
        if not isinstance(data, Mapping):
            raise TorchweldError(f"the bench is a {type(data).__name__}, no object")
        given = data.get("kind"), data.get("version")
        if given != (KIND, VERSION):
            raise TorchweldError(
                f"kind and version are {' and '.join(map(short, given))}, and must be {KIND!r} and "
                f"{VERSION}; load what torchweld bench --json wrote with the same release"
            )
        return from_plain(Bench, _unmarked(dict(data)), "bench")

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), allow_nan=False)


def plain_cell(cell: Cell) -> dict[str, Any]:
    """A cell as JSON has it."""
    data: dict[str, Any] = _plain(cell)
    return data


def _plain(value: Any) -> Any:
    if isinstance(value, Comparison):
        return value.to_dict()
    if dataclasses.is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _unmarked(data: Any) -> Any:
    """Without the kind and version of the bench, and of each comparison in it."""
    if isinstance(data, list):
        return [_unmarked(item) for item in data]
    if not isinstance(data, dict):
        return data
    kept = {name: item for name, item in data.items() if name not in ("kind", "version")}
    for name in ("cells", "results", "comparison", "callers"):
        if isinstance(kept.get(name), (list, dict)):
            kept[name] = _unmarked(kept[name])
    return kept
