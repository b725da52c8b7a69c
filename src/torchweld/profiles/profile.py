"""A `Profile`: one step of a model, op by op and module by module, as plain data.

Made by `tw.profile`, `tw.profiling` and `tw.read_trace`; read by the account, the findings, the
reports and `tw.diff`. It saves to JSON and loads again without running anything.

A live profile describes **one step**: its ops in the order they ran, each with its usual time over
the recorded steps (the mean, with outliers cut back). A profile of a trace describes everything in
the file.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from torchweld.core.html_shown import ShownAsPage
from torchweld.core.not_measured import NotMeasured
from torchweld.core.record_fields import MOST_FLOAT, Count, Index, Length, Measured
from torchweld.core.record_format import RecordFormat
from torchweld.core.records import to_plain
from torchweld.core.saved_records import SavedRecord
from torchweld.machine.measured_peaks import Peaks
from torchweld.profiles.profile_doubts import doubt
from torchweld.profiles.step_faults import SAVED_BEFORE, StepFaults

# The most elements of a tensor in a file. No memory holds more.
MOST_ELEMENTS = 1 << 62

# A fact about the machine that the recording does not contain.
UNTOLD = NotMeasured("the recording does not tell")

Phase = Literal["forward", "backward", "recompute", "optimizer", "other"]

ITEM_BYTES = {
    **dict.fromkeys(("float64", "int64", "complex64"), 8),
    **dict.fromkeys(("float32", "int32"), 4),
    **dict.fromkeys(("bfloat16", "float16", "int16"), 2),
    **dict.fromkeys(("int8", "uint8", "bool", "float8_e4m3fn", "float8_e5m2"), 1),
    "complex128": 16,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Tensor:
    """An argument of an op. `storage` names its memory, if the recording knows it."""

    shape: Annotated[tuple[Count, ...], Length(most=64)]
    dtype: str  # "float32"; "" where the recording does not tell
    strides: Annotated[tuple[int, ...], Length(most=64)] | None = None
    storage: int | None = None
    device: str = "cpu"

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def problems(self) -> Iterator[str]:
        """Problems of a record that was read from a file, in words."""
        if math.prod(max(n, 1) for n in self.shape) > MOST_ELEMENTS:
            yield "has a shape of more elements than any memory holds"
        if self.strides is not None and len(self.strides) != len(self.shape):
            yield f"has {len(self.strides)} strides for {len(self.shape)} dimensions"

    @property
    def nbytes(self) -> int:
        """Bytes of the elements addressed: a broadcast dimension (stride 0) counts once."""
        if self.strides is None:
            count = self.numel
        else:
            count = math.prod(
                n for n, stride in zip(self.shape, self.strides, strict=True) if stride or n == 0
            )
        return count * ITEM_BYTES.get(self.dtype, 4)

    @property
    def contiguous(self) -> bool:
        """True also where the strides are unknown."""
        if self.strides is None:
            return True
        expected = 1
        for n, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if n != 1 and stride != expected:
                return n == 0
            expected *= n
        return True


@dataclass(kw_only=True, slots=True)
class Op:
    """One call of one op. All times but `raw_us` are corrected for the profiler's cost.

    Tens of thousands are made, and never changed. Making a frozen one takes four times as long.
    """

    name: str
    module: Count  # index into Profile.modules: the module that caused it; 0 is the root
    parent: Index  # index of the op it ran inside, -1 for none
    phase: Phase
    start_us: float  # since the beginning of the step, as recorded
    raw_us: float  # as recorded, what ran inside included
    total_us: float  # what ran inside included
    self_us: float
    inputs: tuple[Tensor | None, ...] = ()
    written: tuple[
        tuple[int, int], ...
    ] = ()  # (storage, bytes) made by this op itself that outlive it
    call: int = -1  # number of the module call it ran in, by start time; -1 outside all
    sequence: int = -1
    thread: int = 0
    kernels: tuple[Count, ...] = ()  # indices into Device.kernels that this op itself launched
    where: str = ""  # "model.py(12): forward", where stacks were recorded


@dataclass(frozen=True, kw_only=True, slots=True)
class Module:
    """A place in the model; `[0]` is the root. Times in µs per step, corrected."""

    path: str  # "layers.3.mlp.fc1"; "" for the root
    kind: str  # class name
    extra: str = ""  # what print(model) shows in its brackets
    parent: Index = -1
    calls: Count = 0  # forward calls per step
    forward_us: float = 0.0  # inside it, children included
    backward_us: float = 0.0
    self_forward_us: float = 0.0  # children excluded
    self_backward_us: float = 0.0
    python_us: float = 0.0  # part of self_forward_us spent outside ops
    engine_us: float = 0.0  # part of self_backward_us spent between backward nodes
    parameters: Count = 0  # elements it holds itself
    compiled: bool = False

    @property
    def total_us(self) -> float:
        return self.forward_us + self.backward_us

    @property
    def self_us(self) -> float:
        return self.self_forward_us + self.self_backward_us


@dataclass(kw_only=True, slots=True)
class Kernel:
    """Something that ran on a device. Not frozen, for the same reason as `Op`."""

    name: str
    category: str  # gemm, attention, pointwise, reduction, copy, set, communication, triton, other
    start_us: float
    duration_us: float
    device: int
    stream: int
    launch: Index = -1  # index into Device.calls; -1 if the trace does not tell
    op: Index = -1  # index into Profile.ops of the op that launched it
    inside: tuple[str, ...] = ()  # the ops that a fused kernel's name lists


@dataclass(frozen=True, kw_only=True, slots=True)
class RuntimeCall:
    """A call of the device's runtime or driver on the host."""

    name: str
    start_us: float
    duration_us: float
    thread: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Gap:
    """A time in which nothing ran on the device, and why."""

    start_us: float
    duration_us: float
    cause: str  # "host wait", "kernel wait", "synchronisation", "copy", "unknown"
    before: str  # name of the kernel that ran next
    op: Index = -1  # the op whose launch ended it


