"""What a bench found: dataclasses that save to JSON and load again.

A figure that could not be measured is a `NotMeasured` with its reason. None stands where a figure
does not apply, or was not asked for. A part is never larger than its whole: if noise made it so,
the part counts as not measured.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from torchweld.bench.bench_cases import Case, ModelCase
from torchweld.bench.earlier_benches import UPGRADES
from torchweld.bench.kernel_counts import KernelCost
from torchweld.core.html_shown import ShownAsPage
from torchweld.core.not_measured import NotMeasured
from torchweld.core.record_fields import MOST_FLOAT, Amount, Bounds, Count, Length
from torchweld.core.record_format import RecordFormat
from torchweld.core.saved_records import SavedRecord
from torchweld.machine.gpu_identity import Gpu
from torchweld.machine.measured_peaks import TOLERATED_EXCESS, Peaks
from torchweld.profiles.accounting.device_peaks import peaks_of
from torchweld.timing import Comparison

PERCENTILES = (50, 95, 99)
# A percentile needs at least this many calls beyond it.
CALLS_BEYOND = 5
TOO_LOW = (
    "the call took less than the least time by this machine's kept peaks, so these are too low; "
    "torchweld info --measure renews them"
)
GPU_TOO_FAST = (
    "the call took less than the least time by the published peaks: its data were in the cache, or "
    "the clock was above the one they are for"
)
# Why there is no ratio of errors.
EXACT, NOT_FINITE = "eager's own error is 0", "the output is not finite"
# The time of a call is never zero.
Time = Annotated[float, Bounds(1 / MOST_FLOAT)]


def told(value: float, why: str) -> float | NotMeasured:
    """`value`; not measured, because of `why`, where it is not a number."""
    return min(value, MOST_FLOAT) if math.isfinite(value) else NotMeasured(why)


def error_ratio(error: float, eager_error: float) -> float | NotMeasured:
    """The error as a multiple of eager's."""
    if not math.isfinite(error):
        return NotMeasured(NOT_FINITE)
    return told(error / eager_error, NOT_FINITE) if eager_error else NotMeasured(EXACT)


def largest_of(values: Sequence[float | NotMeasured]) -> float | NotMeasured:
    """The largest measured value; if there is none, the first NotMeasured."""
    known = [value for value in values if not isinstance(value, NotMeasured)]
    unknown = [value for value in values if isinstance(value, NotMeasured)]
    if known:
        return max(known)
    return unknown[0] if unknown else NotMeasured("nothing was verified")


