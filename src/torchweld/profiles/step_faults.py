"""`StepFaults`: the page faults of one step, as a profile carries them.

Counted on steps without the profiler, which allocates memory of its own. How many faults a step
takes can change from step to step, since malloc gives back what happens to lie at the end of its
heap: six blocks of 768 → 3072 took 0 to 25,000 in one run. So the mean counts, not the median.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from torchweld.core.not_measured import NotMeasured
from torchweld.core.record_fields import Amount, Count, Positive, Word
from torchweld.machine.page_faults import TICK_US, FaultCost, FaultCount

# Makes glibc keep the memory that is freed. MALLOC_MMAP_THRESHOLD_ instead of the second would do
# so too, but up to glibc 2.34 it is ignored above 32 MB (since 2.35 there is no limit), and the
# first one then leaves the threshold at 128 KB. Checked on 2.36, with blocks of 1 to 160 MB.
KEEP_MEMORY = "MALLOC_TRIM_THRESHOLD_=-1 MALLOC_MMAP_MAX_=0"

IN_TRACE = NotMeasured("traces do not tell; profile the model itself")
SAVED_BEFORE = NotMeasured("the profile was saved before page faults were counted")
DISTURBED = NotMeasured(
    "other processes ran in every round, and time in the kernel is only sampled"
)


@dataclass(frozen=True, kw_only=True)
class StepFaults:
    """Page faults of all threads of the process. A fault brings one page, or one huge page."""

    per_step: Amount  # the mean
    least: Count  # in one step
    most: Count
    steps: Count  # that were counted
    fault_us: Amount  # what one costs, measured when the profile was taken
    fault_bytes: Positive
    system_us: Amount | NotMeasured = DISTURBED  # in the kernel per step, for whatever reason
    system_steps: Count = 0  # how many steps `system_us` comes from: the undisturbed ones
    allocator: Word = ""  # what serves malloc: "glibc 2.36"; "" if not known

    @property
    def fresh_bytes(self) -> float:
        """Per step; at most, where the system mixes pages and huge pages."""
        return self.per_step * self.fault_bytes

    @property
    def cost_us(self) -> float:
        """The most that a step pays for its faults: no more than all its time in the kernel.

        As if one thread took them all. Threads that take them side by side share the time.
        """
        cost_us = self.per_step * self.fault_us
        if isinstance(self.system_us, NotMeasured):
            return cost_us
        return min(cost_us, self.system_us + self.system_error_us)

    @property
    def system_error_us(self) -> float:
        """What `system_us` may lack: two standard deviations of a count of ticks, and two ticks."""
        if isinstance(self.system_us, NotMeasured) or not self.system_steps:
            return math.inf
        whole_us = self.system_steps * self.system_us
        return (2 * math.sqrt(whole_us * TICK_US) + 2 * TICK_US) / self.system_steps


def faults_of(
    steps: Sequence[FaultCount | NotMeasured],
    calm: Sequence[FaultCount | NotMeasured],
    cost: FaultCost | NotMeasured,
    allocator: str,
) -> StepFaults | NotMeasured:
    """The faults of a step, from counts of single steps; other processes did not disturb `calm`."""
    if isinstance(cost, NotMeasured):
        return cost
    counts = []
    for step in steps:
        if isinstance(step, NotMeasured):
            return step
        counts.append(step.faults)
    system = [step.system_us for step in calm if not isinstance(step, NotMeasured)]
    return StepFaults(
        per_step=statistics.fmean(counts),
        least=min(counts),
        most=max(counts),
        steps=len(counts),
        fault_us=cost.us,
        fault_bytes=cost.bytes,
        system_us=statistics.fmean(system) if system else DISTURBED,
        system_steps=len(system),
        allocator=allocator,
    )
