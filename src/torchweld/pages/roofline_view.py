"""The roofline plot of a page: the machine's peaks, and the ops and blocks below them.

In: a `Profile` with its `Account`, or a side. Out: `Roof`s and `RoofPoint`s. An op is a point for
each phase it runs in. A block is one point for all that its module does, so that it has a point
before and after welding.
"""

from __future__ import annotations

from collections.abc import Iterator

from torchweld.core.not_measured import NotMeasured
from torchweld.core.number_text import size
from torchweld.pages.page_records import ModuleRow, PageSide, Roof, RoofPoint
from torchweld.pages.welded_modules import welded_modules
from torchweld.profiles.accounting.op_costs import arithmetic_dtype
from torchweld.profiles.accounting.rooflines import OpRow, reached, roofline
from torchweld.profiles.accounting.time_splits import Account, Split
from torchweld.profiles.profile import Device, Profile
from torchweld.report.flame_stacks import op_name

MEMORY = "memory"
# Of a device: tensors of the first type may be multiplied at the rate of the second.
FASTER = {"float32": "tf32"}


# ---- peaks ----


def roofs_of(profile: Profile, found: Account) -> tuple[Roof, ...]:
    """Those of the types that the profile computes in, and of every size of memory."""
    working = (op for op, row in zip(profile.ops, found.ops, strict=True) if row.flops)
    dtypes = sorted({arithmetic_dtype(op) for op in working})
    if profile.device is not None:
        return tuple(_device_roofs(profile.device, dtypes))
    return tuple(_cpu_roofs(profile, dtypes))


def _cpu_roofs(profile: Profile, dtypes: list[str]) -> Iterator[Roof]:
    peaks, threads = profile.peaks, profile.about.threads
    if peaks is None:
        return
    for dtype in dtypes:
        gflops = peaks.fma_gflops(dtype, threads)
        if gflops is not None:
            yield Roof(name=dtype, gflops=gflops)
    sizes = sorted({row.working_set_bytes for row in peaks.read if row.threads == threads})
    for bytes_ in sizes:
        name = MEMORY if bytes_ == sizes[-1] else f"{size(bytes_)} in cache"
        yield Roof(name=name, gbps=peaks.read_gbps(bytes_, threads))


def _device_roofs(device: Device, dtypes: list[str]) -> Iterator[Roof]:
    for dtype in dtypes:
        for name in (dtype, FASTER.get(dtype, "")):
            if name in device.peak_gflops:
                yield Roof(name=name, gflops=device.peak_gflops[name])
    if device.peak_gbps is not None:
        yield Roof(name=MEMORY, gbps=device.peak_gbps)


# ---- points ----


def op_points(profile: Profile, found: Account) -> tuple[RoofPoint, ...]:
    """Ops that compute or move anything, the longest first; none if the step was not measured."""
    points = (_op_point(row, profile.device is not None) for row in roofline(profile, found))
    return tuple(point for point in points if point is not None)


def _op_point(row: OpRow, on_device: bool) -> RoofPoint | None:
    us = _working_us(row.split, on_device)
    if us <= 0 or not (row.flops or row.moved_bytes):
        return None
    return RoofPoint(
        name=op_name(row.name),
        block=False,
        phase=row.phase,
        calls=row.calls,
        time_us=us,
        flops=row.flops,
        moved_bytes=row.moved_bytes,
        of_roofline=_brief(row.of_roofline),
        bound=row.bound,
    )


def block_points(side: PageSide) -> tuple[RoofPoint, ...]:
    """One for each welded module, all phases together, named by its path."""
    on_device = side.device_flame is not None
    rows = [side.modules[i] for i in sorted(welded_modules(side))]
    return tuple(
        _block_point(row, us) for row in rows if (us := _working_us(row.split, on_device)) > 0
    )


def _block_point(row: ModuleRow, us: float) -> RoofPoint:
    return RoofPoint(
        name=row.path,
        block=True,
        phase="",
        calls=row.calls,
        time_us=us,
        flops=row.flops,
        moved_bytes=row.moved_bytes,
        of_roofline=_brief(reached(row.roofline_us / us)) if row.roofline_us > 0 else None,
        bound=row.bound,
    )


def _working_us(split: Split | NotMeasured, on_device: bool) -> float:
    """On a device the gaps before kernels are not time of theirs. 0 if not measured."""
    if isinstance(split, NotMeasured):
        return 0.0
    waiting_us = split.launch_us + split.host_us if on_device else 0.0
    return round(split.total_us - waiting_us, 3)


def _brief(share: float | None) -> float | None:
    return None if share is None else round(share, 4)