@dataclass(frozen=True, kw_only=True)
class Device:
    """What the device did over the whole trace. Times in µs."""

    name: str
    span_us: float  # first kernel's start to last kernel's end
    idle_us: float  # nothing ran
    compute_us: float  # at least one computing kernel ran
    non_compute_us: float  # only copies or communication ran
    launches: Count  # runtime calls that put a kernel or a memory operation on the device
    launch_us: float  # their duration on the host
    launched_us: float  # duration on the device of what they launched
    occupancy_queries: Count
    occupancy_query_us: float
    by_category: dict[str, tuple[Count, float]]  # category -> count, µs
    by_stream: dict[str, tuple[Count, float]]  # "device 0 stream 7" -> count, µs
    kernels: tuple[Kernel, ...] = ()
    calls: tuple[RuntimeCall, ...] = ()
    gaps: tuple[Gap, ...] = ()
    peak_gflops: dict[str, float] = field(default_factory=dict)  # by dtype, of the device by name
    peak_gbps: float | None = None
    steps: Count = 0  # that the figures cover; 0 if the recording has no steps
    until_us: float | None = None  # later launches are in the lists, but not in the figures

    def covers(self, kernel: Kernel) -> bool:
        """Whether the figures count this kernel: it was launched before `until_us`."""
        if self.until_us is None:
            return True
        by_call = 0 <= kernel.launch < len(self.calls)
        return (self.calls[kernel.launch] if by_call else kernel).start_us < self.until_us

    def covers_op(self, op: Op) -> bool:
        """Whether the figures count what this op launched: it began before `until_us`."""
        return self.until_us is None or op.start_us < self.until_us


@dataclass(frozen=True, kw_only=True, slots=True)
class Allocation:
    """Memory that is alive at the peak."""

    bytes: Count
    module: Count  # that made it
    op: str
    phase: Phase


