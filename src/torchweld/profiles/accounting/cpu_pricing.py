"""Explains the time that ops take on a CPU.

In: a `Profile` and the peaks of the CPU it was taken on. Out: one `OpAccount` per op. For an op
that does work and takes `t`:

    arithmetic   its FLOPs at the peak of its type
    memory       its bytes at the rate of `memory_traffic.py`
    roofline     the larger of the two
    traffic      the part of the memory time that does not hide behind the arithmetic
    round trip   the part of that which goes to memory written and read within the step
    launch       what the smallest op takes, if `t` leaves that much above the roofline
    slow         the rest; unexplained if no model knows the op

The time of ops that do no work (views, allocations, compositions, the autograd engine) is all the
host's. An op of unknown kind may do anything besides the known ops it runs: its own time above a
launch is unexplained.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torchweld.core.number_text import counted
from torchweld.profiles.accounting.memory_traffic import (
    NONE,
    Rates,
    Traffic,
    traffic_of,
    uncosted,
)
from torchweld.profiles.accounting.op_calls import Work
from torchweld.profiles.accounting.op_costs import arithmetic_dtype, works_of
from torchweld.profiles.accounting.time_splits import Bound, OpAccount, Split
from torchweld.profiles.attributing.op_kinds import Kind, hides_kernels, kind_of
from torchweld.profiles.attributing.op_nesting import kinds_in_place, launching
from torchweld.profiles.profile import Op, Profile

MEASURE = "`torchweld info --measure` measures them on an idle machine"
ELSEWHERE = (
    "if the trace was recorded on this machine, `torchweld profile --this-machine` prices it; else "
    "profile with torchweld where the model runs: its own traces carry the peaks along"
)


def is_priced(profile: Profile) -> bool:
    """Whether it is known how fast the machine or the device could be."""
    if profile.device is not None:
        return bool(profile.device.peak_gflops) or profile.device.peak_gbps is not None
    peaks = profile.peaks
    return peaks is not None and Rates.measured(peaks, profile.about.threads) is not None


def without_peaks(profile: Profile) -> str:
    """What is missing, and what helps."""
    if profile.device is not None:
        return "no peaks of this device are known, so nothing tells how fast its kernels could be"
    where = "of this machine" if profile.about.source == "live" else "of its machine"
    known = where if profile.peaks is None else f"at {profile.about.threads} threads"
    remedy = MEASURE if profile.about.source == "live" else ELSEWHERE
    return f"no peaks {known} are known, so nothing tells how fast ops could be; {remedy}"


@dataclass(kw_only=True)
class Priced:
    """The account of every op, and what each module spent outside ops."""

    ops: list[OpAccount]
    modules: list[Split]
    notices: list[str] = field(default_factory=list)


def price_on_cpu(profile: Profile) -> Priced:
    """Explains every op of a profile without a device."""
    works = works_of(profile.ops)
    pricing = _CpuPricing(profile, works)
    hidden = sum(
        hides_kernels(op.name) and work is not None
        for op, work in zip(profile.ops, works, strict=True)
    )
    training = profile.about.training
    if hidden:
        pricing.notices.append(
            f"the kernels inside {counted(hidden, 'call')} of compiled graphs do not show, so "
            "their time is unexplained and their launches are not counted; with "
            "TORCHINDUCTOR_CPP_ENABLE_KERNEL_PROFILE=1 torch.compile shows those for the CPU"
            + ("; what only they keep for backward is not counted" if training else "")
        )
    names, parents = [op.name for op in profile.ops], [op.parent for op in profile.ops]
    launches = launching(names, parents)
    kinds = kinds_in_place(names, parents)
    return Priced(
        ops=[
            pricing.opaque(op, launches[i])
            if works[i] is None and kinds[i] == "unknown"
            else pricing.explain(i, op, works[i], launches[i])
            for i, op in enumerate(profile.ops)
        ],
        modules=[host_split(module.python_us + module.engine_us) for module in profile.modules],
        notices=pricing.notices,
    )


def host_split(time_us: float) -> Split:
    """All of it is the host's. Below zero, the correction took too much away."""
    return Split(host_us=max(time_us, 0.0), unexplained_us=min(time_us, 0.0))


