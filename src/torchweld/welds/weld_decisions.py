"""What to do with a block: which backend serves it at which number of rows. Plain data.

A `Decision` is saved and loaded by `torchweld.core.records`. M rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torchweld.core.argument_checks import check_flags, check_kind, misfit
from torchweld.core.errors import TorchweldError
from torchweld.core.record_fields import Word
from torchweld.ops.backends import Abilities, backend_named
from torchweld.welds.found_blocks import Block


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One way to run a block.

    packed:    keep a copy of the weights in the kernel's own layout
    recompute: in training, keep the input alone and compute hidden values again in the backward
    """

    backend: Word
    packed: bool = False
    recompute: bool = False

    def __post_init__(self) -> None:
        backend_named(self.backend)  # or a TorchweldError that lists the backends there are
        check_flags("Choice", packed=self.packed, recompute=self.recompute)
        if self.packed and self.recompute:
            raise TorchweldError(
                "Choice: packed=True is for inference and recompute=True for training; give one"
            )

    @property
    def abilities(self) -> Abilities:
        return backend_named(self.backend).abilities

    @property
    def mode(self) -> str:
        """The name of the backend's mode for this choice."""
        can = self.abilities
        asked = (self.packed and can.packed_mode) or (self.recompute and can.recompute_mode)
        return (asked or can.modes[0]).name


# (first row count, last, choice)
Ranges = tuple[tuple[int, int, Choice | None], ...]


def choice_at(ranges: Ranges, rows: int) -> Choice | None:
    return next((choice for first, last, choice in ranges if first <= rows <= last), None)


@dataclass(frozen=True, kw_only=True)
class Decision:
    """A block and its table: (first row count, last, choice).

    The original code runs where the choice is None, and outside the ranges.

    in_group: the table for calls that the block's group runs as one; the others follow by_rows
    """

    block: Block
    by_rows: Ranges
    training: bool = False  # whether calls with gradients or in training mode are covered
    in_group: Ranges = ()

    def __post_init__(self) -> None:
        check_kind("Decision", "block", self.block, Block, "one of those that tw.find returns")
        check_flags("Decision", training=self.training)
        for name, ranges in (("by_rows", self.by_rows), ("in_group", self.in_group)):
            if not isinstance(ranges, (tuple, list)) or not all(map(_is_range, ranges)):
                allowed = "a tuple of (first row count, last, tw.Choice or None)"
                raise misfit("Decision", name, ranges, allowed)

    def choice(self, rows: int) -> Choice | None:
        return choice_at(self.by_rows, rows)

    def covers(self, rows: int) -> bool:
        """Whether such a call is welded, by itself or in its group."""
        return self.choice(rows) is not None or choice_at(self.in_group, rows) is not None

    @property
    def choices(self) -> tuple[Choice, ...]:
        return tuple(choice for _, _, choice in self.by_rows if choice is not None)

    @property
    def recompute(self) -> bool | None:
        """What a graph for any row count keeps: as the choices say; None if they differ."""
        kinds = {choice.recompute for choice in self.choices}
        return kinds.pop() if len(kinds) == 1 else None

    @property
    def in_graphs(self) -> bool:
        """Whether a graph may hold the op: it is for any row count, so each range must allow it."""
        kinds = [choice is not None and choice.abilities.in_graphs for *_, choice in self.by_rows]
        return bool(kinds) and all(kinds)

    def problems(self) -> list[str]:
        """What is wrong with the tables; empty if nothing is."""
        found = []
        if not self.by_rows:
            found.append("its table is empty; give at least one (first, last, choice)")
        return found + self._problems_of(self.by_rows) + self._group_problems()

    def _problems_of(self, ranges: Ranges) -> list[str]:
        found = []
        end = 0
        for first, last, choice in sorted(ranges, key=lambda row: row[:2]):
            if not 1 <= first <= last:
                found.append(f"its table has rows {first} to {last}; expected 1 ≤ first ≤ last")
            elif first <= end:
                found.append(f"its table has two choices for {first} rows; ranges must not overlap")
            end = max(end, last)
            if choice is not None and choice.packed and choice.abilities.packed_mode is None:
                found.append(f"backend {choice.backend} keeps no packed copy; give packed=False")
            if choice is not None and choice.recompute and choice.abilities.recompute_mode is None:
                found.append(
                    f"backend {choice.backend} computes nothing again in its backward; give "
                    "recompute=False"
                )
            if choice is not None and self.training and not choice.abilities.trains:
                found.append(f"backend {choice.backend} has no gradients; give training=False")
        return found

    def _group_problems(self) -> list[str]:
        if not self.in_group:
            return []
        found = self._problems_of(self.in_group)
        if self.training:
            found.append("a group is welded for inference alone; give training=False")
        if self.block.layers != 1 or self.block.scale != 1.0:
            found.append("a member of a group is one layer without a scale")
        if not self.block.group:
            found.append("it has a table for its group, but the block names no group")
        choices = [choice for _, _, choice in self.in_group if choice is not None]
        if odd := sorted({c.backend for c in choices if not c.abilities.c_forward}):
            found.append(f"a group is run by the compiled kernels, not by {', '.join(odd)}")
        if not all(choice.packed for choice in choices):
            found.append("a group reads packed copies; give packed=True")
        return found


def _is_range(row: Any) -> bool:
    match row:
        case (int(), int(), None | Choice()):
            return True
    return False
