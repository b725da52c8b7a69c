"""What is kept of a run, as plain data: where it ran, how it was set up, its cells with samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from torchweld.core.record_fields import Bounds, Count, Length, Measured, Word
from torchweld.history.history_places import commit_of
from torchweld.machine.fingerprint import Fingerprint, taken_here

# "gate" is a baseline, "check" what a gate found.
Kind = Literal["bench", "gate", "fuse", "profile", "check"]


def fingerprint_here() -> Fingerprint:
    """The current fingerprint of this process and folder."""
    return taken_here(commit_of(Path.cwd()))


def target_words(target: str, inputs: Sequence[str], training: bool) -> str:
    """What a run of a model is about, as it was typed: `Run.what`."""
    return " ".join([target, *inputs, *(["training"] if training else [])])


@dataclass(frozen=True, kw_only=True)
class RunCell:
    """One thing measured: figures in `data`, raw series in `samples` (see `kept_samples.py`)."""

    cell: str
    data: dict[str, Any]
    samples: dict[str, tuple[Measured, ...]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RunRow:
    """The row of a run in the database."""

    id: Count
    name: Annotated[str, Length(1, 100)]
    kind: Word
    what: str  # the target or the grid, in words
    created: Annotated[str, Length(1, 64)]  # ISO, UTC
    fingerprint: Fingerprint
    settings: dict[str, Any]
    summary: dict[str, Any] | None
    finished: Annotated[int, Bounds(0, 1)]


@dataclass(frozen=True, kw_only=True)
class Damaged:
    """A run whose row cannot be read; it keeps its place among the runs of its name."""

    id: int
    name: str
    finished: bool
    problem: str


@dataclass(frozen=True, kw_only=True)
class Run:
    """A kept run. Its cells are read when they are first asked for, while the history is open."""

    id: int
    name: str
    kind: str
    what: str  # the target or the grid, in words
    created: str  # ISO, UTC
    fingerprint: Fingerprint
    settings: Mapping[str, Any]
    summary: Mapping[str, Any] | None
    finished: bool
    read: Any = field(repr=False, compare=False)  # () -> cells

    @cached_property
    def cells(self) -> tuple[RunCell, ...]:
        found: tuple[RunCell, ...] = self.read()
        return found

    def cell(self, name: str) -> RunCell | None:
        return next((one for one in self.cells if one.cell == name), None)
