"""Where a profile's time goes: arithmetic, necessary traffic, four wastes, and what is unexplained.

In: a `Profile`. Out: an `Account`, with one `OpAccount` per op and one `ModuleAccount` per module.
Pure functions; nothing is measured here. `cpu_pricing.py` explains ops on a CPU,
`device_pricing.py` what ran on a device; here their parts are added up by module and for the step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from torchweld.core.argument_checks import check_kind
from torchweld.core.not_measured import NotMeasured
from torchweld.core.number_text import duration
from torchweld.profiles.accounting.cpu_pricing import Priced, price_on_cpu
from torchweld.profiles.accounting.device_pricing import price_on_device
from torchweld.profiles.accounting.rooflines import OpRow, roofline
from torchweld.profiles.accounting.time_splits import (
    PARTS,
    Account,
    Bound,
    ModuleAccount,
    OpAccount,
    Split,
    measured,
)
from torchweld.profiles.profile import Module, Profile, deepest_first

__all__ = [
    "Account",
    "Bound",
    "ModuleAccount",
    "OpAccount",
    "OpRow",
    "Split",
    "account",
    "roofline",
]

# `dataclasses.astuple` copies deeply, which takes longer than all the rest.
_parts = attrgetter(*PARTS)
_UNEXPLAINED = PARTS.index("unexplained_us")
# A share of the step: if ops beat a peak by more, the peak is too low.
TOLERATED_BEYOND = 0.05


def account(profile: Profile) -> Account:
    """Explains a profile."""
    check_kind("account", "profile", profile, Profile, "what tw.profile or tw.read_trace returns")
    if isinstance(profile.step_us, NotMeasured):
        return _untimed(_accounted(profile, 0.0), profile.step_us)
    return _accounted(profile, profile.step_us)


def _untimed(timed: Account, why: NotMeasured) -> Account:
    """The same without anything that depends on times."""
    return Account(
        ops=tuple(replace(op, split=why, bound="unknown") for op in timed.ops),
        modules=tuple(replace(m, split=why, own=why, bound="unknown") for m in timed.modules),
        step=why,
        explained=why,
        notices=timed.notices,
    )


def _accounted(profile: Profile, step_us: float) -> Account:
    if profile.device is None:
        priced = price_on_cpu(profile)
    else:
        priced, step_us = price_on_device(profile, profile.device), profile.device.span_us
    sums = _own_sums(profile, priced)
    own = [_split(total.parts) for total in sums]
    _add_children(profile.modules, sums)
    step = _sum_of(map(_parts, own))
    step[_UNEXPLAINED] += step_us - sum(step)
    return Account(
        ops=tuple(priced.ops),
        modules=tuple(
            ModuleAccount(
                launches=total.launches,
                flops=total.flops,
                moved_bytes=total.moved_bytes,
                round_trip_bytes=total.round_trip_bytes,
                roofline_us=total.roofline_us,
                bound=_bound(total),
                split=_split(total.parts),
                own=split,
            )
            for total, split in zip(sums, own, strict=True)
        ),
        step=_split(step),
        explained=_explained(profile, priced, step_us),
        notices=(
            *priced.notices,
            *_about_peaks(profile, priced, step_us),
            *_about_memory(profile, _split(step)),
        ),
    )


def beyond_peaks_us(ops: Iterable[OpAccount]) -> float:
    """Time by which ops beat their arithmetic at the peak. If it is long, the peak is wrong.

    Memory does not tell: an op need not read all that it is given.
    """
    splits = (op.split for op in ops if isinstance(op.split, Split))
    return sum(s.arithmetic_us - s.total_us for s in splits if 0 < s.total_us < s.arithmetic_us)


def peaks_hold(account: Account) -> bool:
    """Whether ops stay below the peaks. If not, the peaks are too low, and so is every bound."""
    step = account.step
    if isinstance(step, NotMeasured):
        return True
    return beyond_peaks_us(account.ops) <= TOLERATED_BEYOND * step.total_us


def _about_peaks(profile: Profile, priced: Priced, step_us: float) -> list[str]:
    """A notice if ops beat their rooflines."""
    beyond_us = beyond_peaks_us(priced.ops)
    if profile.device is not None or not beyond_us > TOLERATED_BEYOND * step_us:
        return []
    return [
        f"ops took {duration(beyond_us)} less than their arithmetic would at this machine's known "
        "peaks, so the peaks were measured while it was busy, and rooflines are too low; "
        "`torchweld info --measure` measures them again on an idle machine"
    ]


def _about_memory(profile: Profile, step: Split) -> list[str]:
    """A notice if the trace does not tell which memory an op reads."""
    if profile.about.source != "trace" or step.round_trip_us > 0:
        return []
    if step.traffic_us <= 0 and (profile.device is None or not profile.ops):
        return []
    if any(x is not None and x.storage is not None for op in profile.ops for x in op.inputs):
        return []
    return [
        "the trace does not name the memory behind tensors, so round trips are not known: what "
        "they take is part of the traffic"
    ]


@dataclass(kw_only=True, slots=True)
class _Sums:
    """What adds up over the ops of a module."""

    parts: list[float]
    launches: int = 0
    flops: int = 0
    moved_bytes: int = 0
    round_trip_bytes: int = 0
    roofline_us: float = 0.0
    compute_us: float = 0.0  # roofline of the ops that arithmetic holds back

    def add(self, other: _Sums) -> None:
        self.parts = [a + b for a, b in zip(self.parts, other.parts, strict=True)]
        self.launches += other.launches
        self.flops += other.flops
        self.moved_bytes += other.moved_bytes
        self.round_trip_bytes += other.round_trip_bytes
        self.roofline_us += other.roofline_us
        self.compute_us += other.compute_us


def _own_sums(profile: Profile, priced: Priced) -> list[_Sums]:
    """Sums for each module without its children."""
    sums = [_Sums(parts=list(_parts(split))) for split in priced.modules]
    for op, found in zip(profile.ops, priced.ops, strict=True):
        total = sums[op.module]
        split = measured(found.split)
        total.parts = [a + b for a, b in zip(total.parts, _parts(split), strict=True)]
        total.launches += found.launches
        total.flops += found.flops
        total.moved_bytes += found.read_bytes + found.written_bytes
        total.round_trip_bytes += found.round_trip_bytes
        total.roofline_us += found.roofline_us
        if split.arithmetic_us >= found.roofline_us:
            total.compute_us += found.roofline_us
    return sums


def _add_children(modules: Sequence[Module], sums: Sequence[_Sums]) -> None:
    """Makes sums of what is inside a module out of sums of what is in no child."""
    for i in deepest_first([module.parent for module in modules]):
        if modules[i].parent >= 0:
            sums[modules[i].parent].add(sums[i])


def _sum_of(rows: Iterable[tuple[float, ...]]) -> list[float]:
    return [sum(column) for column in zip(*rows, strict=True)] or [0.0] * len(PARTS)


def _split(parts: Sequence[float]) -> Split:
    return Split(**dict(zip(PARTS, parts, strict=True)))


def _bound(total: _Sums) -> Bound:
    """What a module is bound by, like an op: whatever takes the larger part of the roofline."""
    split = _split(total.parts)
    if split.total_us > 0 and 2 * (split.launch_us + split.host_us) > split.total_us:
        return "overhead"
    if not total.roofline_us:
        return "unknown"
    return "compute" if 2 * total.compute_us > total.roofline_us else "bandwidth"


def _explained(profile: Profile, priced: Priced, step_us: float) -> float:
    """Share of the step that is explained and below the root."""
    explained_us = covered_us = 0.0
    places = [op.module for op in profile.ops] + list(range(len(profile.modules)))
    splits = [measured(found.split) for found in priced.ops] + priced.modules
    for module, split in zip(places, splits, strict=True):
        covered_us += split.total_us
        if module > 0:
            explained_us += split.explained_us
    if step_us <= 0:
        return 0.0
    # An excess over the step is an error of that size, so that much less is explained.
    too_much_us = max(0.0, covered_us - step_us)
    return max(0.0, explained_us - 2 * too_much_us) / step_us
