"""Shipped tables of known speeds: which blocks are faster fused, without timing them here.

In: `tables/<instruction set>.json`, made by `torchweld bench --table`. Out: what a table knows of a
block, by its form and the shapes of its tensors, or `NotMeasured`. docs/tables.md has the rule.
K in, N out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal

from torchweld.core.blocks import LayerForm, parse_spec
from torchweld.core.errors import BlockError, TorchweldError
from torchweld.core.not_measured import NotMeasured
from torchweld.core.record_fields import Bounds, Length, Positive, Word
from torchweld.core.record_format import RecordFormat
from torchweld.core.records import to_plain
from torchweld.core.safe_text import clean
from torchweld.core.saved_records import SavedRecord
from torchweld.machine import kernel_build
from torchweld.timing.comparison import Verdict

TABLES = Path(__file__).parent / "tables"
# A measured block counts as faster if the lower end of its interval is above this. It stands for
# blocks that were not measured, on other machines.
LEAST_GAIN = 1.05
# The activations that cost eager the least and the most. All others lie between them.
CHEAPEST, COSTLIEST = "relu", "gelu"
# Activations that cost eager at least as much as silu. So they gain at least as much in a gated
# block.
LIKE_SILU = ("silu", "gelu", "gelu_tanh", "quick_gelu", "mish")
GATED, TRANSPOSED = "-gated", "-conv1d"

Way = Literal["packed", "natural"]
SpeedRatio = Annotated[float, Bounds(1e-4, 1e4)]


@dataclass(frozen=True, kw_only=True)
class SpeedCell:
    """One block, measured as a welded module against the same module in eager.

    kind:     as in `torchweld bench --block`: "linear", "gelu", "silu-gated"; with "-conv1d" at
              the end, weights are [in, out]
    sizes:    K, hidden widths, N
    way:      of the backend cpu
    cold:     whether the caches were emptied before every call
    interval: where the true speedup lies; None if it was not measured
    """

    kind: Word
    sizes: Annotated[tuple[Positive, ...], Length(2, 100)]
    rows: Positive
    dtype: Word
    way: Way
    cold: bool = False
    verdict: Verdict
    speedup: SpeedRatio | NotMeasured
    interval: tuple[SpeedRatio, SpeedRatio] | None = None

    def problems(self) -> Iterator[str]:
        """Problems of a record that was read from a file, in words."""
        measured = self.verdict != "not measured"
        if {isinstance(self.speedup, float), self.interval is not None} != {measured}:
            yield f"is {self.verdict!r}, which does not fit its speedup and interval"
        elif self.interval is not None and isinstance(self.speedup, float):
            low, high = self.interval
            if not low <= self.speedup <= high:
                yield f"has a speedup of {self.speedup:g}, outside its interval"

    @property
    def faster(self) -> bool:
        return self.verdict == "faster" and self.low > LEAST_GAIN

    @property
    def low(self) -> float:
        """The lower end of the interval; 0 if nothing was measured."""
        return 0.0 if self.interval is None else self.interval[0]

    @property
    def name(self) -> str:
        shape = "→".join(map(str, self.sizes))
        return f"{self.rows} × {shape} {self.kind}" + (" cold" if self.cold else "")

    @property
    def place(self) -> tuple[int, ...]:
        return _place(self.rows, self.sizes)


@dataclass(frozen=True, kw_only=True)
class KnownSpeed:
    """What a table knows of a block.

    verdict: "faster" if every measured block around it is, else "not faster"
    speedup: the smallest of theirs, by the lower ends of the intervals
    cells:   the measured blocks around it
    """

    verdict: Literal["faster", "not faster"]
    speedup: float
    cells: tuple[SpeedCell, ...]

    @property
    def faster(self) -> bool:
        return self.verdict == "faster"

    @property
    def words(self) -> str:
        """Which measured blocks say so: "at least 1.31 times the original's speed, by …"."""
        low, high = self.cells[0].name, self.cells[-1].name
        around = low if len(self.cells) == 1 else f"{len(self.cells)} blocks from {low} to {high}"
        if self.faster:
            return clean(f"at least {self.speedup:.2f} times the original's speed, by {around}")
        slow = next(cell for cell in self.cells if not cell.faster)
        return clean(f"{slow.name} is {_said(slow)}, of {around}")

    def __str__(self) -> str:
        return f"{self.verdict}: {self.words}"


@dataclass(frozen=True, kw_only=True)
class SpeedTable(SavedRecord):
    """All blocks that were measured for one instruction set, and how they were measured.

    command: the command that made the table, with its environment
    date:    when it ran, as 2026-11-17
    """

    FORMAT = RecordFormat(
        what="table",
        version=1,
        remedy="make it again with torchweld bench --table",
        most_bytes=64 << 20,
    )

    isa: Word
    cpu: Word
    torch: Word
    threads: Positive
    command: Word
    date: Word
    cells: tuple[SpeedCell, ...]

    def problems(self) -> Iterator[str]:
        """Problems of a record that was read from a file, in words."""
        if not re.fullmatch(r"\d{4}-\d\d-\d\d", self.date):
            yield f"has the date {self.date[:60]!r}; expected is one such as 2026-11-17"

    @property
    def source(self) -> str:
        """What a plan says of speeds that come from this table."""
        threads = f"{self.threads} thread" + "s" * (self.threads != 1)
        made = ", ".join((self.cpu, threads, f"torch {self.torch}", self.date))
        return clean(f"not measured here: by the table for {self.isa} ({made})")

    def known(
        self,
        form: str,
        shapes: Sequence[tuple[int, ...]],
        dtype: str,
        rows: int,
        packed: bool,
        *,
        training: bool = False,
    ) -> KnownSpeed | NotMeasured:
        """Whether the backend cpu is faster for a block, with or without a packed copy.

        form:   the block's spec, "gelu/b;identity/b"
        shapes: of its tensors, in the op's order
        dtype:  torch's name, of weights and input
        """
        if training:
            return NotMeasured("the table of speeds only has inference")
        forms = parse_spec(form)
        kinds = _kinds(forms)
        if isinstance(kinds, NotMeasured):
            return kinds
        wanted = _place(rows, _sizes(forms, shapes))
        found: list[SpeedCell] = []
        for kind in self._there(kinds, len(wanted), dtype):
            around = self._around(kind, wanted, dtype, "packed" if packed else "natural")
            if isinstance(around, NotMeasured):
                return around
            found += around
        measured = tuple(cell for cell in found if cell.verdict != "not measured")
        least = min((cell.low for cell in measured), default=0.0)
        if all(cell.faster for cell in found):
            return KnownSpeed(verdict="faster", speedup=least, cells=measured)
        if not all(cell.faster for cell in measured):
            return KnownSpeed(verdict="not faster", speedup=least, cells=measured)
        lacking = next(cell for cell in found if cell.verdict == "not measured")
        return NotMeasured(f"{clean(lacking.name)} was not measured when the table was made")

    def _there(self, kinds: tuple[str, ...], length: int, dtype: str) -> tuple[str, ...]:
        """The kind itself if it was measured, else the kinds that stand for it."""
        own, *others = kinds
        measured = {(cell.kind, cell.dtype, len(cell.place)) for cell in self.cells}
        return (own,) if not others or (own, dtype, length) in measured else tuple(others)

    def _around(
        self, kind: str, wanted: tuple[int, ...], dtype: str, way: Way
    ) -> list[SpeedCell] | NotMeasured:
        """All measured blocks from the nearest below to the nearest above, in every size."""
        cells = [
            cell
            for cell in self.cells
            if (cell.kind, cell.dtype, cell.way) == (kind, dtype, way)
            and len(cell.place) == len(wanted)
        ]
        if not cells:
            return NotMeasured(f"the table of speeds has no {kind} in {dtype} of this length")
        places = {cell.place for cell in cells}
        below = [place for place in places if _within(place, wanted)]
        above = [place for place in places if _within(wanted, place)]
        if not below or not above:
            return NotMeasured("the table of speeds has no blocks on both sides of these sizes")
        # The nearest ones: no other lies between them and the block.
        low = [p for p in below if not any(p != q and _within(p, q) for q in below)]
        high = [p for p in above if not any(p != q and _within(q, p) for q in above)]
        first = [min(values) for values in zip(*low, strict=True)]
        last = [max(values) for values in zip(*high, strict=True)]
        inside = [c for c in cells if _within(first, c.place) and _within(c.place, last)]
        return sorted(inside, key=lambda cell: (cell.place, cell.cold))


def table_text(table: SpeedTable) -> str:
    """The text of the file, with one line per cell, so that diffs of tables can be read."""
    head = to_plain(replace(table, cells=()))
    cells = [json.dumps(to_plain(cell), allow_nan=False) for cell in table.cells]
    lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in head.items()]
    lines[-1] = '"cells": [\n' + ",\n".join(cells) + "\n]"
    return "{\n" + ",\n".join(lines) + "\n}\n"


def load_table(isa: str | None, folder: Path = TABLES) -> SpeedTable | NotMeasured:
    """The shipped table for an instruction set, as `kernel_build.isa_in_use()` names it.

    `NotMeasured` if there is none; a TorchweldError if it is damaged.
    """
    if isa is None:
        return NotMeasured("torchweld's kernels are not built here, so no table of speeds fits")
    path = folder / f"{isa}.json"
    if not re.fullmatch(r"[a-z0-9]+", isa) or not path.is_file():
        shipped = ", ".join(sorted(path.stem for path in folder.glob("*.json"))) or "none"
        return NotMeasured(
            f"no table of speeds for {clean(isa)} is shipped (shipped: {shipped}); weld with "
            "timing, or make one with torchweld bench --table"
        )
    table = SpeedTable.load(path)
    if table.isa != isa:
        raise TorchweldError(
            f"{path} is damaged: it is for {clean(table.isa)}, not for {isa}; {table.FORMAT.remedy}"
        )
    return table


def table_here() -> SpeedTable | NotMeasured:
    """The shipped table for the kernels that run here, or why there is none."""
    return load_table(kernel_build.isa_in_use())


# ---- a block as the table has it ----


def _kinds(forms: Sequence[LayerForm]) -> tuple[str, ...] | NotMeasured:
    """The block's own kind, then those that must be faster if it was not measured itself.

    An activation after the last layer is ignored: it is one more op in eager, and none in a fused
    block.
    """
    layouts = {form.transposed for form in forms}
    if len(layouts) > 1:
        return NotMeasured("the table of speeds has no blocks with weights of both layouts")
    suffix = TRANSPOSED if layouts.pop() else ""
    gated = [form.gate != "none" for form in forms]
    if any(gated):
        if gated != [True, False]:
            return NotMeasured(
                "the only gated blocks in the table of speeds have a gated and a plain layer"
            )
        name = forms[0].activation
        like = [f"silu{GATED}{suffix}"] if name in LIKE_SILU else []
        return (f"{name}{GATED}{suffix}", *like)
    names = {form.activation for form in forms[:-1]}
    if not names:
        return (f"linear{suffix}",)
    if "identity" in names:
        return NotMeasured("the table of speeds has no Linears without an activation between them")
    own = names.pop() if len(names) == 1 else "several activations"
    return (f"{own}{suffix}", f"{CHEAPEST}{suffix}", f"{COSTLIEST}{suffix}")


def _sizes(forms: Sequence[LayerForm], shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """K, hidden widths, N. A gated layer counts with the width of its output."""
    wanted = sum(form.tensors for form in forms)
    if wanted != len(shapes):
        raise BlockError(f"the spec asks for {wanted} tensors, {len(shapes)} shapes were given")
    sizes: list[int] = []
    first = 0
    for form in forms:
        weight = shapes[first]
        if len(weight) != 2:
            raise BlockError(f"a weight has shape {list(weight)}; expected two dimensions")
        K, N = weight if form.transposed else (weight[1], weight[0])
        sizes += [] if sizes else [K]
        sizes.append(N // 2 if form.gate not in ("none", "separate") else N)
        first += form.tensors
    return tuple(sizes)


def _place(rows: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """The place of a block among others of its kind. Only places of one length are compared.

    One layer: rows, K, N. Two: rows, K, hidden, N. More: rows, layers, the widest, all weights, and
    a 0, so that the places of all longer chains have one length.
    """
    if len(sizes) <= 3:
        return (rows, *sizes)
    weights = sum(K * N for K, N in pairwise(sizes))
    return (rows, len(sizes) - 1, max(sizes), weights, 0)


def _within(low: Sequence[int], high: Sequence[int]) -> bool:
    return all(a <= b for a, b in zip(low, high, strict=True))


def _said(cell: SpeedCell) -> str:
    if cell.verdict == "faster":
        return f"faster, but perhaps by {cell.low:.2f} only"
    return {"same": "as fast as eager", "slower": "slower than eager"}.get(
        cell.verdict, cell.verdict
    )
