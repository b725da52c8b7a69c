"""What calls launch on a GPU: kernels by kind, their time, and what launching them takes.

In: the events of some calls under torch.profiler. Out: a `KernelCost` per call. No kernel in the
events is no count of zero: then the profiler saw nothing of the GPU, and it is not measured.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torchweld.core.errors import NotMeasuredError
from torchweld.core.not_measured import NotMeasured
from torchweld.core.record_fields import Amount, Count
from torchweld.profiles.accounting.device_account import device_account
from torchweld.profiles.attributing.kernel_names import adds_up_a_split
from torchweld.profiles.profile import Kernel
from torchweld.profiles.recorded_events import Recording
from torchweld.profiles.recording.torch_profiler import record

# Calls under the profiler; each has to launch the same.
CALLS = 4
# Not kernels: work of the copy engine.
MEMORY_WORK = ("copy", "set")
NO_KERNELS = (
    "torch.profiler recorded no kernel; another tool may hold the GPU's counters, or CUPTI "
    "(ROCtracer) is missing"
)


@dataclass(frozen=True, kw_only=True)
class KernelRow:
    """Kernels of one name. `count` per call, `us` of all of them together."""

    name: str
    category: str
    count: Count
    us: Amount


@dataclass(frozen=True, kw_only=True)
class KernelCost:
    """What one call launches, by the profiler.

    kernels:     that ran; copies and fills of memory are not kernels
    by_category: how many of them are products (gemm), pointwise, Inductor's (triton), and so on
    launches:    calls of the runtime that put something on the device
    kernel_us:   time in which a kernel ran
    idle_us:     from the first kernel to the last, time in which nothing ran
    launch_us:   of the launches, on the host; under the profiler, so rather too much
    """

    kernels: Count
    by_category: dict[str, Count]
    launches: Count
    kernel_us: Amount
    idle_us: Amount
    launch_us: Amount
    occupancy_queries: Count = 0
    rows: tuple[KernelRow, ...] = ()

    @property
    def words(self) -> str:
        return kernel_words(self.by_category)


def kernel_words(by_category: dict[str, int]) -> str:
    """`3 gemm, 2 pointwise`."""
    return ", ".join(f"{count} {category}" for category, count in by_category.items()) or "none"


def kernels_of(call: Callable[[], Any], calls: int = CALLS) -> KernelCost | NotMeasured:
    """What a call launches, by the profiler, after a call that is not recorded."""

    def several() -> None:
        for _ in range(calls):
            call()

    try:
        recording = record(several, warm_up=call)
    except NotMeasuredError as error:
        return NotMeasured(str(error))
    return kernel_cost(recording, calls)


def kernel_cost(recording: Recording, calls: int) -> KernelCost | NotMeasured:
    """The cost of one call, from the events of `calls` equal ones."""
    device = device_account(recording)
    ran = [] if device is None else [k for k in device.kernels if k.category not in MEMORY_WORK]
    if device is None or not ran:
        return NotMeasured(NO_KERNELS)
    rows = _rows(ran, calls)
    if isinstance(rows, NotMeasured):
        return rows
    by_category: Counter[str] = Counter()
    for row in rows:
        by_category[row.category] += row.count
    return KernelCost(
        kernels=sum(by_category.values()),
        by_category=dict(sorted(by_category.items())),
        launches=device.launches // calls,
        kernel_us=device.compute_us / calls,
        idle_us=device.idle_us / calls,
        launch_us=device.launch_us / calls,
        occupancy_queries=device.occupancy_queries // calls,
        rows=rows,
    )


def _rows(ran: Sequence[Kernel], calls: int) -> tuple[KernelRow, ...] | NotMeasured:
    counts = Counter(kernel.name for kernel in ran)
    for name, count in counts.items():
        if count % calls:
            return NotMeasured(
                f"{calls} equal calls ran {name[:80]} {count} times: calls differ, or the "
                "profiler lost events"
            )
    by_name = {kernel.name: _category(kernel) for kernel in ran}
    us = {name: sum(k.duration_us for k in ran if k.name == name) for name in counts}
    return tuple(
        KernelRow(
            name=name, category=by_name[name], count=counts[name] // calls, us=us[name] / calls
        )
        for name in sorted(counts, key=lambda name: -us[name])
    )


def _category(kernel: Kernel) -> str:
    """A product whose K was split is one product, and a sum."""
    return "reduction" if adds_up_a_split(kernel.name) else kernel.category
