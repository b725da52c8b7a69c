"""Error messages on standard error: unchanged in a pipe, wrapped between words on a terminal.

A terminal breaks a long line wherever its width ends. Here lines end between words, and what is to
be pasted (a command, an option with its value, a quoted name) stays in one piece.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator

import click
from rich.cells import cell_len
from rich.console import Console

from torchweld.report.text_style import WIDTH

INDENT = "  "
LEAST_WIDTH = 20
# Stands for blanks that must stay; a cleaned message does not contain this character.
KEPT = "\0"
PROGRAMS = r"torchweld [a-z]|pip install |python[\d.]* -|make -|[A-Z_]+=\S+ torchweld "
WHOLE = re.compile(
    # A command: what follows a colon or stands in backquotes, to the end of the clause.
    rf"(?:(?<=^)|(?<=: )|(?<=`)|(?<=run ))(?:{PROGRAMS}).*?(?=`|; |  |, (?:or|with) |$)"
    # A name in quotes, which begin and end with a word; an apostrophe does neither.
    r"""|(?<!\S)(?P<quote>['"])(?:(?!(?P=quote)).){1,200}(?P=quote)(?![^\s;:,.)\]])"""
    r"|--[\w-]+ [^\s(-]\S*"
)


def complain(text: str) -> None:
    """Prints a message on standard error."""
    if sys.stderr.isatty():
        text = wrapped(text, Console(stderr=True).width)
    click.echo(text, err=True)


def wrapped(text: str, width: int) -> str:
    """Each line of the text in lines of at most `width` columns, and 100; the rest is indented.

    A piece that is wider gets its own line, which is not broken.
    """
    width = max(LEAST_WIDTH, min(width, WIDTH))
    return "\n".join(part for line in text.split("\n") for part in _parts(line, width))


def _parts(line: str, width: int) -> Iterator[str]:
    if cell_len(line) <= width:
        yield line
        return
    margin = line[: len(line) - len(line.lstrip(" "))]
    pieces = WHOLE.sub(lambda found: found[0].replace(" ", KEPT), line.strip()).split()
    current = margin + pieces[0]
    for piece in pieces[1:]:
        if cell_len(current) + 1 + cell_len(piece) <= width:
            current += f" {piece}"
        else:
            yield current.replace(KEPT, " ")
            current = margin + INDENT + piece
    yield current.replace(KEPT, " ")
