"""What else keeps this machine busy, for the line above figures that were taken beside it.

Linux counts the time that each processor was busy. What this process used of it is taken away; what
is left belongs to other processes, or was given to another virtual machine. Elsewhere nothing is
known, and nothing is said.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from torchweld.not_measured import NotMeasured

STAT = Path("/proc/stat")
SAMPLE_S = 0.2
# Less is the housekeeping that every system does.
WORTH_A_WORD = 0.15
# Columns of a line of /proc/stat in which nothing ran: idle, and waiting for a disk.
IDLE = (3, 4)


def busy_cores(sample_s: float = SAMPLE_S) -> float | NotMeasured:
    """How many cores' worth of time others take, over a moment in which this process sleeps."""
    try:
        before_s, own_s = _busy_s(), _own_s()
        begun_s = time.perf_counter()
        time.sleep(sample_s)
        elapsed_s = time.perf_counter() - begun_s
        others_s = (_busy_s() - before_s) - (_own_s() - own_s)
    except (OSError, ValueError, IndexError, AttributeError):
        return NotMeasured("this system does not tell what its processors do")
    return max(0.0, others_s / elapsed_s)


def load_words(busy: float | NotMeasured | None = None) -> str:
    """One sentence about the load of this moment; "" where there is none, or none is known."""
    busy = busy_cores() if busy is None else busy
    if isinstance(busy, NotMeasured) or busy < WORTH_A_WORD:
        return ""
    return (
        f"This machine is busy: other processes use {busy:.1f} of its {os.cpu_count()} cores. "
        "Times are noisy, and some cannot be measured."
    )


def _busy_s() -> float:
    """Seconds that all processors together have been busy; what a guest was denied is among it."""
    with STAT.open() as file:
        # user, nice, system, idle, iowait, irq, softirq, steal; guests are in user already.
        ticks = [int(text) for text in file.readline().split()[1:9]]
    busy = sum(ticks) - sum(ticks[column] for column in IDLE)
    return busy / os.sysconf("SC_CLK_TCK")


def _own_s() -> float:
    used = os.times()
    return used.user + used.system
