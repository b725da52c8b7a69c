"""Decides whether the times of a profile can be believed. If not, the step is not measured.

In: the step by the clock, the step under the profiler with its cost taken away, and the share of
time that other processes took. Out: None, or a `NotMeasured` in place of every figure that depends
on time. Counts, shapes and bytes do not.
"""

from __future__ import annotations

from torchweld.core.not_measured import NotMeasured
from torchweld.core.number_text import duration, share

# The step is not measured if the corrected time differs from the clock by more than this share, or
# if other processes took more than this share of the time. The correction is good to a tenth.
DOUBTFUL = 0.25
AGAIN = "take the profile again when the machine is idle"


def doubt(wall_us: float, corrected_us: float, lost: float = 0.0) -> NotMeasured | None:
    """What speaks against all of the times; None if nothing does.

    `lost`: the share of time in which threads waited for a core
    """
    apart = (
        f"steps took {duration(wall_us)} without the profiler, and {duration(corrected_us)} with "
        "it when its cost is taken away"
    )
    if lost > DOUBTFUL:
        return NotMeasured(
            f"threads of this process waited for a core for {share(lost, 1)} of the time, because "
            f"something else ran on this machine ({apart}); {AGAIN}, or on fewer threads "
            "(OMP_NUM_THREADS=1)"
        )
    if not abs(wall_us - corrected_us) <= DOUBTFUL * wall_us:
        return NotMeasured(f"{apart}; something else ran on this machine; {AGAIN}")
    return None
