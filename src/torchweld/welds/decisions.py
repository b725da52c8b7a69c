"""What is to be done with a block: which kernel serves it at which number of rows. Plain data.

A `Decision` is saved and loaded by `torchweld.core.records`. M rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torchweld.welds.found_blocks import Block

BackendName = Literal["cpu", "torch", "reference", "compile"]

# Without a packed copy, and with one.
_MODES = {
    "cpu": ("natural", "packed"),
    "torch": ("aten", "mkldnn"),
    "reference": ("eager", "eager"),
    "compile": ("inductor", "inductor"),
}


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One way to run a block; `packed` keeps a copy of the weights in the kernel's own layout."""

    backend: BackendName
    packed: bool = False

    @property
    def mode(self) -> str:
        """As the backend calls it."""
        return _MODES[self.backend][self.packed]


# (first row count, last, choice). None, or no range: the original.
Ranges = tuple[tuple[int, int, Choice | None], ...]


def choice_at(ranges: Ranges, rows: int) -> Choice | None:
    return next((choice for first, last, choice in ranges if first <= rows <= last), None)


@dataclass(frozen=True, kw_only=True)
class Decision:
    """A block and its table.

    in_group: the same for calls that its group makes as one; where they are not made so, by_rows
    """

    block: Block
    by_rows: Ranges
    training: bool = False  # whether calls with gradients or in training mode are covered
    in_group: Ranges = ()

    def choice(self, rows: int) -> Choice | None:
        return choice_at(self.by_rows, rows)

    def covers(self, rows: int) -> bool:
        """Whether such a call is welded, by itself or in its group."""
        return self.choice(rows) is not None or choice_at(self.in_group, rows) is not None

    @property
    def choices(self) -> tuple[Choice, ...]:
        return tuple(choice for _, _, choice in self.by_rows if choice is not None)

    @property
    def natural_for_any_rows(self) -> bool:
        """Whether a graph that does not know its row counts may hold the op: each range has it."""
        kinds = [choice is not None and choice.backend == "cpu" for _, _, choice in self.by_rows]
        return bool(kinds) and all(kinds)

    def problems(self) -> list[str]:
        """What is wrong with the tables; empty if nothing is."""
        found = []
        if not self.by_rows:
            found.append("its table is empty; give at least one (first, last, choice)")
        return found + _range_problems(self.by_rows) + self._group_problems()

    def _group_problems(self) -> list[str]:
        if not self.in_group:
            return []
        found = _range_problems(self.in_group)
        if self.training:
            found.append("a group is welded for inference alone; give training=False")
        if self.block.layers != 1 or self.block.scale != 1.0:
            found.append("a member of a group is one layer without a scale")
        choices = [choice for _, _, choice in self.in_group if choice is not None]
        if odd := sorted({choice.backend for choice in choices} - {"cpu"}):
            found.append(f"a group is run by backend cpu, not by {', '.join(odd)}")
        return found


def _range_problems(ranges: Ranges) -> list[str]:
    found = []
    end = 0
    for first, last, choice in sorted(ranges, key=lambda row: row[:2]):
        if not 1 <= first <= last:
            found.append(f"its table has rows {first} to {last}; expected 1 ≤ first ≤ last")
        elif first <= end:
            found.append(f"its table has two choices for {first} rows; ranges must not overlap")
        end = max(end, last)
        if choice is not None and choice.packed and choice.backend in ("reference", "compile"):
            found.append(f"backend {choice.backend} keeps no packed copy; give packed=False")
    return found
