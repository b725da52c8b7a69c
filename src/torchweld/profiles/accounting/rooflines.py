"""The op table: calls of one op added up, with the rates they reached.

In: a `Profile` and its `Account`. Out: one `OpRow` for each name and phase, the longest first.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from torchweld.core.not_measured import NotMeasured
from torchweld.profiles.accounting.time_splits import Account, Bound, Split, added, measured
from torchweld.profiles.attributing.op_kinds import Kind
from torchweld.profiles.profile import Phase, Profile

# Times and peaks are each good to a tenth or so.
TOLERATED_EXCESS = 1.1


@dataclass(frozen=True, kw_only=True, slots=True)
class OpRow:
    """All calls of one op in one phase. Rates and `of_roofline` are None without a model or times.

    If an op was faster than its roofline by more than measurements differ, it did not move or
    compute at the known rates: its share of the roofline is not known.
    """

    name: str
    kind: Kind
    phase: Phase
    calls: int
    # The time that the account explains. On a device: its kernels and the gaps before them.
    self_us: float | NotMeasured
    total_us: float | NotMeasured  # on the host, what ran inside included
    share: float | NotMeasured  # of the step
    flops: int
    moved_bytes: int
    gflops: float | None
    gbps: float | None
    of_roofline: float | None  # 1: as fast as the roofline allows; None if it was faster
    bound: Bound  # what most of the time is bound by
    split: Split | NotMeasured


def roofline(profile: Profile, account: Account) -> tuple[OpRow, ...]:
    """The op table, by own time."""
    groups: dict[tuple[str, Phase], list[int]] = {}
    device = profile.device
    for i, op in enumerate(profile.ops):
        if device is not None and not device.covers_op(op):
            continue  # not in the account's figures, so not a call of it
        groups.setdefault((op.name, op.phase), []).append(i)
    step = account.step
    if isinstance(step, NotMeasured):
        counted = [_counted(profile, account, members, step) for members in groups.values()]
        return tuple(sorted(counted, key=lambda row: (-row.flops, -row.moved_bytes, -row.calls)))
    rows = [_row(profile, account, members, step.total_us) for members in groups.values()]
    return tuple(sorted(rows, key=lambda row: -measured(row.split).total_us))


def _counted(profile: Profile, account: Account, members: list[int], why: NotMeasured) -> OpRow:
    """What is known of ops without their times."""
    found = [account.ops[i] for i in members]
    first = profile.ops[members[0]]
    return OpRow(
        name=first.name,
        kind=found[0].kind,
        phase=first.phase,
        calls=len(members),
        self_us=why,
        total_us=why,
        share=why,
        flops=sum(op.flops for op in found),
        moved_bytes=sum(op.read_bytes + op.written_bytes for op in found),
        gflops=None,
        gbps=None,
        of_roofline=None,
        bound="unknown",
        split=why,
    )


def _row(profile: Profile, account: Account, members: list[int], whole_us: float) -> OpRow:
    found = [account.ops[i] for i in members]
    split = added(measured(op.split) for op in found)
    flops = sum(op.flops for op in found)
    moved = sum(op.read_bytes + op.written_bytes for op in found)
    roofline_us = sum(op.roofline_us for op in found)
    # Own time on a CPU; on a device the gaps before its kernels are not time of theirs.
    working_us = split.total_us
    if profile.device is not None:
        working_us -= split.launch_us + split.host_us
    rated = working_us > 0 and roofline_us > 0
    bounds: Counter[Bound] = Counter()
    for op in found:
        bounds[op.bound] += measured(op.split).total_us  # type: ignore[assignment]  # µs, not a count
    first = profile.ops[members[0]]
    return OpRow(
        name=first.name,
        kind=found[0].kind,
        phase=first.phase,
        calls=len(members),
        self_us=split.total_us,
        total_us=sum(profile.ops[i].total_us for i in members),
        share=split.total_us / whole_us if whole_us > 0 else 0.0,
        flops=flops,
        moved_bytes=moved,
        gflops=1e-3 * flops / working_us if rated and flops else None,
        gbps=1e-3 * moved / working_us if rated else None,
        of_roofline=reached(roofline_us / working_us) if rated else None,
        bound=bounds.most_common(1)[0][0],
        split=split,
    )


def reached(share: float) -> float | None:
    """Share of the roofline, at most 1; None if the roofline cannot be right."""
    return min(share, 1.0) if share <= TOLERATED_EXCESS else None
