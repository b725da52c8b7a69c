"""What a step of training costs besides its time: page faults and the peak of memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from torchweld.core.not_measured import NotMeasured
from torchweld.machine.device_waiting import wait_for_gpu
from torchweld.machine.page_faults import FaultMeter

# Steps that are counted, after some that are not: memory that is kept is there by then.
WARM_UP_STEPS, LEAST_STEPS, MOST_STEPS, COUNTED_S = 3, 5, 200, 0.2

STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
# Written to CLEAR_REFS, it makes Linux begin the peak anew.
RESET_PEAK = "5"


def faults_and_peak(
    call: Callable[[], Any],
) -> tuple[float | NotMeasured, int | NotMeasured]:
    """Minor page faults per call, and the most memory that the process held meanwhile."""
    for _ in range(WARM_UP_STEPS):
        begun_s = time.perf_counter()
        call()
        wait_for_gpu()
        once_s = time.perf_counter() - begun_s
    steps = min(MOST_STEPS, max(LEAST_STEPS, round(COUNTED_S / max(once_s, 1e-9))))
    forgotten = _forget_peak()
    meter = FaultMeter()
    for _ in range(steps):
        call()
    wait_for_gpu()
    taken = meter.taken()
    peak = peak_bytes() if forgotten else NotMeasured("this system cannot begin a peak anew")
    return taken if isinstance(taken, NotMeasured) else taken.faults / steps, peak


def _forget_peak() -> bool:
    """Begins the peak of this process anew; False where the system cannot."""
    with suppress(OSError):
        CLEAR_REFS.write_text(RESET_PEAK)
        return True
    return False


def peak_bytes() -> int | NotMeasured:
    """The most memory this process held. `ru_maxrss` may be that of the parent before the start."""
    with suppress(OSError, ValueError, IndexError):
        for line in STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return 1024 * int(line.split()[1])
    return NotMeasured("this system does not tell the peak of a process")
