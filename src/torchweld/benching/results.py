"""What a bench found: dataclasses that save to JSON and load again."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torchweld.benching.cases import Case, Mlp
from torchweld.errors import TorchweldError
from torchweld.hardware import Peaks
from torchweld.measuring import Comparison

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
    error_ratio: float
    row_ratio: float
    rms_ratio: float
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

    ops: int | None = None
    buffers: int | None = None
    host_us: float | None = None
    cpu_us: float | None = None
    cuda_us: float | None = None


@dataclass(frozen=True, kw_only=True)
class Latency:
    """Single calls, as a user meets them."""

    calls_us: tuple[float, ...]

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
    us: float = math.nan
    kernel: str = ""
    check: Check | None = None
    refused: str = ""
    comparison: Comparison | None = None
    cost: Cost = field(default_factory=Cost)
    copied_bytes: int = 0
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
    flops: int
    moved_bytes: int
    weight_bytes: int
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
    threads: int
    backends: tuple[str, ...]
    against: tuple[str, ...]
    cold: bool
    seconds: float
    seed: int
    left_out: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    target: str = ""
    preset: str = ""
    callers: int = 0
    peaks: Peaks | None = None
    cache: int = 0
    cells: tuple[Cell, ...] = ()
    interrupted: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """Everybody, eager first and ours last, as columns stand."""
        return ("eager", *self.against, *reversed(self.backends))

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
        gbps = self._gbps(self.peaks, cell.moved_bytes)
        if not gflops or not gbps:
            return None
        compute_us, memory_us = cell.flops / (1e3 * gflops), cell.moved_bytes / (1e3 * gbps)
        what = "compute" if compute_us >= memory_us else "memory"
        return max(compute_us, memory_us) / us, what

    def _gbps(self, peaks: Peaks, size: int) -> float | None:
        """The rate measured for a working set that lies where this one does: in cache, or not."""
        if self.cold:
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
        given = (data.get("kind"), data.get("version"))
        if given != (KIND, VERSION):
            raise TorchweldError(
                f"kind and version are {given}, and must be {(KIND, VERSION)}; load what "
                "torchweld bench --json wrote with the same release"
            )
        fields = {f.name: data[f.name] for f in dataclasses.fields(Bench)}
        for name in ("backends", "against", "notes"):
            fields[name] = tuple(fields[name])
        if fields["peaks"] is not None:
            fields["peaks"] = Peaks.from_json(json.dumps(fields["peaks"]))
        fields["cells"] = tuple(_cell(cell) for cell in data["cells"])
        return Bench(**fields)

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), allow_nan=False, ensure_ascii=False)


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


def _cell(data: Mapping[str, Any]) -> Cell:
    case = data["case"]
    if case is not None:
        mlp = Mlp(**{**case["mlp"], "sizes": tuple(case["mlp"]["sizes"])})
        case = Case(**{**case, "mlp": mlp, "lead": tuple(case["lead"])})
    results = tuple(_result(result) for result in data["results"])
    return Cell(**{**data, "case": case, "results": results})


def _result(data: Mapping[str, Any]) -> Result:
    check, latency = data["check"], data["latency"]
    restored: dict[str, Any] = {"us": float(data["us"]), "cost": Cost(**data["cost"])}
    if check is not None:
        ratios = {name: float(check[name]) for name in ("error_ratio", "row_ratio", "rms_ratio")}
        restored["check"] = Check(**{**check, **ratios})
    if latency is not None:
        restored["latency"] = Latency(calls_us=tuple(latency["calls_us"]))
    for name in ("comparison", "callers"):
        if data[name] is not None:
            restored[name] = Comparison.from_dict(data[name])
    return Result(**{**data, **restored})
