"""A `Plan`: which blocks to weld and which not, with every reason and measurement. Plain data.

`tw.plan` makes plans, `tw.apply` carries them out. A plan saves to JSON and loads again. Nothing in
a file is executed, and a file that does not fit the declared types is refused. A figure that was
not measured is a `NotMeasured` with the reason.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, TypeVar

from torch import nn

from torchweld.core.html_shown import ShownAsPage
from torchweld.core.measured_speed import Speed
from torchweld.core.not_measured import NotMeasured
from torchweld.core.record_fields import Bounds, Count, Length, Measured, Positive, Ratio, Word
from torchweld.core.record_format import RecordFormat
from torchweld.core.saved_records import SavedRecord
from torchweld.machine.fingerprint import Fingerprint
from torchweld.plans import earlier_plans
from torchweld.welds.found_blocks import Block, Refusal
from torchweld.welds.weld_decisions import Choice, Decision, Ranges
from torchweld.welds.weld_marks import plain_root

# "behind": far behind another choice at first look. "known": not timed here, but known to be faster
# by a table. "not known": neither.
Verdict = Literal[
    "faster",
    "slower",
    "same",
    "not measured",
    "behind",
    "known",
    "not known",
    "wrong",
    "cannot serve",
]
# Verdicts that need not be measured again.
SETTLED = ("faster", "slower", "same", "behind", "cannot serve")
# What became of a block. "not faster" was measured; "not measured" could not be.
Outcome = Literal["welded", "not faster", "not measured", "not known", "cannot be welded"]

UNASKED = NotMeasured("it was not asked for")
Share = Annotated[float, Bounds(0, 1)]


class Judged:
    """Has a verdict, and a speed or the reason why there is none."""

    verdict: Verdict
    speed: Speed | NotMeasured

    @property
    def reason(self) -> str:
        """Why there is no speed; "" if there is one."""
        return self.speed.reason if isinstance(self.speed, NotMeasured) else ""

    def problems(self) -> Iterator[str]:
        """Problems of a record that was read from a file, in words."""
        timed = self.verdict in ("faster", "slower", "same")
        if timed != isinstance(self.speed, Speed):
            yield f"is {self.verdict!r} {'without a' if timed else 'with a'} measured speed"


@dataclass(frozen=True, kw_only=True)
class TensorError:
    """How far an output or a gradient is from the reference in float64, at most.

    Of a block in the tensor's own unit, of the whole model relative to its largest value.
    """

    tensor: Word  # "output"; "grad x"; "grad 0": of the block's first tensor
    eager: Measured
    fused: Measured
    of_allowed: Measured  # to what the numerical rule allows: 1 is the bound
    ok: bool = True


@dataclass(frozen=True, kw_only=True)
class Trial(Judged):
    """One choice for a block, tried at one number of rows."""

    choice: Choice
    verified: bool
    verdict: Verdict
    speed: Speed | NotMeasured  # over the original, of one call of one module
    error_ratio: Measured | NotMeasured  # to what the numerical rule allows: 1 is the bound
    copied_bytes: Count = 0  # of one module
    copy_gain: Ratio | NotMeasured = UNASKED  # speed over the best choice without a copy
    # Training only: what one call keeps for its backward, and what the original keeps.
    saved_bytes: Count | NotMeasured = UNASKED
    original_saved_bytes: Count | NotMeasured = UNASKED
    over_saving: Ratio | NotMeasured = UNASKED  # of a recompute: speed over the best that saves
    # Tensor by tensor; kept of what was chosen and of what is wrong, so that plans stay small.
    errors: Annotated[tuple[TensorError, ...], Length(most=10_000)] = ()

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__dict__.update(earlier_plans.trial(state))


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """What was tried for some blocks at one number of rows, and what was chosen."""

    rows: Positive
    count: Count  # calls of one block, over all workloads
    trials: Annotated[tuple[Trial, ...], Length(most=100)]
    chosen: Choice | None
    reason: str
    # When its times were measured, in UTC, if by an earlier plan on this machine.
    remembered: Word | None = None

    @property
    def best(self) -> Trial | None:
        return next((trial for trial in self.trials if trial.choice == self.chosen), None)

    @property
    def outcome(self) -> Outcome:
        if self.chosen is not None:
            return "welded"
        if any(trial.verdict == "not measured" for trial in self.trials):
            return "not measured"
        verdicts = [trial.verdict for trial in self.trials if trial.verified]
        if "not known" in verdicts:
            return "not known"
        return "not faster" if verdicts else "cannot be welded"

    @property
    def unmeasured(self) -> bool:
        """Whether nothing was chosen because it could not be measured."""
        return self.outcome == "not measured"

    @property
    def why_unmeasured(self) -> str:
        """Why the first such trial could not be measured; "" if there is none."""
        found = (trial.reason for trial in self.trials if trial.verdict == "not measured")
        return next(found, "")

    def problems(self) -> Iterator[str]:
        """Problems of a record that was read from a file, in words."""
        if self.chosen is not None and not (self.best is not None and self.best.verified):
            yield "has chosen what no trial has verified"

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__dict__.update(earlier_plans.tuning(state))


class Tuned:
    """What was tuned, by number of rows."""

    tunings: tuple[Tuning, ...]

    def by_rows(self) -> Ranges:
        """Ranges of rows. Between two measured counts with the same choice, that choice holds."""
        chosen: dict[int, Choice | None] = {}
        for tuning in sorted(self.tunings, key=lambda tuning: (tuning.rows, -tuning.count)):
            # The same rows may be tuned for two layouts. If the original is better for either, it
            # runs for both.
            lost = tuning.chosen is None
            chosen[tuning.rows] = None if lost else chosen.get(tuning.rows, tuning.chosen)
        ranges: list[tuple[int, int, Choice | None]] = []
        for rows, choice in chosen.items():
            if ranges and ranges[-1][2] == choice:
                ranges[-1] = (ranges[-1][0], rows, choice)
            else:
                ranges.append((rows, rows, choice))
        return tuple(ranges)

    @property
    def welded(self) -> bool:
        return any(tuning.chosen is not None for tuning in self.tunings)

    @property
    def copied_bytes(self) -> int:
        """Bytes of its copy of the weights, which all row counts share."""
        return max((t.best.copied_bytes for t in self.tunings if t.best is not None), default=0)

    @property
    def outcome(self) -> Outcome:
        """The first of these outcomes that any number of rows has."""
        found = {tuning.outcome for tuning in self.tunings}
        order: tuple[Outcome, ...] = ("welded", "not measured", "not known", "not faster")
        return next((one for one in order if one in found), "cannot be welded")


@dataclass(frozen=True, kw_only=True)
class Planned(Tuned):
    """A block with its tuning."""

    block: Block
    tunings: Annotated[tuple[Tuning, ...], Length(most=10_000)]

    def problems(self) -> Iterator[str]:
        """Problems of a record that was read from a file, in words."""
        if not self.block.calls:
            yield "has a block without calls; only blocks that were called are planned"
        called = {call.rows for call in self.block.calls}
        odd = (tuning.rows for tuning in self.tunings if tuning.rows not in called)
        for rows in odd:
            yield f"is tuned for {rows} rows, and was never called with that many"


@dataclass(frozen=True, kw_only=True)
class PlannedGroup(Tuned):
    """Blocks that read the same input, tuned as one op.

    A trial's speed is over its members one by one, each as it is planned: welded, or left as it is.
    """

    name: Word  # the `group` of its blocks
    tunings: Annotated[tuple[Tuning, ...], Length(most=10_000)]


AnyPlanned = TypeVar("AnyPlanned", Planned, PlannedGroup)


def unwelded(planned: AnyPlanned, reason: str) -> AnyPlanned:
    """The same with nothing chosen."""
    tunings = tuple(replace(one, chosen=None, reason=reason) for one in planned.tunings)
    return replace(planned, tunings=tunings)


def structure_of(model: nn.Module) -> str:
    """A hash of names, shapes and types; the same in every process."""
    root = plain_root(model)
    lines = [
        f"{name} {tuple(tensor.shape)} {tensor.dtype}"
        for name, tensor in [*root.named_parameters(), *root.named_buffers()]
    ]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def decided(
    planned: Iterable[Planned], training: bool, groups: Iterable[PlannedGroup] = ()
) -> tuple[Decision, ...]:
    """One decision for each block that is welded, by itself or in its group."""
    in_group = {group.name: group.by_rows() for group in groups if group.welded}
    return tuple(
        Decision(
            block=one.block,
            by_rows=one.by_rows(),
            training=training,
            in_group=in_group.get(one.block.group, ()),
        )
        for one in planned
        if one.welded or one.block.group in in_group
    )


@dataclass(frozen=True, kw_only=True)
class Whole(Judged):
    """The whole model before and after, on one workload."""

    workload: str
    verdict: Verdict
    speed: Speed | NotMeasured  # of one step
    error_ratio: Measured | NotMeasured  # of the output, to eager's own error
    against: str = ""  # what the error was judged against
    # The share of welded modules in the time of a step before.
    time_share: Share | NotMeasured = UNASKED
    # Shown in the detail view: the most that welding can win by the profile, what the blocks' own
    # measurements add up to, and the most that any kernel could reach.
    predicted: Ratio | NotMeasured = UNASKED
    promised: Ratio | NotMeasured = UNASKED
    ceiling: Ratio | NotMeasured = UNASKED
    remembered: Word | None = None  # when it was timed, if by an earlier plan on this machine
    errors: Annotated[tuple[TensorError, ...], Length(most=100_000)] = ()

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__dict__.update(earlier_plans.whole(state))


@dataclass(frozen=True, kw_only=True)
class Plan(ShownAsPage, SavedRecord):
    """Which blocks to weld and which not, with every reason and measurement; `print` shows it.

    `tw.plan` makes plans, `tw.apply` carries them out. A figure that was not measured is a
    `NotMeasured` with the reason.
    """

    FORMAT = RecordFormat(
        what="plan",
        version=6,
        upgrades={
            1: earlier_plans.plan,
            2: earlier_plans.without_groups,
            3: earlier_plans.without_recompute,
            4: earlier_plans.without_errors,
            5: earlier_plans.without_hidden,
        },
        remedy="plan again",
        indent=1,
        most_bytes=1 << 26,
    )

    model: Word
    structure: Word  # hash of the model's names, shapes and types
    training: bool
    fingerprint: Word
    torch: Word
    planned: Annotated[tuple[Planned, ...], Length(most=100_000)]
    refused: Annotated[tuple[Refusal, ...], Length(most=100_000)] = ()
    groups: Annotated[tuple[PlannedGroup, ...], Length(most=100_000)] = ()
    whole: Annotated[tuple[Whole, ...], Length(most=10_000)] = ()
    copied_bytes: Count = 0
    # The share of welded blocks in the FLOPs of all inputs.
    flops_share: Share | NotMeasured = UNASKED
    forced: bool = False  # every block that verifies is welded; nothing was timed
    table: str | None = None  # if nothing was timed: the table that decided, in words
    busy: str = ""  # what else ran on the machine meanwhile, in words; "" if nothing did
    notices: tuple[str, ...] = ()
    made_on: Fingerprint | None = None  # the words behind `fingerprint`; none in older plans

    @property
    def decisions(self) -> tuple[Decision, ...]:
        return decided(self.planned, self.training, self.groups)

    def members(self, group: PlannedGroup) -> tuple[Planned, ...]:
        return tuple(one for one in self.planned if one.block.group == group.name)

    @property
    def outcomes(self) -> Counter[Outcome]:
        """How many blocks have each outcome."""
        return Counter(one.outcome for one in self.planned)

    def __str__(self) -> str:
        return self._text("plan_text")

    def sentence(self) -> str:
        """What came of it, in one sentence."""
        return self._text("sentence")

    def details(self) -> str:
        """Bounds, promises and times behind the verdict, with explanations, as text."""
        return self._text("details_text")

    def dependencies(self) -> str:
        """What each block depends on, and for which calls it is valid, as text."""
        return self._text("dependencies_text")

    def _text(self, function: str) -> str:
        """The one import of report, which stands above plans."""
        from torchweld.report import plan_text

        text: str = getattr(plan_text, function)(self)
        return text

    def problems(self) -> Iterator[str]:
        """Problems of a record that was read from a file, in words."""
        paths = [one.block.path for one in self.planned]
        if len(set(paths)) != len(paths):
            twice = next(path for path in paths if paths.count(path) > 1)
            yield f"plans the block {twice!r} twice"
        names = [group.name for group in self.groups]
        if len(set(names)) != len(names):
            yield "plans a group twice"
        members = Counter(one.block.group for one in self.planned)
        for name in names:
            if not name or members[name] < 2:
                yield f"plans the group {name!r}, which does not have two of its blocks"

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__dict__.update(state)
        absent = {"flops_share": UNASKED, "table": None, "busy": "", "made_on": None, "groups": ()}
        for name, default in absent.items():
            self.__dict__.setdefault(name, default)
