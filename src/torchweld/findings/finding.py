"""A `Finding`: what wastes time, why, what to do, and the most that could be won.

Rules make `Draft`s: a finding together with its claims. A claim names microseconds that the account
of a profile gives to one part of one op, or to what one module does outside ops: "the launch time
of op 17". Claims on the same part are claims on the same microseconds. So several findings can be
added up without counting any microsecond twice (`Evidence.settled_us`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from torchweld.core.number_text import duration, share

# A larger bound would only say "nearly all of the step"; this keeps it finite.
MOST_BOUND = 1000.0


class Slice(NamedTuple):
    """Which microseconds: a part of the own time of an op, or of a module's time outside ops.

    The time just before an outermost op is part of what a module does outside ops. Of "step", it is
    time on the clock that no op or module is known to have spent.
    """

    of: Literal["op", "module", "before op", "step"]
    number: int
    part: str


Claims = Mapping[Slice, float]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One waste, wherever in the model it is.

    `saved_us` is an upper bound: no more than this goes away from the step if the action works as
    well as the machine's peaks allow. `bound` is the same as a speed-up of the step. For a
    trace with several steps it is their mean; the evidence is about all of them. Findings overlap:
    `combined_bound` adds them up.
    """

    rule: str
    title: str
    cause: str  # one sentence
    action: str
    evidence: tuple[str, ...]
    waste: str  # what `saved_us` is, as in "15 % of the step is ..."
    saved_us: float  # of every step
    bound: float
    modules: tuple[str, ...] = ()  # paths; "layers.*.mlp" for many
    once_us: float = 0.0  # of the first step only

    @property
    def sentence(self) -> str:
        """The bound in words."""
        if self.once_us:
            return f"{duration(self.once_us)} once, nothing in later steps: {self.waste}"
        lost = share(1 - 1 / self.bound, 1)
        if self.bound >= MOST_BOUND:
            return f"more than {MOST_BOUND:.0f}x: nearly all of the step is {self.waste}"
        return f"at most {self.bound:.2f}x: {lost} of the step is {self.waste}"


@dataclass(frozen=True, kw_only=True)
class Draft:
    """What a rule found. `always` keeps it even if it costs next to nothing per step."""

    rule: str
    title: str
    cause: str
    action: str
    evidence: tuple[str, ...]
    waste: str
    claims: Claims
    modules: tuple[str, ...] = ()
    once_us: float = 0.0
    always: bool = False

    def finding(self, saved_us: float, step_us: float) -> Finding:
        return Finding(
            rule=self.rule,
            title=self.title,
            cause=self.cause,
            action=self.action,
            evidence=self.evidence,
            waste=self.waste,
            saved_us=min(saved_us, step_us),
            bound=bound_of(saved_us, step_us),
            modules=self.modules,
            once_us=self.once_us,
        )


def bound_of(saved_us: float, step_us: float) -> float:
    """The speed-up of a step that loses `saved_us`."""
    if step_us <= 0:
        return 1.0
    left_us = step_us - saved_us
    return step_us / left_us if left_us * MOST_BOUND > step_us else MOST_BOUND


def union(claims: Iterable[Claims]) -> dict[Slice, float]:
    """Every claimed microsecond once: of two claims on one slice, the larger."""
    found: dict[Slice, float] = {}
    for each in claims:
        for slice_, us in each.items():
            if us > found.get(slice_, 0.0):
                found[slice_] = us
    return found
