"""What to do with a block: which backend serves it at which number of rows. Plain data.

A `Decision` is saved and loaded by `torchweld.core.records`. M rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torchweld.core.arguments import check_flags, check_kind, misfit
from torchweld.core.record_fields import Word
from torchweld.ops.backends import Abilities, backend_named
from torchweld.welds.found_blocks import Block


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One way to run a block; `packed` keeps a copy of the weights in the kernel's own layout."""

    backend: Word
    packed: bool = False

    def __post_init__(self) -> None:
        backend_named(self.backend)  # or a TorchweldError that lists the backends there are
        check_flags("Choice", packed=self.packed)

    @property
    def abilities(self) -> Abilities:
        return backend_named(self.backend).abilities

    @property
    def mode(self) -> str:
        """The backend's name for it."""
        can = self.abilities
        return ((self.packed and can.packed_mode) or can.modes[0]).name


@dataclass(frozen=True, kw_only=True)
class Decision:
    """A block and its table: (first row count, last, choice).

    The original code runs where the choice is None, and outside the ranges.
    """

    block: Block
    by_rows: tuple[tuple[int, int, Choice | None], ...]
    training: bool = False  # whether calls with gradients or in training mode are covered

    def __post_init__(self) -> None:
        check_kind("Decision", "block", self.block, Block, "one of those that tw.find returns")
        check_flags("Decision", training=self.training)
        if not isinstance(self.by_rows, (tuple, list)) or not all(map(_is_range, self.by_rows)):
            allowed = "a tuple of (first row count, last, tw.Choice or None)"
            raise misfit("Decision", "by_rows", self.by_rows, allowed)

    def choice(self, rows: int) -> Choice | None:
        for first, last, choice in self.by_rows:
            if first <= rows <= last:
                return choice
        return None

    @property
    def choices(self) -> tuple[Choice, ...]:
        return tuple(choice for _, _, choice in self.by_rows if choice is not None)

    @property
    def in_graphs(self) -> bool:
        """Whether a graph may hold the op: it is for any row count, so each range must allow it."""
        kinds = [choice is not None and choice.abilities.in_graphs for *_, choice in self.by_rows]
        return bool(kinds) and all(kinds)

    def problems(self) -> list[str]:
        """What is wrong with the table; empty if nothing is."""
        found = []
        if not self.by_rows:
            found.append("its table is empty; give at least one (first, last, choice)")
        end = 0
        for first, last, choice in sorted(self.by_rows, key=lambda row: row[:2]):
            if not 1 <= first <= last:
                found.append(f"its table has rows {first} to {last}; expected 1 ≤ first ≤ last")
            elif first <= end:
                found.append(f"its table has two choices for {first} rows; ranges must not overlap")
            end = max(end, last)
            if choice is not None and choice.packed and choice.abilities.packed_mode is None:
                found.append(f"backend {choice.backend} keeps no packed copy; give packed=False")
            if choice is not None and self.training and not choice.abilities.trains:
                found.append(f"backend {choice.backend} has no gradients; give training=False")
        return found


def _is_range(row: Any) -> bool:
    match row:
        case (int(), int(), None | Choice()):
            return True
    return False
