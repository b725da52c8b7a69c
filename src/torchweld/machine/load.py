"""What else keeps this machine busy, for the line above figures that were taken beside it.

Linux counts the time that each processor was busy. What this process used of it is taken away; what
is left belongs to other processes, or was given to another virtual machine. Elsewhere nothing is
known, and nothing is said.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from torchweld.core.not_measured import NotMeasured

STAT = Path("/proc/stat")
SAMPLE_S = 0.2
# Less is the housekeeping that every system does.
WORTH_A_WORD = 0.15
# Columns of a line of /proc/stat in which nothing ran: idle, and waiting for a disk.
IDLE = (3, 4)


class LoadMeter:
    """From its making on: what others take while this process does something of its own."""

    def __init__(self) -> None:
        self._begun = _counters()

    def busy_cores(self) -> float | NotMeasured:
        """How many cores' worth of time others have taken since."""
        now = _counters()
        if isinstance(self._begun, NotMeasured) or isinstance(now, NotMeasured):
            return NotMeasured("this system does not tell what its processors do")
        elapsed_s = now.clock_s - self._begun.clock_s
        others_s = (now.busy_s - self._begun.busy_s) - (now.own_s - self._begun.own_s)
        return max(0.0, others_s / elapsed_s) if elapsed_s > 0 else 0.0


def busy_cores(sample_s: float = SAMPLE_S) -> float | NotMeasured:
    """How many cores' worth of time others take, over a moment in which this process sleeps."""
    meter = LoadMeter()
    time.sleep(sample_s)
    return meter.busy_cores()


def load_words(busy: float | NotMeasured | None = None) -> str:
    """One sentence about the load of this moment; "" where there is none, or none is known."""
    busy = busy_cores() if busy is None else busy
    if isinstance(busy, NotMeasured) or busy < WORTH_A_WORD:
        return ""
    return (
        f"This machine is busy: other processes use {busy:.1f} of its {os.cpu_count()} cores. "
        "Times are noisy, and some cannot be measured."
    )


@dataclass(frozen=True, kw_only=True)
class _Counters:
    """Seconds: on the clock, that all processors together were busy, and that this process was."""

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
        return NotMeasured("this system does not tell what its processors do")
