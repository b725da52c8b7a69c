"""Exceptions that say nothing about the code they were raised in: timeouts, interrupts, no memory.

Users' code is run and judged in many places: a module that cannot be traced is refused, a model
that does not run in float64 is verified in another way. What a signal handler raises meanwhile (an
alarm, a test's time limit) is not such a judgement, and must reach the program that expects it.
"""

from __future__ import annotations

import concurrent.futures
import inspect
import signal
from collections.abc import Iterator
from types import CodeType

import torch


def is_interrupt(error: BaseException) -> bool:
    """Whether a timeout or an interrupt is behind `error`, or a handler of a signal raised it."""
    handlers = _handlers()
    for one in _chain(error):
        # A handler may raise ordinary exceptions, so they are recognised by where they were raised.
        if not isinstance(one, Exception) or isinstance(one, _TIMEOUTS):
            return True
        trace = one.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code in handlers:
                return True
            trace = trace.tb_next
    return False


def is_no_memory(error: BaseException) -> bool:
    """Whether memory ran out, on any device."""
    return any(
        isinstance(one, (MemoryError, torch.OutOfMemoryError))
        or (isinstance(one, RuntimeError) and "DefaultCPUAllocator: " in str(one))
        for one in _chain(error)
    )


def says_nothing(error: BaseException) -> bool:
    """Whether `error` says nothing about the code that raised it, and has to be passed on."""
    return is_interrupt(error) or is_no_memory(error)


# The two are one class from Python 3.11 on.
_TIMEOUTS = (TimeoutError, concurrent.futures.TimeoutError)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An exception, and those that it was raised from.

    Not those that were merely being handled: our caller may be handling a timeout.
    """
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        yield one
        one = one.__cause__


def _handlers() -> set[CodeType]:
    """The code of the Python functions that handle signals now."""
    found = set()
    for number in signal.valid_signals():
        handler = signal.getsignal(number)
        if not callable(handler):
            continue
        function = getattr(handler, "func", handler)  # of a partial
        if not hasattr(function, "__code__") and not inspect.ismethod(function):
            function = type(function).__call__  # an object
        code = getattr(inspect.unwrap(function), "__code__", None)
        if isinstance(code, CodeType):
            found.add(code)
    return found
