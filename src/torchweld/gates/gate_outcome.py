"""What a gate finds, as plain data: changed counters, lost blocks, verdicts on time, exit code."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from torchweld.core.not_measured import NotMeasured
from torchweld.gates.step_counters import NAMES, Counters
from torchweld.welds.found_blocks import Refusal

GateVerdict = Literal["as before", "slower", "faster", "not measured"]

PASSED, FAILED, UNDECIDED = 0, 1, 2
UNTIMED = NotMeasured("nothing was timed")


@dataclass(frozen=True, kw_only=True)
class CounterChange:
    """A counter that changed, in a module ("" is the whole step). Less is better."""

    counter: str
    module: str
    before: int
    after: int

    @property
    def worse(self) -> bool:
        return self.after > self.before


@dataclass(frozen=True, kw_only=True)
class LostBlock:
    """A block of the plan that no longer runs fused."""

    path: str
    reason: str
    op: str = ""  # "aten.layer_norm", where an op is the reason
    where: str = ""  # "model.py:17", where a line is

    @property
    def why(self) -> str:
        """The reason with its op and its line."""
        about = ", ".join(part for part in (self.op, self.where) if part)
        return f"{self.reason} ({about})" if about else self.reason


@dataclass(frozen=True, kw_only=True)
class TimeVerdict:
    """Wall time of one workload; a speed-up is against `against`.

    baseline_speedup, baseline_interval: None where the baseline's times are not asked, but those of
    a rival in the same rounds
    remedies: what would help where the verdict is "not measured", with options to paste
    """

    workload: str
    verdict: GateVerdict
    reason: str
    against: str
    speedup: float | NotMeasured = UNTIMED
    interval: tuple[float, float] | NotMeasured = UNTIMED
    noise: float | NotMeasured = UNTIMED
    baseline_speedup: float | NotMeasured | None = None
    baseline_interval: tuple[float, float] | NotMeasured | None = None
    tolerance: float = 0.0
    measured: int = 0  # comparisons made here
    remedies: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """`lost` and worse `changes` fail; improved ones are told."""

    baseline: str
    what: str
    accepted: str  # when the baseline was
    changes: tuple[CounterChange, ...]
    lost: tuple[LostBlock, ...]
    welded: tuple[int, int]  # blocks that ran fused, before and now
    times: tuple[TimeVerdict, ...]
    notes: tuple[str, ...]
    accept_command: str

    @property
    def worse(self) -> tuple[CounterChange, ...]:
        return tuple(change for change in self.changes if change.worse)

    @property
    def improved(self) -> tuple[CounterChange, ...]:
        return tuple(change for change in self.changes if not change.worse)

    @property
    def code(self) -> int:
        """Counters first: they are certain, whatever the clock says."""
        verdicts = {one.verdict for one in self.times}
        if self.lost or self.worse or "slower" in verdicts:
            return FAILED
        return UNDECIDED if "not measured" in verdicts else PASSED


def changes_of(before: Counters, after: Counters) -> list[CounterChange]:
    """Each changed counter: of the step, and of the innermost modules in which it is worse.

    Modules that one side does not have are judged by the module around them, so
    renaming alone is not a change.
    """
    found = []
    for counter in NAMES:
        old, new = before.step(counter), after.step(counter)
        worse = _innermost(_worse_modules(before, after, counter))
        if old != new:
            found.append(CounterChange(counter=counter, module="", before=old, after=new))
        inside_before, inside_after = before.inside(counter), after.inside(counter)
        found += [
            CounterChange(
                counter=counter, module=path, before=inside_before[path], after=inside_after[path]
            )
            for path in worse
            if path
        ]
    return found


def _worse_modules(before: Counters, after: Counters, counter: str) -> list[str]:
    old, new = before.inside(counter), after.inside(counter)
    return [path for path in new if path in old and new[path] > old[path]]


def _innermost(paths: Sequence[str]) -> list[str]:
    holders = {path.rpartition(".")[0] for path in paths}
    grown = set(holders)
    for path in holders:  # and what those stand in
        while path:
            path = path.rpartition(".")[0]
            grown.add(path)
    return [path for path in paths if path not in grown]


def lost_blocks(before: Counters, after: Counters, refused: Iterable[Refusal]) -> list[LostBlock]:
    """Blocks that ran fused in the baseline and do not now, with the reason."""
    why = {refusal.path: refusal for refusal in refused}
    return [
        _lost(path, why.get(path), after.reasons.get(path) or "it is not welded")
        for path in before.welded
        if path not in after.welded
    ]


def _lost(path: str, refusal: Refusal | None, otherwise: str) -> LostBlock:
    if refusal is None:
        return LostBlock(path=path, reason=otherwise)
    return LostBlock(path=path, reason=refusal.reason, op=refusal.op, where=refusal.where)
