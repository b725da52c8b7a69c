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


@dataclass(frozen=True, kw_only=True)
class Decision:
    """A block and its table: (first row count, last, choice). None, or no range: the original."""

    block: Block
    by_rows: tuple[tuple[int, int, Choice | None], ...]
    training: bool = False  # whether calls with gradients or in training mode are covered

    def choice(self, rows: int) -> Choice | None:
        for first, last, choice in self.by_rows:
            if first <= rows <= last:
                return choice
        return None

    @property
    def choices(self) -> tuple[Choice, ...]:
        return tuple(choice for _, _, choice in self.by_rows if choice is not None)

    @property
    def natural_for_any_rows(self) -> bool:
        """Whether a graph that does not know its row counts may hold the op: each range has it."""
        kinds = [choice is not None and choice.backend == "cpu" for _, _, choice in self.by_rows]
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
            if choice is not None and choice.packed and choice.backend in ("reference", "compile"):
                found.append(f"backend {choice.backend} keeps no packed copy; give packed=False")
        return found
