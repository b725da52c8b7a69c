"""What is shown: columns, tables, headings, and the last look at every character.

In: plain values. Out: short strings, `rich` texts and tables. What is shown is 100 columns wide at
most, and reads the same without colour.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.padding import Padding
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from torchweld.core.number_text import MINUS
from torchweld.core.safe_text import clean, clean_lines

WIDTH = 100
# Names of modules and ops need this many columns to be told apart.
LEAST_LABEL = 28


def cut(text: str, width: int) -> str:
    """`text` in at most `width` columns; what was cut shows as an ellipsis."""
    if cell_len(text) <= width:
        return text
    kept = text[: max(width - 1, 0)]
    while kept and cell_len(kept) > width - 1:
        kept = kept[:-1]
    return kept + "…"


def cut_left(text: str, width: int) -> str:
    """Like `cut`, but keeps the end of the text, which is the part of a path that matters."""
    return cut(text[::-1], width)[::-1]


def brief_arguments(extra: str) -> str:
    """`in_features=768, out_features=3072, bias=True` -> `768, 3072, True`."""
    return re.sub(r"\b[A-Za-z_]\w*=", "", extra)


def percent(part: float) -> str:
    """Whole percents, for narrow columns."""
    return "<1 %" if 0 < part < 0.005 else f"{100 * part:.0f} %".replace("-", MINUS)


def bar_cells(values: Sequence[float], width: int) -> list[int]:
    """Columns for each value, `width` in all; negative values get none."""
    positive = [max(value, 0.0) for value in values]
    whole = sum(positive)
    if whole <= 0:
        return [0] * len(values)
    exact = [value / whole * width for value in positive]
    cells = [int(value) for value in exact]
    by_rest = sorted(range(len(exact)), key=lambda i: cells[i] - exact[i])
    for i in by_rest[: width - sum(cells)]:
        cells[i] += 1
    return cells


# ---- layout ----


def heading(title: str, remark: str = "") -> Text:
    """A section's first line."""
    text = Text(clean(title), style="bold", no_wrap=True, overflow="ellipsis")
    return text.append(f"   {clean(remark)}", style="not bold dim") if remark else text


def indented(text: Text | str, style: str = "", by: int = 2) -> Padding:
    """A paragraph; its further lines begin where the first does."""
    shown = text if isinstance(text, Text) else Text(clean(text), style=style)
    return Padding(shown, (0, 0, 0, by))


def table(*columns: tuple[str, Literal["left", "right"]], indent: int = 2) -> Table:
    """Columns of figures without lines around them."""
    made = Table(box=None, padding=(0, 1, 0, 0), header_style="dim", pad_edge=False)
    for i, (name, justify) in enumerate(columns):
        shown = Text(" " * indent + name if i == 0 and justify == "left" else name)
        made.add_column(shown, justify=justify, no_wrap=True, overflow="ellipsis")
    return made


@dataclass(frozen=True)
class Column:
    """A column of a `Sheet`; a `spare` one is left out if there is no room for it."""

    name: str
    width: int
    left: bool = False
    spare: bool = False


class Sheet:
    """A table whose first column takes the room that the others leave."""

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
        shown = [cell if isinstance(cell, Text) else Text(clean(cell)) for cell in row]
        self.table.add_row(Text(clean(label)), *shown, style=style)


class Harmless:
    """What `part` shows, whatever names are in it: only rich itself moves the cursor or colours."""

    def __init__(self, part: RenderableType) -> None:
        # A plain text is a line.
        self._part = Text(clean(part)) if isinstance(part, str) else part

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for segment in console.render(self._part, options):
            shown = segment.text if segment.control else clean_lines(segment.text)
            yield Segment(shown, segment.style, segment.control)


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
            console.print(Harmless(part))
    if colour:
        return captured.get()
    return "\n".join(line.rstrip() for line in captured.get().split("\n"))