@dataclass(frozen=True, kw_only=True)
class OutputCheck:
    """The numerical rule on one output; ratios are to what the rule allows.

    `error_ratio`: the largest error to eager's largest; not measured where eager is exact. None is
    measured where an output is not finite.
    """

    ok: bool
    error_ratio: Amount | NotMeasured
    row_ratio: Amount | NotMeasured
    rms_ratio: Amount | NotMeasured
    reason: str | None


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a call costs besides its time; None where that is unknown.

    ops, buffers: what it dispatches and allocates; None too where an op leaves the work to torch
    host_us:      Python, dispatch and allocation: the same call with nothing to compute; of a whole
                  model, by its profile. At most the time of the call
    cpu_us:       processor time of all threads; at most the time of the call on every CPU
    cuda_us:      on a CUDA device, where there is one and it was asked for
    kernels:      of a bench on a GPU: what a call launches there. `host_us` is then the time until
                  the call returns, while its kernels may still run
    """

    ops: Count | None = None
    buffers: Count | None = None
    host_us: Amount | NotMeasured | None = None
    cpu_us: Amount | NotMeasured | None = None
    cuda_us: Amount | None = None
    kernels: KernelCost | NotMeasured | None = None


@dataclass(frozen=True, kw_only=True)
class TrainingCost:
    """What a step of training costs besides its time.

    saved_bytes: what the forward keeps for the backward; parameters are not counted
    faults:      minor page faults per step: fresh pages that the system has to clear
    peak_bytes:  the most memory that the side's process held while it took steps
    """

    saved_bytes: Count | NotMeasured
    faults: Amount | NotMeasured
    peak_bytes: Count | NotMeasured


@dataclass(frozen=True, kw_only=True)
class Latency:
    """Single calls, as a user meets them."""

    calls_us: tuple[Time, ...]

    def percentile(self, percent: int) -> float | NotMeasured:
        """The time that `percent` of the calls stay below; not measured with too few calls."""
        ordered = sorted(self.calls_us)
        needed = math.ceil(CALLS_BEYOND * 100 / (100 - percent))
        if len(ordered) < needed:
            return NotMeasured(f"p{percent} needs {needed} calls, and there are {len(ordered)}")
        place = (len(ordered) - 1) * percent / 100
        low = int(place)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (place - low) * (ordered[high] - ordered[low])


@dataclass(frozen=True, kw_only=True)
class Result:
    """One implementation in one cell.

    us:         a call, the median over rounds
    check:      None for eager, which others are judged beside, and where it did not run
    refused:    why it did not take part, or was not timed; None where it was
    comparison: with eager; None for eager
    callers:    the same with several callers at once; `us` in it are between calls that finish
    training:   of a step of training; None elsewhere, and where it did not run
    """

    name: str
    us: Time | NotMeasured = NotMeasured("it was not timed")
    kernel: str = ""
    check: OutputCheck | None = None
    refused: str | None = None
    comparison: Comparison | None = None
    cost: Cost = field(default_factory=Cost)
    copied_bytes: Count = 0
    latency: Latency | None = None
    callers: Comparison | None = None
    training: TrainingCost | None = None

    @property
    def measured(self) -> bool:
        """Whether there is a verdict on it."""
        return self.comparison is not None and self.comparison.verdict != "not measured"

    @property
    def why_not(self) -> str:
        """Why there is no verdict, or the reason of the verdict that there is."""
        if self.comparison is not None:
            return self.comparison.reason
        return self.us.reason if isinstance(self.us, NotMeasured) else "it was not compared"

    def left_out(self, reason: str) -> Result:
        """The same, not timed for this reason."""
        return dataclasses.replace(self, refused=reason, us=NotMeasured(reason))


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One shape, eager first, then everybody else in the order of `Bench.names`.

    name:        as it is found again: in the history, in CSV
    case:        None for a whole model
    model:       of a whole model in training: what was measured
    moved_bytes: what has to move at least: weights, inputs and outputs, each once
    """

    name: str
    case: Case | None
    dtype: str
    flops: Count
    moved_bytes: Count
    weight_bytes: Count
    results: tuple[Result, ...]
    model: ModelCase | None = None

    @property
    def what(self) -> Case | ModelCase | None:
        """What was measured; None for a whole model without gradients."""
        return self.case or self.model

    def saved_ratio(self, name: str) -> float | NotMeasured | None:
        """Bytes saved for the backward, over eager's; None where they were not counted."""
        costs = [self.result(one).training for one in (name, "eager")]
        if any(cost is None for cost in costs):
            return None
        own, eager = (cost.saved_bytes for cost in costs if cost is not None)
        if isinstance(own, NotMeasured) or isinstance(eager, NotMeasured):
            return own if isinstance(own, NotMeasured) else eager
        return own / eager if eager else NotMeasured("eager saves nothing")

    def result(self, name: str) -> Result:
        return next(result for result in self.results if result.name == name)

    def gflops(self, name: str) -> float | NotMeasured:
        us = self.result(name).us
        return us if isinstance(us, NotMeasured) else self.flops / (1e3 * us)

    def gbps(self, name: str) -> float | NotMeasured:
        us = self.result(name).us
        return us if isinstance(us, NotMeasured) else self.moved_bytes / (1e3 * us)


