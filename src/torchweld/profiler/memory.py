"""The memory account: what a step allocates, its peak, who made what is alive then.

In: a recording made with memory, and its attribution. Out: `Memory`, or None when the recording has
no allocations. What was alive before the step began is not counted, and what it frees of that
neither.
"""

from __future__ import annotations

from collections import defaultdict

from torchweld.profiler import events
from torchweld.profiler.attribution import ENGINE, Attribution
from torchweld.profiler.profile import Allocation, Memory

# A list of everything alive would be as long as the model; the largest say what there is to know.
LISTED = 40


def memory_account(recording: events.Recording, found: Attribution) -> Memory | None:
    """Follows the allocations through the step."""
    if not recording.allocations:
        return None
    backward_us = next(
        (event.start_us for event in recording.events if event.name.startswith(ENGINE)), None
    )
    alive: dict[int, events.Allocation] = {}
    level = peak = 0
    at_peak: list[events.Allocation] = []
    grown = False  # since the list at the peak was taken
    saved: dict[str, int] = defaultdict(int)
    made: dict[str, int] = defaultdict(int)
    count = total = 0

    def path_of(allocation: events.Allocation) -> str:
        return found.modules[_module(allocation, found)].path

    for allocation in recording.allocations:
        if backward_us is not None and allocation.time_us >= backward_us:
            for kept in alive.values():
                saved[path_of(kept)] += kept.bytes
            backward_us = None
        if allocation.bytes > 0:
            alive[allocation.storage] = allocation
            level += allocation.bytes
            count += 1
            total += allocation.bytes
            made[path_of(allocation)] += allocation.bytes
            grown = grown or level > peak
            peak = max(peak, level)
        else:
            if grown and level == peak:
                at_peak, grown = list(alive.values()), False
            freed = alive.pop(allocation.storage, None)
            level -= freed.bytes if freed is not None else 0
    if grown and level == peak:
        at_peak = list(alive.values())
    largest = sorted(at_peak, key=lambda allocation: -allocation.bytes)[:LISTED]
    return Memory(
        allocations=count,
        allocated_bytes=total,
        peak_bytes=peak,
        at_peak=tuple(_describe(allocation, recording, found) for allocation in largest),
        saved_bytes=_descending(saved),
        module_bytes=_descending(made),
    )


def _module(allocation: events.Allocation, found: Attribution) -> int:
    return found.module_of[allocation.event] if allocation.event >= 0 else 0


def _describe(
    allocation: events.Allocation, recording: events.Recording, found: Attribution
) -> Allocation:
    op = found.op_of[allocation.event] if allocation.event >= 0 else -1
    # The outermost op is the one that stands in the user's code.
    while op >= 0 and found.ops[op].parent >= 0 and not _is_engine(found.ops[op].parent, found):
        op = found.ops[op].parent
    return Allocation(
        bytes=allocation.bytes,
        module=_module(allocation, found),
        op=found.ops[op].name if op >= 0 else "outside all ops",
        phase=found.ops[op].phase if op >= 0 else "other",
    )


def _is_engine(op: int, found: Attribution) -> bool:
    return found.ops[op].name.startswith(ENGINE)


def _descending(by_path: dict[str, int]) -> dict[str, int]:
    return dict(sorted(by_path.items(), key=lambda item: -item[1]))
