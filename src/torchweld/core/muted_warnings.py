"""A switch: inside `untold()` welded models do not warn that their original code runs.

It is for code that runs the original on purpose, or reports it in its own way. It is in core
because the numerics room sets it and must not import welds.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_untold: ContextVar[bool] = ContextVar("untold", default=False)


@contextmanager
def untold() -> Iterator[None]:
    """Inside, calls do not warn; models that are welded inside never warn."""
    token = _untold.set(True)
    try:
        yield
    finally:
        _untold.reset(token)


def is_untold() -> bool:
    return _untold.get()
