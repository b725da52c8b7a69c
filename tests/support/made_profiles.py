"""Profiles made by hand: modules and ops with shapes, memory and times that a test knows.

    made = Builder(gflops=100.0, gbps=10.0, op_cost_us=1.0)
    fc = made.module("fc", "Linear")
    x, w = tensor(8, 64), tensor(64, 64)
    made.op("aten::mm", us=50.0, module=fc, inputs=(x, w), makes=8 * 64 * 4)
    profile = made.build()

Every tensor has a storage of its own unless told otherwise. `make_device` and `make_timing` fill in
the sums that a test does not care about. Whole models are in `block_profiles.py`.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tests.support.measured import measured

from torchweld.core.not_measured import NotMeasured
from torchweld.machine.measured_peaks import FmaPeak, Peaks, ReadPeak
from torchweld.profiles.accounting.time_account import Split
from torchweld.profiles.profile import (
    About,
    Device,
    Gap,
    Kernel,
    Module,
    Op,
    Phase,
    Profile,
    RuntimeCall,
    Tensor,
    Timing,
)
from torchweld.profiles.step_faults import StepFaults

THREADS = 2
WORKING_SETS_BYTES = (32 * 2**10, 256 * 2**10, 2 * 2**20, 16 * 2**20, 256 * 2**20)
_storages = itertools.count(1)


def new_storage() -> int:
    return next(_storages)


def dense(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    strides = [1] * len(shape)
    for i in range(len(shape) - 2, -1, -1):
        strides[i] = strides[i + 1] * shape[i + 1]
    return tuple(strides)


def tensor(
    *shape: int,
    dtype: str = "float32",
    storage: int | None = -1,
    strides: tuple[int, ...] | Literal["dense"] | None = "dense",
) -> Tensor:
    """Contiguous, in memory of its own; None is what a recording does not tell."""
    return Tensor(
        shape=shape,
        dtype=dtype,
        strides=dense(shape) if strides == "dense" else strides,
        storage=new_storage() if storage == -1 else storage,
    )


def make_peaks(
    gflops: float = 100.0,
    gbps: float | Sequence[float] = 10.0,
    threads: int = THREADS,
    dtypes: Sequence[str] = ("float32", "float64", "bfloat16", "float16"),
) -> Peaks:
    """`gbps` is one rate for all working sets, or one for each of `WORKING_SETS_BYTES`."""
    rates = [gbps] * len(WORKING_SETS_BYTES) if isinstance(gbps, (int, float)) else gbps
    return Peaks(
        fingerprint="made by hand",
        method="made by hand",
        fma=tuple(FmaPeak(dtype=dtype, threads=threads, gflops=gflops) for dtype in dtypes),
        read=tuple(
            ReadPeak(working_set_bytes=size, threads=threads, gbps=rate)
            for size, rate in zip(WORKING_SETS_BYTES, rates, strict=True)
        ),
    )


@dataclass(kw_only=True)
class Place:
    """A module to be. Its times are those outside ops."""

    path: str
    kind: str
    extra: str = ""
    python_us: float = 0.0
    engine_us: float = 0.0
    calls: int = 1


class Builder:
    """Ops one after another, `gap_us` apart. The root is module 0.

    An op with others inside spends half of its own time before them. `starts` has the times at
    which ops begin that do not follow on the one before.
    """

    def __init__(
        self,
        *,
        gflops: float = 100.0,
        gbps: float | Sequence[float] = 10.0,
        op_cost_us: float = 1.0,
        peaks: Peaks | str | None = "made",
        root: str = "Model",
        gap_us: float = 0.0,
    ) -> None:
        self.peaks = make_peaks(gflops, gbps) if isinstance(peaks, str) else peaks
        self.op_cost_us = op_cost_us
        self.gap_us = gap_us
        self.ops: list[Op] = []
        self.starts: dict[int, float] = {}
        self.places = [Place(path="", kind=root)]

    def module(self, path: str, kind: str = "Module", **more: Any) -> int:
        """A module below the one that its path names; gives its number."""
        self.places.append(Place(path=path, kind=kind, **more))
        return len(self.places) - 1

    def op(
        self,
        name: str,
        us: float = 1.0,
        *,
        module: int = 0,
        inputs: Sequence[Tensor | None] = (),
        makes: int | tuple[int, int] | None = None,
        parent: int = -1,
        phase: Phase = "forward",
        kernels: tuple[int, ...] = (),
        call: int = -1,
        sequence: int = -1,
        thread: int = 0,
    ) -> int:
        """An op whose own time is `us`; `makes` is the bytes of its result, or (storage, bytes)."""
        if isinstance(makes, int):
            makes = (new_storage(), makes)
        self.ops.append(
            Op(
                name=name,
                module=module,
                parent=parent,
                phase=phase,
                start_us=0.0,
                raw_us=us,
                total_us=us,
                self_us=us,
                inputs=tuple(inputs),
                written=() if makes is None else (makes,),
                call=call,
                sequence=sequence,
                thread=thread,
                kernels=kernels,
            )
        )
        return len(self.ops) - 1

    def build(
        self, *, step_us: float | None = None, device: Device | None = None, training: bool = False
    ) -> Profile:
        """The profile, with totals that follow. `step_us` is the sum of own times unless given."""
        ops = self._timed()
        outside_us = sum(place.python_us + place.engine_us for place in self.places)
        return Profile(
            about=About(source="live", what="made by hand", threads=THREADS, training=training),
            step_us=sum(op.self_us for op in ops) + outside_us if step_us is None else step_us,
            modules=tuple(self._modules(ops)),
            ops=tuple(ops),
            device=device,
            peaks=self.peaks,
            op_cost_us=self.op_cost_us,
        )

    def _timed(self) -> list[Op]:
        """The ops with their starts, and with what is inside them added up."""
        inside: list[list[int]] = [[] for _ in self.ops]
        for i, op in enumerate(self.ops):
            if op.parent >= 0:
                inside[op.parent].append(i)
        timed = list(self.ops)
        now_us: dict[int, float] = {}  # by thread

        def place(i: int) -> float:
            op = self.ops[i]
            start_us = self.starts.get(i, now_us.get(op.thread, 0.0) + self.gap_us)
            half_us = max(op.self_us, 0.0) / 2
            now_us[op.thread] = start_us + half_us
            total_us = op.self_us + sum(place(inner) for inner in inside[i])
            now_us[op.thread] += half_us
            raw_us = now_us[op.thread] - start_us
            timed[i] = changed(op, start_us=start_us, raw_us=raw_us, total_us=total_us)
            return total_us

        for i, op in enumerate(self.ops):
            if op.parent < 0:
                place(i)
        return timed

    def _modules(self, ops: Sequence[Op]) -> list[Module]:
        numbers = {place.path: i for i, place in enumerate(self.places)}
        parents = [_parent(place.path, numbers) for place in self.places]
        own = {
            "forward": [place.python_us for place in self.places],
            "backward": [place.engine_us for place in self.places],
        }
        for op in ops:
            side = "backward" if op.phase in ("backward", "recompute") else "forward"
            own[side][op.module] += op.self_us
        inside = {side: list(times) for side, times in own.items()}
        deepest_first = sorted(
            range(1, len(parents)), key=lambda i: self.places[i].path.count("."), reverse=True
        )
        for i in deepest_first:
            for times in inside.values():
                times[parents[i]] += times[i]
        return [
            Module(
                path=place.path,
                kind=place.kind,
                extra=place.extra,
                parent=parents[i],
                calls=place.calls,
                forward_us=inside["forward"][i],
                backward_us=inside["backward"][i],
                self_forward_us=own["forward"][i],
                self_backward_us=own["backward"][i],
                python_us=place.python_us,
                engine_us=place.engine_us,
            )
            for i, place in enumerate(self.places)
        ]


def _parent(path: str, numbers: Mapping[str, int]) -> int:
    if not path:
        return -1
    while "." in path:
        path = path.rpartition(".")[0]
        if path in numbers:
            return numbers[path]
    return 0


def changed(op: Op, **fields: Any) -> Op:
    """Like `dataclasses.replace`, but several times faster."""
    values = {name: getattr(op, name) for name in Op.__slots__}
    return Op(**{**values, **fields})


PARTS = [field.name for field in dataclasses.fields(Split)]


def parts(split: Split | NotMeasured) -> dict[str, float]:
    """Those that are not zero."""
    found = {name: getattr(measured(split), name) for name in PARTS}
    return {name: value for name, value in found.items() if abs(value) > 1e-9}


def make_timing(step_us: float, **more: Any) -> Timing:
    """A step that was measured without error."""
    given = {"wall_us": step_us, "raw_us": step_us, "corrected_us": step_us, "first_us": step_us}
    costs = {"events": 4, "op_cost_us": 0.1, "module_cost_us": 0.1, "steps": 3}
    return Timing(**{**given, **costs, **more})


def make_faults(per_step: float, fault_us: float = 1.0, **more: Any) -> StepFaults:
    """The same usual page faults in every step, on a system that was not disturbed."""
    given: dict[str, Any] = {
        "least": int(per_step),
        "most": math.ceil(per_step),
        "steps": 10,
        "system_us": per_step * fault_us,
        "system_steps": 10,
        "fault_bytes": 4096,
        "allocator": "glibc 2.36",
    }
    return StepFaults(per_step=per_step, fault_us=fault_us, **{**given, **more})


def make_device(kernels: Sequence[Kernel], gaps: Sequence[Gap] = (), **more: Any) -> Device:
    """Kernels one after the other, each launched by a call of its own that took 1 µs."""
    starts = [kernel.start_us for kernel in kernels]
    ends = [kernel.start_us + kernel.duration_us for kernel in kernels]
    idle_us = sum(gap.duration_us for gap in gaps)
    span_us = max(ends) - min(starts)
    by_category: dict[str, tuple[int, float]] = {}
    for kernel in kernels:
        count, us = by_category.get(kernel.category, (0, 0.0))
        by_category[kernel.category] = count + 1, us + kernel.duration_us
    running_us = sum(kernel.duration_us for kernel in kernels)
    given: dict[str, Any] = {
        "name": "Example GPU",
        "span_us": span_us,
        "idle_us": idle_us,
        "compute_us": span_us - idle_us,
        "non_compute_us": 0.0,
        "launches": len(kernels),
        "launch_us": float(len(kernels)),
        "launched_us": running_us,
        "occupancy_queries": 0,
        "occupancy_query_us": 0.0,
        "by_category": by_category,
        "by_stream": {"device 0 stream 7": (len(kernels), running_us)},
        "kernels": tuple(kernels),
        "calls": tuple(
            RuntimeCall(name="cudaLaunchKernel", start_us=start_us, duration_us=1.0, thread=0)
            for start_us in starts
        ),
        "gaps": tuple(gaps),
    }
    return Device(**{**given, **more})


def kernel(name: str, start_us: float, us: float, op: int, launch: int, **more: Any) -> Kernel:
    """Adds a kernel on stream 7 of device 0."""
    given = {"category": "gemm", "device": 0, "stream": 7, **more}
    return Kernel(name=name, start_us=start_us, duration_us=us, op=op, launch=launch, **given)
