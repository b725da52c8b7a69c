"""What is timed: a side takes a number of calls and gives the seconds they took.

A side is a `Side`, or a zero-argument callable, which `as_side` wraps in a `CallableSide`. A side
of another process implements `time` by asking its worker. `CacheFlush` empties the caches between
the calls of a cold measurement.
"""

import gc
import itertools
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch

from torchweld.core.errors import NotMeasuredError, TorchweldError
from torchweld.core.passing_exceptions import is_interrupt
from torchweld.machine.device_waiting import wait_for_gpu
from torchweld.timing import core_waiting

Clock = Callable[[], float]

# Asking how long threads waited takes some ten microseconds and leaves caches colder. In a block
# this long that does not show.
_LONG_BLOCK_S = 1e-3

_SMALLEST_FLUSH_BYTES = 64 << 20
_LARGEST_FLUSH_BYTES = 1 << 30


class Side(Protocol):
    """One of the things compared. `time` runs it `calls` times and returns the seconds that took.

    A side may also have an attribute `preempted`, read after each `time`: whether the operating
    system took the processor away meanwhile, so that the figure is not the side's own.
    """

    def time(self, calls: int) -> float: ...


class CallableSide:
    """A zero-argument callable of this process, as a `Side`. `clock` gives seconds."""

    def __init__(self, function: Callable[[], Any], clock: Clock = time.perf_counter) -> None:
        self._function = function
        self._clock = clock
        self._long = False
        self.preempted = False

    def time(self, calls: int) -> float:
        function, clock = self._function, self._clock
        collecting = gc.isenabled()
        gc.disable()
        try:
            waited_s = core_waiting.waited_s() if self._long else None
            switches = core_waiting.switches()
            wait_for_gpu()
            start = clock()
            for _ in itertools.repeat(None, calls):
                function()
            wait_for_gpu()
            seconds = clock() - start
            switches = core_waiting.switches() - switches
        finally:
            if collecting:
                gc.enable()
        self.preempted = core_waiting.too_many(switches, seconds) and _lost(waited_s, seconds)
        self._long = seconds >= _LONG_BLOCK_S
        return seconds


def _lost(waited_before_s: float | None, seconds: float) -> bool:
    """Whether threads waited for a core in too much of a block; True if nobody counted.

    Switches alone do not tell: one that clears many fresh pages meets kernel threads at every turn,
    for microseconds each.
    """
    waited_s = None if waited_before_s is None else core_waiting.waited_s()
    if waited_before_s is None or waited_s is None:
        return True
    return waited_s - waited_before_s > core_waiting.TOLERATED * seconds


class CacheFlush:
    """When called, it overwrites a buffer larger than the last-level cache, on torch's threads."""

    def __init__(self, last_level_bytes: int | None = None) -> None:
        size = 2 * (last_level_bytes or last_level_cache_bytes())
        size = min(max(size, _SMALLEST_FLUSH_BYTES), _LARGEST_FLUSH_BYTES)
        self._buffer = torch.zeros(size // 4, dtype=torch.float32, device="cpu")

    @property
    def size_bytes(self) -> int:
        return self._buffer.numel() * self._buffer.element_size()

    def __call__(self) -> None:
        self._buffer.add_(1.0)


def as_side(thing: object, name: str, clock: Clock) -> Side:
    """`thing` as a Side; a TorchweldError if it is neither a side nor a callable.

    `time` is looked up on the type: a model may have a submodule of that name.
    """
    if callable(getattr(type(thing), "time", None)):
        return thing  # type: ignore[return-value]
    if callable(thing):
        return CallableSide(thing, clock)
    raise TorchweldError(
        f"{name} is a {type(thing).__name__}, which cannot be timed; give a callable without "
        "arguments (lambda: model(x)) or an object with time(calls) -> seconds"
    )


def seconds_of(side: Side, calls: int, name: str) -> float:
    """`side.time(calls)`, checked; whatever goes wrong becomes an error that names the side."""
    try:
        seconds = float(side.time(calls))
    except Exception as error:
        if is_interrupt(error):
            raise
        raise NotMeasuredError(
            f"{name} raised {type(error).__name__} while it was timed: {error}; "
            "it must run alone, any number of times, before it can be compared"
        ) from error
    if not (math.isfinite(seconds) and seconds > 0.0):
        raise NotMeasuredError(
            f"{name} reported {seconds} s for {calls} calls; a positive number of seconds is "
            "needed: give it more work per call, or a finer clock"
        )
    return seconds


def last_level_cache_bytes() -> int:
    """The largest cache that Linux names, in bytes; 0 where it names none."""
    largest = 0
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = file.read_text().strip()
        unit = {"K": 1 << 10, "M": 1 << 20}.get(text[-1:], 1)
        digits = text.rstrip("KM")
        if digits.isdigit():
            largest = max(largest, int(digits) * unit)
    return largest