@dataclass(frozen=True, kw_only=True)
class Bench(ShownAsPage, SavedRecord):
    """All cells, and what they were measured with.

    backends: ours, the first of which is judged
    against:  the peers that take part
    left_out: who does not, and why
    notes:    what a reader has to know
    target:   the whole model that was measured; empty for blocks
    preset:   the series that was measured, where it has a name
    training: cells are steps of training
    native_bf16: whether the CPU multiplies bfloat16 itself, and torch may use that; None: unknown
    peaks:    what the machine was seen to do at best
    cache:    bytes of its last-level cache
    busy_cores: what others took of the machine when the bench began
    device:   where blocks are measured: "cpu", "cuda", "cuda:1"
    gpu:      what that is; None for the CPU
    versions: of what takes part there, where a GPU does
    """

    FORMAT = RecordFormat(
        what="bench",
        version=5,
        upgrades=UPGRADES,
        remedy="measure it again with torchweld bench, or use the torchweld that saved it",
        by_kind=True,
        all_fields=True,
    )

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
    training: bool = False
    native_bf16: bool | None = None
    callers: Count = 0
    peaks: Peaks | None = None
    cache: Count = 0
    busy_cores: Amount | NotMeasured = NotMeasured("nobody looked")
    cells: tuple[Cell, ...] = ()
    interrupted: bool = False
    device: str = "cpu"
    gpu: Gpu | None = None
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def on_gpu(self) -> bool:
        return self.device != "cpu"

    @property
    def names(self) -> tuple[str, ...]:
        """Everybody, eager first and ours last, as columns stand."""
        return ("eager", *self.against, *reversed(self.backends))

    def problems(self) -> Iterator[str]:
        """What is wrong with a record that was read from a file."""
        for i, cell in enumerate(self.cells):
            there = [result.name for result in cell.results]
            if sorted(there) != sorted(self.names):
                listed = ", ".join(there) or "nobody"
                yield f"has cells[{i}] with results of {listed}; needed are {', '.join(self.names)}"

    @property
    def first(self) -> str:
        return self.backends[0]

    def of_peak(self, cell: Cell, name: str) -> tuple[float, str] | NotMeasured:
        """The share of what this machine allows for the cell, 1 at most, and what holds it back.

        The least time is that of its FLOPs at the peak, or of its bytes at the bandwidth measured
        for so many: whichever is longer. A call that took less than that shows that the peaks are
        too low, and has no share.
        """
        us = cell.result(name).us
        if isinstance(us, NotMeasured):
            return us
        if self.gpu is not None:
            return _of_gpu_peak(self.gpu, cell, us)
        if self.peaks is None:
            return NotMeasured("this machine's peaks were not measured")
        gflops = self.peaks.fma_gflops(cell.dtype, self.threads)
        cold = self.cold or (cell.case is not None and cell.case.cold)
        gbps = self._gbps(self.peaks, cell.moved_bytes, cold)
        if not gflops or not gbps:
            threads = f"{self.threads} thread{'s' if self.threads != 1 else ''}"
            return NotMeasured(f"no peak was measured for {cell.dtype} on {threads}")
        compute_us, memory_us = cell.flops / (1e3 * gflops), cell.moved_bytes / (1e3 * gbps)
        what = "compute" if compute_us >= memory_us else "memory"
        share = max(compute_us, memory_us) / us
        # A small excess is within the error of both, as for probes.
        return NotMeasured(TOO_LOW) if share > TOLERATED_EXCESS else (min(share, 1.0), what)

    @property
    def peaks_known(self) -> bool:
        """Whether shares of a peak can be had."""
        if self.gpu is not None:
            return peaks_of(self.gpu.name)[1] is not None
        return self.peaks is not None

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


def _of_gpu_peak(gpu: Gpu, cell: Cell, us: float) -> tuple[float, str] | NotMeasured:
    """The share of the peak that the vendor publishes for the device's name, and what limits it."""
    by_dtype, gbps = peaks_of(gpu.name)
    gflops = by_dtype.get(cell.dtype)
    if not gflops or not gbps:
        return NotMeasured(f"no published peak of {gpu.name} for {cell.dtype} is known")
    compute_us, memory_us = cell.flops / (1e3 * gflops), cell.moved_bytes / (1e3 * gbps)
    share = max(compute_us, memory_us) / us
    what = "compute" if compute_us >= memory_us else "memory"
    return NotMeasured(GPU_TOO_FAST) if share > TOLERATED_EXCESS else (min(share, 1.0), what)
