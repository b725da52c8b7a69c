"""The command as it was typed, for what says how to repeat it."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

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
    """ "torchweld fuse gpt --quick", to be pasted into a shell."""
    return shlex.join(["torchweld", *_typed.get()])
