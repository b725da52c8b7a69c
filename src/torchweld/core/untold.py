"""A switch for the thread: inside `untold()` welded models do not warn.

It silences the warning that a welded model runs its original code, for what runs that code on
purpose or reports it in its own way. It lies here because verifying a model sets it, and knows
nothing of welds.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_untold: ContextVar[bool] = ContextVar("untold", default=False)


@contextmanager
def untold() -> Iterator[None]:
    """Inside, nothing is said about calls; models that are welded inside never say anything."""
    token = _untold.set(True)
    try:
        yield
    finally:
        _untold.reset(token)


def is_untold() -> bool:
    return _untold.get()