@dataclass(frozen=True, kw_only=True)
class MemoryCourse:
    """Bytes that are alive, each from its time on. 0 before the first."""

    at_us: tuple[float, ...] = ()  # as `Op.start_us`
    bytes: tuple[Count, ...] = ()

    def problems(self) -> Iterator[str]:
        """Problems of a record that was read from a file, in words."""
        if len(self.at_us) != len(self.bytes):
            yield f"has {len(self.at_us)} times for {len(self.bytes)} sizes"


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Memory of tensors over one step, in bytes. Memory from before the step is not counted."""

    allocations: Count
    allocated_bytes: Count
    peak_bytes: int  # above the level at the beginning of the step
    at_peak: tuple[Allocation, ...]  # largest first
    saved_bytes: dict[str, int]  # module path -> bytes kept for backward
    module_bytes: dict[str, int]  # module path -> bytes its own ops allocated
    course: MemoryCourse = MemoryCourse()  # empty in files of format 3 and before


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeCheck:
    """A corrected time against one measured without the profiler, in the same rounds.

    `timed_us` is a median, and `corrected_us` is off it by the median over rounds.
    """

    what: str  # "held-out steps", "layers.3.mlp"
    corrected_us: float
    timed_us: float
    # The 95 % interval of `error`; None if there were fewer than six rounds.
    interval: tuple[Measured, Measured] | None = None

    @property
    def error(self) -> float:
        return self.corrected_us / self.timed_us - 1 if self.timed_us else math.nan

    def within(self, most: float) -> bool | None:
        """Whether the error is at most `most`; None if the interval leaves that open."""
        if self.interval is None:
            return None
        low, high = self.interval
        if -most <= low and high <= most:
            return True
        return False if low > most or high < -most else None


@dataclass(frozen=True, kw_only=True)
class Timing:
    """The step by the clock, and what the profiler added to it. As recorded, measured or not."""

    wall_us: float  # median of the undisturbed steps without the profiler
    raw_us: float  # with it
    corrected_us: float  # the profiler's cost taken away
    first_us: float  # the very first step, before any warm-up
    events: Count  # recorded per step
    op_cost_us: float  # of one op event
    module_cost_us: float  # of one module event
    steps: Count  # profiled
    checks: tuple[TimeCheck, ...] = ()
    # The least that a step spends around the call of the model, whatever the model does; 0 is safe.
    around_us: float = 0.0
    rounds: Count = 0  # in which steps were measured, with and without the profiler; 0: not noted
    disturbed: Count = 0  # of these rounds, those that other processes took time from

    @property
    def unexplained_us(self) -> float:
        """What the correction does not account for; negative if it took too much away."""
        return self.wall_us - self.corrected_us


@dataclass(frozen=True, kw_only=True)
class Compilation:
    """What torch.compile did while it was watched."""

    regions: int  # compiled regions entered per step
    compiled: int  # frames compiled during the recording
    recompiled: int
    graph_breaks: int
    guard_us: float  # looking for the right compiled code, per step
    reasons: tuple[str, ...] = ()  # of recompilations, first line each


@dataclass(frozen=True, kw_only=True)
class About:
    """What was recorded, and on which machine."""

    source: Literal["live", "trace"]
    what: str  # the model's class, the workload's name, the file's name
    training: bool = False
    inputs: str = ""  # what the model was called with, in words; "" where that is not known
    torch: str = ""
    cpu: str = ""
    threads: Count = 0
    fingerprint: str = ""
    steps: Count = 1  # steps that the ops cover: 1 for a live profile
    # Where each of these steps begins, as the ops' times; () where the recording has no steps.
    step_starts_us: tuple[float, ...] = ()
    rank: int | None = None
    load: str = ""  # what else kept the machine busy when the profile began; "" if nothing did


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What must be known of a CPU to price the ops that ran on it. Traces of torchweld carry it."""

    torch: str = ""
    cpu: str = ""
    threads: int = 0
    fingerprint: str = ""
    op_cost_us: float = 0.0
    fused_call_us: float | NotMeasured = UNTOLD
    peaks: Peaks | None = None


def _with_doubt(fields: dict[str, Any]) -> dict[str, Any]:
    """Format 1 had a figure for every step, even where the clock contradicted it."""
    timing = fields.get("timing")
    if not isinstance(timing, dict):
        return fields
    wall_us: Any = timing.get("wall_us")
    corrected_us: Any = timing.get("corrected_us")
    for us in (wall_us, corrected_us):
        if type(us) not in (int, float) or not abs(us) < MOST_FLOAT:
            return fields
    found = doubt(wall_us, corrected_us)
    return fields if found is None else {**fields, "step_us": to_plain(found)}


def _without_faults(fields: dict[str, Any]) -> dict[str, Any]:
    """Format 2 had no page faults, which is not the same as none."""
    return {**fields, "faults": to_plain(SAVED_BEFORE)}


