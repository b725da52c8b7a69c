"""How much of a step its threads spent waiting for a core that another process had.

Linux counts that for every thread (`/proc/self/task/*/schedstat`). Elsewhere involuntary switches
are counted, as in `timing/`; a step above that tolerance counts as lost altogether.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

import torch

from torchweld.timing.timed_sides import TOLERATED_PREEMPTIONS_PER_THREAD_S

try:
    import resource
except ImportError:  # Windows: not noticed there, and shows only as noise
    resource = None  # type: ignore[assignment]

TASKS = "/proc/self/task"
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
        self._waited_s, self._switches = _waited_s(), _switches()
        self._begun_s = time.perf_counter()

    def lost(self) -> float:
        """The share of the time since `begin` in which threads waited for a core; 1 at most."""
        elapsed_s = max(time.perf_counter() - self._begun_s, 1e-9)
        now_s = _waited_s()
        if now_s is None or self._waited_s is None:
            tolerated = TOLERATED_PREEMPTIONS_PER_THREAD_S * torch.get_num_threads() * elapsed_s
            return 1.0 if _switches() - self._switches > int(tolerated) else 0.0
        return min(1.0, max(0.0, now_s - self._waited_s) / elapsed_s)


def _waited_s() -> float | None:
    """Of all threads together, since they began; None if the system does not count it."""
    waited_ns = 0
    try:
        for thread in os.listdir(TASKS):
            # It may have ended meanwhile, or the kernel does not count.
            with suppress(FileNotFoundError, ProcessLookupError):
                waited_ns += int(Path(TASKS, thread, "schedstat").read_bytes().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    # A process that ever ran has waited for some nanoseconds.
    return waited_ns / 1e9 if waited_ns else None


def _switches() -> int:
    return 0 if resource is None else resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
