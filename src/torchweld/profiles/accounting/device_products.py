"""The matrix products of a device by name, and host and device side by side.

In: a `Profile` with a `Device`. Out: `ProductRow`s, the longest first, and `HostTimes`. Both cover
what the device's figures cover.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from torchweld.core.record_fields import Count
from torchweld.profiles.accounting.device_account import covered
from torchweld.profiles.attributing.gemm_names import GemmName, gemm_of
from torchweld.profiles.profile import Device, Profile, RuntimeCall

# Calls of the runtime that are named by themselves.
CALLS_NAMED = 6
_WAITING = re.compile(r"Synchronize")


@dataclass(frozen=True, kw_only=True)
class ProductRow:
    """Products by kernels of one name; None where the name says nothing."""

    name: str
    gemm: GemmName | None
    count: Count
    us: float


@dataclass(frozen=True, kw_only=True)
class CallRow:
    """Calls of the runtime or driver of one name."""

    name: str
    count: Count
    us: float


@dataclass(frozen=True, kw_only=True)
class HostTimes:
    """What the host took for what the device did, in µs.

    ops_us:       time in which a thread was in an op
    launch_us:    of it, in calls that put something on the device
    occupancy_us: in calls that ask how many blocks fit on a multiprocessor
    waiting_us:   in calls that wait for the device
    calls:        by name, the longest first
    """

    ops: Count
    ops_us: float
    launch_us: float
    occupancy_us: float
    waiting_us: float
    calls: tuple[CallRow, ...]


def products_of(device: Device) -> tuple[ProductRow, ...]:
    """Kernels of category gemm by name, the longest first."""
    counts: Counter[str] = Counter()
    us: dict[str, float] = defaultdict(float)
    for kernel in device.kernels:
        if kernel.category == "gemm" and device.covers(kernel):
            counts[kernel.name] += 1
            us[kernel.name] += kernel.duration_us
    return tuple(
        ProductRow(name=name, gemm=gemm_of(name), count=counts[name], us=us[name])
        for name in sorted(counts, key=lambda name: -us[name])
    )


def on_tensor_cores_us(rows: Iterable[ProductRow]) -> dict[bool | None, float]:
    """µs of products on tensor cores (True), not on them (False), and where that is not known."""
    found: dict[bool | None, float] = {True: 0.0, False: 0.0, None: 0.0}
    for row in rows:
        found[row.gemm.tensor_cores if row.gemm is not None else None] += row.us
    return found


def host_times(profile: Profile, device: Device) -> HostTimes:
    """The host's times in the steps that the device's figures cover."""
    ops = [op for op in profile.ops if op.parent < 0 and device.covers_op(op)]
    spans = covered((op.start_us, op.start_us + op.raw_us) for op in ops)
    before = float("inf") if device.until_us is None else device.until_us
    calls = [call for call in device.calls if call.start_us < before]
    return HostTimes(
        ops=len(ops),
        ops_us=sum(end - start for start, end in spans),
        launch_us=device.launch_us,
        occupancy_us=device.occupancy_query_us,
        waiting_us=sum(call.duration_us for call in calls if _WAITING.search(call.name)),
        calls=tuple(_call_rows(calls))[:CALLS_NAMED],
    )


def _call_rows(calls: Iterable[RuntimeCall]) -> list[CallRow]:
    counts: Counter[str] = Counter()
    us: dict[str, float] = defaultdict(float)
    for call in calls:
        counts[call.name] += 1
        us[call.name] += call.duration_us
    rows = [CallRow(name=name, count=counts[name], us=us[name]) for name in counts]
    return sorted(rows, key=lambda row: -row.us)