def _without_course(fields: dict[str, Any]) -> dict[str, Any]:
    """Format 3 knew only the peak of memory."""
    return fields


@dataclass(frozen=True, kw_only=True)
class Profile(ShownAsPage, SavedRecord):
    """One step of a model, op by op and module by module. Shares are shares of `step_us`.

    `tw.profile`, `tw.profiling` and `tw.read_trace` make profiles. If `step_us` is
    `NotMeasured`, the times of ops and modules are as recorded and say nothing about the model.
    Counts (ops, calls, shapes, bytes) hold nevertheless.
    """

    FORMAT = RecordFormat(
        what="profile",
        version=4,
        upgrades={1: _with_doubt, 2: _without_faults, 3: _without_course},
        remedy="take the profile again, or use the torchweld that saved it",
    )

    about: About
    step_us: float | NotMeasured
    modules: Annotated[tuple[Module, ...], Length(1)]
    ops: tuple[Op, ...]
    timing: Timing | None = None
    device: Device | None = None
    memory: Memory | None = None
    compilation: Compilation | None = None
    peaks: Peaks | None = None  # of the CPU the profile was taken on
    op_cost_us: float = 0.0  # what the smallest op takes to dispatch on that CPU, measured
    fused_call_us: float | NotMeasured = UNTOLD  # what calling a fused block takes there at least
    faults: StepFaults | NotMeasured = UNTOLD  # of the process, on steps without the profiler
    notices: tuple[str, ...] = ()

    @property
    def machine(self) -> Machine:
        return Machine(
            torch=self.about.torch,
            cpu=self.about.cpu,
            threads=self.about.threads,
            fingerprint=self.about.fingerprint,
            op_cost_us=self.op_cost_us,
            fused_call_us=self.fused_call_us,
            peaks=self.peaks,
        )

    @property
    def accounted_steps(self) -> int:
        """Steps that the account covers: those of the device's figures if there is a device."""
        covered = self.device.steps if self.device is not None else 0
        return covered or max(self.about.steps, 1)

    @property
    def whole_step_us(self) -> tuple[float, float] | None:
        """Start and end of the last step before the one in which the profiler was stopped.

        None for fewer than two steps: then everything is one step.
        """
        starts = self.about.step_starts_us
        return (starts[-2], starts[-1]) if len(starts) > 1 else None

    def problems(self) -> Iterator[str]:
        """What is wrong with one that was read from a file: indices that point nowhere."""
        modules, ops, device = len(self.modules), len(self.ops), self.device
        kernels, calls = (0, 0) if device is None else (len(device.kernels), len(device.calls))
        if self.modules[0].path:
            yield f"has modules[0].path = {self.modules[0].path!r}; the model itself comes first"
        yield from _astray("modules", "parent", (m.parent for m in self.modules), None)
        yield from _astray("ops", "parent", (op.parent for op in self.ops), None)
        yield from _astray("ops", "module", (op.module for op in self.ops), modules)
        for i, op in enumerate(self.ops):
            yield from _astray(f"ops[{i}]", "kernels", op.kernels, kernels)
        if device is not None:
            yield from _astray("kernels", "op", (k.op for k in device.kernels), ops)
            yield from _astray("kernels", "launch", (k.launch for k in device.kernels), calls)
            yield from _astray("gaps", "op", (gap.op for gap in device.gaps), ops)
        if self.memory is not None:
            found = (one.module for one in self.memory.at_peak)
            yield from _astray("at_peak", "module", found, modules)


def _astray(what: str, field: str, places: Iterable[int], count: int | None) -> Iterator[str]:
    """Indices that are not below `count`; without `count`, those not below their own position."""
    for i, place in enumerate(places):
        if place >= (i if count is None else count):
            end = "one before it" if count is None else f"one of {count:,}"
            yield f"has {what}[{i}].{field} = {place}; expected is {end}"


def deepest_first(parents: Sequence[int]) -> list[int]:
    """Indices of modules, each before its parent `parents[i]`."""

    def depth(i: int) -> int:
        count = 0
        while (i := parents[i]) >= 0:
            count += 1
        return count

    return sorted(range(len(parents)), key=depth, reverse=True)
