"""Numbers and names for people: units, shares, columns; names from models made harmless.

In: plain values. Out: short strings, `rich` texts and tables. What is shown is 100 columns wide at
most, and reads the same without colour.
"""

from __future__ import annotations

import io
import math
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

WIDTH = 100
MINUS = "−"
# Columns that the names of modules and ops need to be told apart.
LEAST_LABEL = 28


# ---- names ----


def clean(text: str) -> str:
    """One line without control characters: what a name holds cannot move the cursor or colour."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        char if not unicodedata.category(char).startswith(("C", "Zl", "Zp")) else _escaped(char)
        for char in text
    )


def _escaped(char: str) -> str:
    return char.encode("unicode_escape", "backslashreplace").decode("ascii")


def cut(text: str, width: int) -> str:
    """`text` in at most `width` columns; what was cut shows as an ellipsis."""
    if cell_len(text) <= width:
        return text
    kept = text[: max(width - 1, 0)]
    while kept and cell_len(kept) > width - 1:
        kept = kept[:-1]
    return kept + "…"


def cut_left(text: str, width: int) -> str:
    """As `cut`, but the end is kept: of a path that is the part that tells."""
    return cut(text[::-1], width)[::-1]


def brief_arguments(extra: str) -> str:
    """`in_features=768, out_features=3072, bias=True` -> `768, 3072, True`."""
    return re.sub(r"\b[A-Za-z_]\w*=", "", extra)


def counted(count: int, noun: str) -> str:
    """`1 step`, `2 steps`, `12,500 events`."""
    plural = (
        noun[:-1] + "ies" if noun.endswith("y") else noun + ("es" if noun[-2:] == "ch" else "s")
    )
    return f"{count:,} {noun if count == 1 else plural}"


def listed(items: Sequence[str], most: int) -> str:
    """`a, b, c and 9 more`."""
    if len(items) <= most:
        return ", ".join(items)
    return f"{', '.join(items[:most])} and {len(items) - most} more"


# ---- numbers ----


def figure(value: float) -> str:
    """Three digits that count: 0.98, 3.20, 12.3, 2749."""
    if not math.isfinite(value):
        return "–"
    size = abs(value)
    # Rounding decides the digits: 9.996 is 10.0, not 10.00.
    digits = 2 if size < 9.995 else 1 if size < 99.95 else 0
    return f"{value:.{digits}f}".replace("-", MINUS)


def unit_of(step_us: float) -> tuple[str, float]:
    """The unit, and its µs, in which a step of this length and its parts read well."""
    if step_us >= 10e6:
        return "s", 1e6
    return ("ms", 1e3) if step_us >= 10e3 else ("µs", 1.0)


def duration(us: float) -> str:
    """A single time with its unit: 12.3 µs, 1.20 ms, 3.45 s."""
    if us == 0:
        return "0 µs"
    size = abs(us)
    for unit, scale in (("s", 1e6), ("ms", 1e3)):
        if size >= 0.9995 * scale:
            return f"{figure(us / scale)} {unit}"
    return f"{figure(us)} µs"


def share(part: float, whole: float) -> str:
    """`24 %`, `0.4 %`; nothing where there is nothing to share."""
    if not whole or not math.isfinite(part / whole):
        return "–"
    percent = 100 * part / whole
    if percent == 0:
        return "0 %"
    if abs(percent) < 0.1:
        return "<0.1 %" if percent > 0 else f"{MINUS}0.1 %"
    text = f"{percent:.0f}" if abs(percent) >= 9.95 else f"{percent:.1f}"
    return text.replace("-", MINUS) + " %"


def size(count: float) -> str:
    """Bytes: 512 B, 4.20 kB, 19.0 MB, 1.20 GB."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(count) >= 0.9995 * factor:
            return f"{figure(count / factor)} {unit}"
    return f"{count:.0f} B".replace("-", MINUS)


def signed(text: str) -> str:
    """A plus where there is no minus, so that a change reads as one."""
    return text if text.startswith((MINUS, "–")) else f"+{text}"


# ---- layout ----


def heading(title: str, remark: str = "") -> Text:
    """A section's first line."""
    text = Text(title, style="bold", no_wrap=True, overflow="ellipsis")
    return text.append(f"   {remark}", style="not bold dim") if remark else text


def indented(text: Text | str, style: str = "", by: int = 2) -> Padding:
    """A paragraph; its further lines begin where the first does."""
    return Padding(text if isinstance(text, Text) else Text(text, style=style), (0, 0, 0, by))


def table(*columns: tuple[str, Literal["left", "right"]], indent: int = 2) -> Table:
    """Columns of figures without lines around them."""
    made = Table(box=None, padding=(0, 1, 0, 0), header_style="dim", pad_edge=False)
    for i, (name, justify) in enumerate(columns):
        shown = Text(" " * indent + name if i == 0 and justify == "left" else name)
        made.add_column(shown, justify=justify, no_wrap=True, overflow="ellipsis")
    return made


@dataclass(frozen=True)
class Column:
    """A column of a `Sheet`; one that is `spare` goes where there is no room for it."""

    name: str
    width: int
    left: bool = False
    spare: bool = False


class Sheet:
    """A table whose first column takes the room that the others leave, and then some more."""

    def __init__(self, first: str, columns: Sequence[Column], width: int, indent: int = 2) -> None:
        self.columns = list(columns)
        for column in reversed(columns):
            if column.spare and self._left(width) < LEAST_LABEL:
                self.columns.remove(column)
        self.label_width = max(self._left(width), 1)
        self.table = table((first, "left"), indent=indent)
        self.table.columns[0].width = self.label_width
        for column in self.columns:
            self.table.add_column(
                Text(column.name),
                justify="left" if column.left else "right",
                width=column.width,
                no_wrap=True,
            )

    def _left(self, width: int) -> int:
        return width - sum(column.width + 1 for column in self.columns)

    def add(self, label: str, cells: Mapping[str, str | Text], style: str = "") -> None:
        """A row: what fits into the first column, and cells by the names of their columns."""
        row = [cells.get(column.name, "") for column in self.columns]
        shown = [cell if isinstance(cell, Text) else Text(cell) for cell in row]
        self.table.add_row(Text(label), *shown, style=style)


def to_text(parts: Iterable[RenderableType], width: int = WIDTH, colour: bool = False) -> str:
    """What a terminal of this width would show; escape codes only with `colour`."""
    console = Console(
        file=io.StringIO(),
        width=width,
        highlight=False,
        markup=False,
        emoji=False,
        force_terminal=colour,
        color_system="truecolor" if colour else None,
        no_color=not colour,
        legacy_windows=False,
    )
    with console.capture() as captured:
        for part in parts:
            console.print(part)
    if colour:
        return captured.get()
    return "\n".join(line.rstrip() for line in captured.get().split("\n"))
