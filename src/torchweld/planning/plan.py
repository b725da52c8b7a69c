"""A `Plan`: what is to be welded and what not, with every reason and measurement. Plain data.

Made by `tw.plan`, carried out by `tw.apply`. It saves to JSON and loads again; nothing in a file is
executed, and one that does not fit the declared types is refused.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from torchweld.decisions import Choice, Decision
from torchweld.discovery.found import Block, Refusal
from torchweld.fingerprints import Fingerprint
from torchweld.records import Count, Length, Measured, Positive, Word
from torchweld.saved import Form

Verdict = Literal["faster", "slower", "same", "not measured", "behind", "wrong", "cannot serve"]


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One way to run a block, tried at one number of rows."""

    choice: Choice
    verified: bool
    verdict: Verdict  # "behind": another, at first look
    reason: str = ""
    speedup: Measured = 0.0  # over the original; 0 where none was measured
    interval: tuple[Measured, Measured] = (0.0, 0.0)
    original_us: Measured = 0.0  # of one call
    error_ratio: Measured = 0.0  # to what the numerical rule allows: 1 is the bound
    copied_bytes: Count = 0  # of one module
    # Speed over the best way without a copy, in the same rounds; 0: unknown.
    copy_gain: Measured = 0.0


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """What was tried for some blocks at one number of rows, and what was chosen."""

    rows: Positive
    count: Count  # calls of one block a workload
    trials: Annotated[tuple[Trial, ...], Length(most=100)]
    chosen: Choice | None
    reason: str
    remembered: bool = False  # times are from an earlier plan on this machine

    @property
    def best(self) -> Trial | None:
        return next((trial for trial in self.trials if trial.choice == self.chosen), None)

    @property
    def unmeasured(self) -> bool:
        """Whether nothing was chosen for want of time, or of a quiet machine."""
        verdicts = [trial.verdict for trial in self.trials if trial.verified]
        return self.chosen is None and "not measured" in verdicts

    def problems(self) -> Iterator[str]:
        """What is wrong with one that was read from a file."""
        if self.chosen is not None and not (self.best is not None and self.best.verified):
            yield "chose what none of its trials has verified"


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A block with its tuning, by number of rows."""

    block: Block
    tunings: Annotated[tuple[Tuning, ...], Length(most=10_000)]

    def problems(self) -> Iterator[str]:
        """What is wrong with one that was read from a file."""
        if not self.block.calls:
            yield "has a block without calls; it is there because it was called"
        called = {call.rows for call in self.block.calls}
        odd = (tuning.rows for tuning in self.tunings if tuning.rows not in called)
        for rows in odd:
            yield f"is tuned for {rows} rows, and was never called with so many"

    def by_rows(self) -> tuple[tuple[int, int, Choice | None], ...]:
        """Ranges of rows; between two measured counts with the same choice, that choice holds."""
        chosen: dict[int, Choice | None] = {}
        for tuning in sorted(self.tunings, key=lambda tuning: (tuning.rows, -tuning.count)):
            # The same rows in another layout: the original, if it is the better one for either.
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


@dataclass(frozen=True, kw_only=True)
class Whole:
    """The whole model before and after, on one workload."""

    workload: str
    verdict: Verdict
    speedup: Measured
    interval: tuple[Measured, Measured]
    before_us: Measured
    after_us: Measured
    predicted: Measured  # the most that diagnosis says can be won; 0 where it was not asked
    saved_us: Measured  # what the blocks' own measurements promised
    ceiling: Measured  # the most that any kernel could reach; 0 where it was not measured
    error_ratio: Measured  # of the output, to eager's own error; 0 where it was not measured
    against: str = ""  # what the error was judged against
    remembered: bool = False  # times are from an earlier plan on this machine
    reason: str = ""

    @property
    def promised(self) -> float:
        """What the blocks' own gains make of the whole, as a speed-up; 0 where none was timed."""
        if self.saved_us <= 0 or self.before_us <= 0:
            return 0.0
        return self.before_us / max(self.before_us - self.saved_us, 1e-3 * self.before_us)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """See the module's docstring."""

    model: Word
    structure: Word  # hash of the model's names, shapes and types
    training: bool
    fingerprint: Word
    torch: Word
    planned: Annotated[tuple[Planned, ...], Length(most=100_000)]
    refused: Annotated[tuple[Refusal, ...], Length(most=100_000)] = ()
    whole: Annotated[tuple[Whole, ...], Length(most=10_000)] = ()
    copied_bytes: Count = 0
    forced: bool = False  # times were not measured
    notices: tuple[str, ...] = ()
    made_on: Fingerprint | None = None  # the words behind `fingerprint`; none in older plans

    @property
    def decisions(self) -> tuple[Decision, ...]:
        return tuple(
            Decision(block=one.block, by_rows=one.by_rows(), training=self.training)
            for one in self.planned
            if one.welded
        )

    def __str__(self) -> str:
        from torchweld.planning.text import plan_text

        return plan_text(self)

    def dependencies(self) -> str:
        """What each block depends on, and for which calls it is valid, to be printed."""
        from torchweld.planning.text import dependencies_text

        return dependencies_text(self)

    def problems(self) -> Iterator[str]:
        """What is wrong with one that was read from a file."""
        paths = [one.block.path for one in self.planned]
        if len(set(paths)) != len(paths):
            twice = next(path for path in paths if paths.count(path) > 1)
            yield f"plans the block {twice!r} twice"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write JSON; an existing file is replaced whole."""
        FORM.save(self, path)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Plan:
        """The opposite of `save`."""
        return FORM.load(path)


FORM = Form(kind=Plan, what="plan", format=1, remedy="plan again", most_bytes=1 << 26, indent=1)
