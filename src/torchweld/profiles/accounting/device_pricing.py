"""Explains the time from a device's first kernel to its last.

In: a `Profile` with a `Device`. Out: one `OpAccount` per op, about the kernels that this op
launched and the idle time that its launch ended. The host's own time is hidden behind the device,
or shows as idle time.

    launch        nothing ran because the host was late, or between one kernel and the next
    host          nothing ran because the host waited for the device first
    arithmetic, traffic, slow   of kernels whose op has a model, by the device's published peaks
    unexplained   all other kernels, copies to and from the device, communication, other gaps

Ops that began after the steps that the device's figures cover are left out.
Kernels that run at the same time share it: their times are scaled to the time in which any ran.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from torchweld.profiles.accounting.cpu_pricing import Priced, explain_work
from torchweld.profiles.accounting.memory_traffic import NONE, Rates, traffic_of, uncosted
from torchweld.profiles.accounting.op_calls import Work
from torchweld.profiles.accounting.op_costs import arithmetic_dtype, works_of
from torchweld.profiles.accounting.time_splits import Bound, OpAccount, Split
from torchweld.profiles.attributing.op_kinds import kind_of
from torchweld.profiles.profile import Device, Gap, Kernel, Op, Profile

_LAUNCH = ("host wait", "kernel wait")
_HOST = ("synchronisation",)
# Copies that leave the device, by name; no peak of the device bounds them.
_LEAVES = re.compile(r"HtoD|DtoH|PtoP|HostToDevice|DeviceToHost|PeerToPeer")


def price_on_device(profile: Profile, device: Device) -> Priced:
    """Explains what ran on the device."""
    works = works_of(profile.ops)
    notices = []
    if device.peak_gbps is None:
        notices.append(
            f"the peaks of {device.name or 'the device'} are not known, so the time of its kernels "
            "is unexplained"
        )
    kernels = list(filter(device.covers, device.kernels))
    running_us = sum(kernel.duration_us for kernel in kernels)
    busy_us = device.span_us - device.idle_us
    scale = busy_us / running_us if running_us else 0.0
    pricing = _DevicePricing(profile, device, works)
    launched: list[list[Kernel]] = [[] for _ in profile.ops]
    waited: list[list[Gap]] = [[] for _ in profile.ops]
    root = [0.0, 0.0, 0.0]  # launch, host, unexplained of what belongs to no op
    for kernel in kernels:
        if kernel.op >= 0:
            launched[kernel.op].append(kernel)
        else:
            root[2] += scale * kernel.duration_us
    for gap in device.gaps:
        if gap.op >= 0:
            waited[gap.op].append(gap)
        else:
            root[0 if gap.cause in _LAUNCH else 1 if gap.cause in _HOST else 2] += gap.duration_us
    nothing = Split()
    modules = [nothing] * len(profile.modules)
    modules[0] = Split(launch_us=root[0], host_us=root[1], unexplained_us=root[2])
    return Priced(
        ops=[
            pricing.explain(i, op, launched[i], waited[i], scale)
            for i, op in enumerate(profile.ops)
        ],
        modules=modules,
        notices=notices,
    )


def _leaves_device(kernel: Kernel) -> bool:
    return kernel.category == "communication" or _LEAVES.search(kernel.name) is not None


class _DevicePricing:
    def __init__(self, profile: Profile, device: Device, works: Sequence[Work | None]) -> None:
        self.device = device
        self.works = works
        self.priced = device.peak_gbps is not None
        if device.peak_gbps is not None:
            rates = Rates(sizes=(1,), gbps=(device.peak_gbps,))
            self.traffic = traffic_of(profile.ops, works, rates)
        else:
            self.traffic = uncosted(profile.ops, works)

    def explain(
        self, i: int, op: Op, kernels: Sequence[Kernel], gaps: Sequence[Gap], scale: float
    ) -> OpAccount:
        # What ran in a step that the device's figures leave out has no time here. It must not
        # count as work either, or rates would be too high.
        kind, work = kind_of(op.name), self.works[i] if self.device.covers_op(op) else None
        time_us = scale * sum(kernel.duration_us for kernel in kernels)
        bound: Bound = "unknown" if kernels or work is not None else "overhead"
        split, roofline_us = Split(unexplained_us=time_us), 0.0
        on_device = bool(kernels) and not any(map(_leaves_device, kernels))
        traffic = self.traffic[i] if work is not None and on_device else NONE
        if work is not None and self.priced and on_device:
            arithmetic_us = self._arithmetic_us(op, work, time_us)
            split, bound = explain_work(time_us, arithmetic_us, traffic, 0.0)
            roofline_us = max(arithmetic_us or 0.0, traffic.memory_us)
        launch_us = sum(gap.duration_us for gap in gaps if gap.cause in _LAUNCH)
        host_us = sum(gap.duration_us for gap in gaps if gap.cause in _HOST)
        other_us = sum(gap.duration_us for gap in gaps) - launch_us - host_us
        if 2 * (launch_us + host_us) > time_us + launch_us + host_us + other_us:
            bound = "overhead"
        return OpAccount(
            kind=kind,
            flops=(work.flops or 0) if work is not None else 0,
            read_bytes=work.read_bytes if work is not None else 0,
            written_bytes=work.written_bytes if work is not None else 0,
            round_trip_bytes=traffic.round_trip_bytes,
            roofline_us=roofline_us,
            bound=bound,
            split=Split(
                arithmetic_us=split.arithmetic_us,
                traffic_us=split.traffic_us,
                launch_us=launch_us,
                round_trip_us=split.round_trip_us,
                host_us=host_us,
                slow_us=split.slow_us,
                unexplained_us=split.unexplained_us + other_us,
            ),
            launches=len(kernels),
        )

    def _arithmetic_us(self, op: Op, work: Work, time_us: float) -> float | None:
        """None if it is not known how much there is, or how fast it could be."""
        if not work.flops:
            return None if work.flops is None else 0.0
        gflops = self.device.peak_gflops.get(arithmetic_dtype(op))
        if gflops is None:
            return None
        faster = self.device.peak_gflops.get("tf32", gflops)
        if arithmetic_dtype(op) == "float32" and work.flops > 1e3 * gflops * time_us:
            gflops = faster  # faster than plain fp32 arithmetic can be
        return work.flops / (1e3 * gflops)
