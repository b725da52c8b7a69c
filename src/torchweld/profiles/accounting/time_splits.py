"""The data of an account: times in their parts, for ops, modules and the step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Literal

from torchweld.core.not_measured import NotMeasured
from torchweld.profiles.attributing.op_kinds import Kind

Bound = Literal["overhead", "bandwidth", "compute", "unknown"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """A time in its parts, µs. They add up to `total_us`; only `unexplained_us` may be negative."""

    arithmetic_us: float = 0.0  # FLOPs over the machine's peak
    traffic_us: float = 0.0  # bytes that have to move, beyond what hides behind the arithmetic
    launch_us: float = 0.0  # waste 1: starting ops that do work; on a device: idle for lack of work
    round_trip_us: float = 0.0  # waste 2: bytes one op writes and another reads back
    host_us: float = 0.0  # waste 3: Python, dispatcher, autograd, views and metadata
    slow_us: float = 0.0  # waste 4: above what the op's roofline allows
    unexplained_us: float = 0.0

    @property
    def total_us(self) -> float:
        return self.useful_us + self.waste_us + self.unexplained_us

    @property
    def useful_us(self) -> float:
        return self.arithmetic_us + self.traffic_us

    @property
    def waste_us(self) -> float:
        return self.launch_us + self.round_trip_us + self.host_us + self.slow_us

    @property
    def explained_us(self) -> float:
        """The total without what is unexplained, whether that is positive or negative."""
        return self.total_us - abs(self.unexplained_us)

    @property
    def netted(self) -> Split:
        """The same time without a negative part: the excess is taken off all parts.

        So no part is more than the whole. Unchanged if the time itself is below zero.
        """
        if self.unexplained_us >= 0 or self.total_us <= 0:
            return self
        left = self.total_us / (self.total_us - self.unexplained_us)
        kept = {part: left * getattr(self, part) for part in PARTS}
        return Split(**{**kept, "unexplained_us": 0.0})


PARTS: tuple[str, ...] = tuple(f.name for f in fields(Split))


def measured(split: Split | NotMeasured) -> Split:
    """The split, for callers who know that it was measured."""
    assert isinstance(split, Split), split
    return split


def added(splits: Iterable[Split]) -> Split:
    """Part by part."""
    many = list(splits)
    return Split(**{part: sum(getattr(split, part) for split in many) for part in PARTS})


@dataclass(frozen=True, kw_only=True, slots=True)
class OpAccount:
    """One op's own time (what ran inside it excluded), explained."""

    kind: Kind
    flops: int
    read_bytes: int
    written_bytes: int
    round_trip_bytes: int  # of these: written by one op of the step and read by another
    roofline_us: float
    bound: Bound
    split: Split | NotMeasured
    launches: int = (
        0  # 1 for an op that does work and runs in no other that does; on a device: its kernels
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleAccount:
    """One module with all that is inside it, forward and backward."""

    launches: int
    flops: int
    moved_bytes: int
    round_trip_bytes: int
    roofline_us: float
    bound: Bound
    split: Split | NotMeasured  # of everything inside
    own: Split | NotMeasured  # of what is in no child


@dataclass(frozen=True, kw_only=True)
class Account:
    """Parallel to the profile: `ops[i]` explains `profile.ops[i]`, `modules[i]` its module i.

    `explained` is the share of the step that is explained and belongs to a module below the root
    (or to the optimizer). `step` adds up to `profile.step_us`; with a device, to the time from
    its first kernel to its last. If the step is not measured, no time is: what is left are counts,
    bytes, and rooflines, which follow from both.
    """

    ops: tuple[OpAccount, ...]
    modules: tuple[ModuleAccount, ...]
    step: Split | NotMeasured
    explained: float | NotMeasured
    notices: tuple[str, ...] = ()