class _CpuPricing:
    """The rates of one machine, applied to one op after another."""

    def __init__(self, profile: Profile, works: Sequence[Work | None]) -> None:
        self.op_cost_us = profile.op_cost_us
        self.notices: list[str] = []
        threads = profile.about.threads
        peaks = profile.peaks
        self.gflops: dict[str, float | None] = {}
        self.rates = None if peaks is None else Rates.measured(peaks, threads)
        if self.rates is None or peaks is None:
            self.traffic = uncosted(profile.ops, works)
            self.notices.append(
                f"{without_peaks(profile)}; until then the time of ops that do work is unexplained"
            )
            return
        self.traffic = traffic_of(profile.ops, works, self.rates)
        dtypes = {
            arithmetic_dtype(op)
            for op, work in zip(profile.ops, works, strict=True)
            if work is not None and work.flops
        }
        self.gflops = {dtype: peaks.fma_gflops(dtype, threads) for dtype in sorted(dtypes)}
        for dtype in [dtype for dtype, rate in self.gflops.items() if rate is None]:
            self.notices.append(
                f"the peak of {dtype} at {threads} threads is not known, so the arithmetic of ops "
                "in that type cannot be priced"
            )

    def explain(self, i: int, op: Op, work: Work | None, launches: bool) -> OpAccount:
        kind = kind_of(op.name)
        if work is None:
            return _of_host(kind, op.self_us, launches)
        if self.rates is None:
            unpriced = Split(unexplained_us=op.self_us)
            return _of_work(kind, work, self.traffic[i], launches, "unknown", 0.0, unpriced)
        traffic = self.traffic[i]
        arithmetic_us = self._arithmetic_us(op, work)
        split, bound = explain_work(op.self_us, arithmetic_us, traffic, self.op_cost_us)
        roofline_us = max(arithmetic_us or 0.0, traffic.memory_us)
        return _of_work(kind, work, traffic, launches, bound, roofline_us, split)

    def opaque(self, op: Op, launches: bool) -> OpAccount:
        """An op of unknown kind around known ones, which are charged with what they move."""
        split, bound = explain_work(op.self_us, None, NONE, self.op_cost_us)
        work = Work(flops=None, reads=(), writes=())
        return _of_work("unknown", work, NONE, launches, bound, 0.0, split)

    def _arithmetic_us(self, op: Op, work: Work) -> float | None:
        """None if it is not known how much there is, or how fast it could be."""
        if not work.flops:
            return None if work.flops is None else 0.0
        gflops = self.gflops[arithmetic_dtype(op)]
        return None if gflops is None else work.flops / (1e3 * gflops)


def explain_work(
    time_us: float, arithmetic_us: float | None, traffic: Traffic, op_cost_us: float
) -> tuple[Split, Bound]:
    """The parts of the time of an op that does work, and what holds it back."""
    known = arithmetic_us is not None
    arithmetic = arithmetic_us if arithmetic_us is not None else 0.0
    # An op that took less time moved its bytes faster than their price, or did not move all of
    # them: rates hold for the probed sizes of working sets, and an op need not read all it is
    # given.
    memory_us = min(traffic.memory_us, max(time_us, 0.0))
    excess_us = max(0.0, memory_us - arithmetic)
    share = traffic.round_trip_us / traffic.memory_us if traffic.memory_us else 0.0
    above_us = time_us - max(arithmetic, memory_us)
    launch_us = min(op_cost_us, max(0.0, above_us))
    rest_us = above_us - launch_us
    is_slow = known and rest_us > 0
    split = Split(
        arithmetic_us=arithmetic,
        traffic_us=excess_us * (1 - share),
        round_trip_us=excess_us * share,
        launch_us=launch_us,
        slow_us=rest_us if is_slow else 0.0,
        unexplained_us=0.0 if is_slow else rest_us,
    )
    if not known:
        return split, "unknown"
    if 2 * launch_us > time_us:
        return split, "overhead"
    return split, "compute" if arithmetic >= memory_us and arithmetic else "bandwidth"


def _of_host(kind: Kind, time_us: float, launches: bool) -> OpAccount:
    return OpAccount(
        kind=kind,
        flops=0,
        read_bytes=0,
        written_bytes=0,
        round_trip_bytes=0,
        roofline_us=0.0,
        bound="overhead",
        split=host_split(time_us),
        launches=int(launches),
    )


def _of_work(
    kind: Kind,
    work: Work,
    traffic: Traffic,
    launches: bool,
    bound: Bound,
    roofline_us: float,
    split: Split,
) -> OpAccount:
    return OpAccount(
        kind=kind,
        flops=work.flops or 0,
        read_bytes=work.read_bytes,
        written_bytes=work.written_bytes,
        round_trip_bytes=traffic.round_trip_bytes,
        roofline_us=roofline_us,
        bound=bound,
        split=split,
        launches=int(launches),
    )
