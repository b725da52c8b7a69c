"""The course of a step's memory: how many bytes of tensors are alive, from when on.

In: a recording made with memory, and its attribution. Out: a `MemoryCourse` of at most
`MOST_POINTS` points, among them the peak.

The step that is recorded with shapes and memory is slower than others. Its times are moved to the
axis of the ops: an allocation in the middle of an op stays in its middle, and what lies between two
ops keeps its place between them. On the axis of a trace, that changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from torchweld.profiles.attributing.attribution import Attribution
from torchweld.profiles.profile import MemoryCourse
from torchweld.profiles.recorded_events import OP, Recording

# A screen is hardly wider; more would only make files larger.
MOST_POINTS = 2000

Floats = npt.NDArray[np.float64]


def course_of(recording: Recording, found: Attribution) -> MemoryCourse:
    """Follows the allocations through the step."""
    times, levels = [], []
    alive: dict[int, int] = {}
    level = 0
    for allocation in recording.allocations:
        if allocation.bytes > 0:
            alive[allocation.storage] = allocation.bytes
            level += allocation.bytes
        else:
            level -= alive.pop(allocation.storage, 0)
        times.append(allocation.time_us)
        levels.append(level)
    kept = chosen_points(levels)
    moved = _on_axis_of_ops(np.array([times[i] for i in kept]), recording, found)
    return MemoryCourse(
        at_us=tuple(round(us, 3) for us in moved.tolist()),
        bytes=tuple(levels[i] for i in kept),
    )


def chosen_points(levels: Sequence[int], most: int = MOST_POINTS) -> list[int]:
    """Indices of at most `most` levels: first and last, lowest and highest of every part between.

    The first of the highest levels of all is the peak.
    """
    if len(levels) <= most:
        return list(range(len(levels)))
    chosen = {0, len(levels) - 1}
    ends = np.linspace(1, len(levels) - 1, (most - 2) // 2 + 1).astype(int).tolist()
    for start, end in pairwise(ends):
        part = range(start, end)
        chosen |= {min(part, key=levels.__getitem__), max(part, key=levels.__getitem__)}
    return sorted(chosen)


def _on_axis_of_ops(times_us: Floats, recording: Recording, found: Attribution) -> Floats:
    """Times of the recording as times of `Op.start_us`, by the ops of the first thread."""
    knots: list[tuple[float, float]] = []
    thread = None
    for event, at in zip(recording.events, found.op_of, strict=True):
        if event.kind == OP and (thread is None or event.thread == thread):
            thread, op = event.thread, found.ops[at]
            knots.append((event.start_us, op.start_us))
            knots.append((event.end_us, op.start_us + op.raw_us))
    if not knots:
        return times_us
    given, wanted = np.array(sorted(knots)).T
    # Means over several steps need not be in order, but time goes on.
    wanted = np.maximum.accumulate(wanted)
    moved = np.interp(times_us, given, wanted)
    # Outside of all ops, time goes at its own pace.
    before, after = np.minimum(times_us - given[0], 0.0), np.maximum(times_us - given[-1], 0.0)
    return np.asarray(moved + before + after)
