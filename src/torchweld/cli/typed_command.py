"""The command as it was typed, for what says how to repeat it."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

_typed: ContextVar[tuple[str, ...]] = ContextVar("typed", default=())


@contextmanager
def typed(arguments: Sequence[str] | None) -> Iterator[None]:
    """Inside, `typed_command` gives these arguments; None: those of the process."""
    token = _typed.set(tuple(sys.argv[1:] if arguments is None else arguments))
    try:
        yield
    finally:
        _typed.reset(token)


def typed_command() -> str:
    """ "torchweld fuse gpt --quick", to be pasted into a shell.

    Pages are passed on, so it names no folder of this machine.
    """
    return shlex.join(["torchweld", *map(_without_folders, _typed.get())])


def _without_folders(argument: str) -> str:
    """An absolute path from the current folder on; only the file's name if it is elsewhere."""
    option, sign, value = argument.partition("=")
    if option.startswith("--") and sign:
        return f"{option}={_without_folders(value)}"
    path = Path(argument)
    if not path.is_absolute() or not path.name:
        return argument
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else path.name
