"""Whether the times of a profile are those of the step: if not, it is not measured, and why.

In: the step by the clock, the step under the profiler with its cost taken away, and how much of the
time of the rounds other processes took. Out: None, or a `NotMeasured` that stands for every figure
that rests on time. Counts, shapes and bytes rest on none.
"""

from __future__ import annotations

from torchweld.core.figures import duration, share
from torchweld.core.not_measured import NotMeasured

# The step is not measured if the corrected time misses the clock by more than this share of it, or
# if others took more than this share of the time. The correction itself is good to a tenth.
DOUBTFUL = 0.25
AGAIN = "take the profile again when the machine is idle"


def doubt(wall_us: float, corrected_us: float, lost: float = 0.0) -> NotMeasured | None:
    """What speaks against the times as a whole; None if nothing does.

    `lost`: the share of the time of the rounds in which threads waited for a core
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
