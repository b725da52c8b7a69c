"""How long threads waited for a core that another process had.

Linux counts that for every thread (`/proc/self/task/*/schedstat`). Elsewhere, and in times too
short for it, involuntary switches tell: how often a thread had to give up its core.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

import torch

try:
    import resource
except ImportError:  # Windows: not noticed there, and shows only as noise
    resource = None  # type: ignore[assignment]

TASKS = "/proc/self/task"
# Calls of 3 ms on two threads met 33 involuntary context switches a second on a quiet 2-core
# virtual machine (kernel threads, microseconds each) and 200 with another process on one core
# (whole time slices, which multiply a call's time by 2 to 10).
TOLERATED_SWITCHES_PER_THREAD_S = 50.0
# A step that lost more than this share of its time was disturbed. On an idle machine kernel threads
# took less than 0.4 % of steps of 14 ms; one other process took a third and more.
TOLERATED = 0.05


class CoreWaiting:
    """`begin` before a step, `lost` after it; both outside the timed part.

    Each takes some ten microseconds per thread.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        self._waited_s, self._switches = waited_s(), switches()
        self._begun_s = time.perf_counter()

    def lost(self) -> float:
        """The share of the time since `begin` in which threads waited for a core; 1 at most."""
        elapsed_s = max(time.perf_counter() - self._begun_s, 1e-9)
        now_s = waited_s()
        if now_s is None or self._waited_s is None:
            return 1.0 if too_many(switches() - self._switches, elapsed_s) else 0.0
        return min(1.0, max(0.0, now_s - self._waited_s) / elapsed_s)


def waited_s() -> float | None:
    """Seconds that all threads have waited since they began; None if the system counts none."""
    waited_ns = 0
    try:
        for thread in os.listdir(TASKS):
            # The thread may have ended meanwhile, or the kernel may not count.
            with suppress(FileNotFoundError, ProcessLookupError):
                waited_ns += int(Path(TASKS, thread, "schedstat").read_bytes().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    # A process that ever ran has waited for some nanoseconds.
    return waited_ns / 1e9 if waited_ns else None


def switches() -> int:
    """How often the threads of this process had to give up their cores."""
    return 0 if resource is None else resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


def too_many(count: int, seconds: float) -> bool:
    """Whether this many switches within `seconds` are more than a quiet machine has."""
    return count > int(seconds * TOLERATED_SWITCHES_PER_THREAD_S * torch.get_num_threads())
