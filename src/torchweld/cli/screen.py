"""Puts a report on the screen, or into a pipe: 100 columns at most, no trailing blanks in files."""

from __future__ import annotations

import sys
from collections.abc import Iterable

import click
from rich.console import Console, RenderableType

from torchweld.report.style import WIDTH, to_text


def screen() -> Console:
    """Standard output, as wide as the terminal, but no wider than 100 columns."""
    console = Console(file=sys.stdout, highlight=False, markup=False, emoji=False)
    console.width = min(console.width, WIDTH) if console.is_terminal else WIDTH
    return console


def put(parts: Iterable[RenderableType], console: Console) -> None:
    """Prints `parts` one after the other, each as soon as it is there on a terminal."""
    if not console.is_terminal:
        click.echo(to_text(parts, console.width), nl=False)
        return
    for part in parts:
        console.print(part)
