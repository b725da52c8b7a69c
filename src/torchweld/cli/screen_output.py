"""Puts a report on the screen, or into a pipe: 100 columns at most, no trailing blanks in files."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import click
from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from torchweld.core.safe_text import clean
from torchweld.report.text_style import WIDTH, Harmless, to_text


def screen() -> Console:
    """Standard output, as wide as the terminal, but no wider than 100 columns."""
    console = Console(file=sys.stdout, highlight=False, markup=False, emoji=False)
    console.width = min(console.width, WIDTH) if console.is_terminal else WIDTH
    return console


def put(parts: Iterable[RenderableType], console: Console) -> None:
    """Prints `parts` one after the other; on a terminal each one as soon as it is ready."""
    if not console.is_terminal:
        click.echo(to_text(parts, console.width), nl=False)
        return
    for part in parts:
        console.print(Harmless(part))


@contextmanager
def stage(done: str) -> Iterator[None]:
    """Says on stderr, at the end, what was done inside and how long it took."""
    begun_s = time.perf_counter()
    yield
    click.echo(f"{clean(done)} in {time.perf_counter() - begun_s:.0f} s", err=True)


@contextmanager
def progress_shown() -> Iterator[Callable[[str, float], None]]:
    """Yields a function of what is being done and how far it is; a terminal shows it.

    Redrawn only when it is called: a thread that redraws would disturb the timing.
    """
    console = Console(stderr=True)
    shown = Progress(
        TextColumn("{task.description:<40.40}"),
        BarColumn(40),
        TimeElapsedColumn(),
        console=console,
        auto_refresh=False,
        transient=True,
        disable=not console.is_terminal,
    )
    with shown:
        task = shown.add_task("", total=1.0)
        yield lambda doing, done: shown.update(
            task, description=clean(doing), completed=done, refresh=True
        )
