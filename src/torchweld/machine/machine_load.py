"""How busy other processes keep this machine, for the line above figures measured meanwhile.

Linux counts the time that each processor was busy. Without the share of this process, the rest
belongs to other processes or to another virtual machine. On other systems nothing is known, and
nothing is said.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from torchweld.core.not_measured import NotMeasured

STAT = Path("/proc/stat")
SAMPLE_S = 0.2
# Less is housekeeping, which every system does.
WORTH_A_WORD = 0.15
# Columns of a line of /proc/stat in which nothing ran: idle, and waiting for a disk.
IDLE = (3, 4)


class LoadMeter:
    """What others take, from its creation on, while this process does its own work."""

    def __init__(self) -> None:
        self._begun = _counters()

    def busy_cores(self) -> float | NotMeasured:
        """How many cores' worth of time others have used since then."""
        now = _counters()
        if isinstance(self._begun, NotMeasured) or isinstance(now, NotMeasured):
            return NotMeasured("this system does not say how busy its processors are")
        elapsed_s = now.clock_s - self._begun.clock_s
        others_s = (now.busy_s - self._begun.busy_s) - (now.own_s - self._begun.own_s)
        return max(0.0, others_s / elapsed_s) if elapsed_s > 0 else 0.0


def busy_cores(sample_s: float = SAMPLE_S) -> float | NotMeasured:
    """How many cores' worth of time others use, during a moment in which this process sleeps."""
    meter = LoadMeter()
    time.sleep(sample_s)
    return meter.busy_cores()


def load_words(busy: float | NotMeasured | None = None) -> str:
    """One sentence about the present load; "" if there is none, or it is not known."""
    busy = busy_cores() if busy is None else busy
    if isinstance(busy, NotMeasured) or busy < WORTH_A_WORD:
        return ""
    return (
        f"This machine is busy: other processes use {busy:.1f} of its {os.cpu_count()} cores. "
        "Times are noisy, and some cannot be measured."
    )


@dataclass(frozen=True, kw_only=True)
class _Counters:
    """Seconds: on the clock, of all processors being busy, and of this process being busy."""

    clock_s: float
    busy_s: float
    own_s: float


def _counters() -> _Counters | NotMeasured:
    try:
        with STAT.open() as file:
            # user, nice, system, idle, iowait, irq, softirq, steal; guests are in user already.
            ticks = [int(text) for text in file.readline().split()[1:9]]
        busy = sum(ticks) - sum(ticks[column] for column in IDLE)
        used = os.times()
        return _Counters(
            clock_s=time.perf_counter(),
            busy_s=busy / os.sysconf("SC_CLK_TCK"),
            own_s=used.user + used.system,
        )
    except (OSError, ValueError, IndexError, AttributeError):
        return NotMeasured("this system does not say how busy its processors are")
