"""The memory of a page: bytes of tensors over the step, and what is alive at the peak.

In: a `Profile`. Out: a `MemoryView`.
"""

from __future__ import annotations

from torchweld.core.not_measured import NotMeasured
from torchweld.pages.page_records import AliveBytes, MemoryView
from torchweld.pages.timeline_view import on_timeline
from torchweld.profiles.profile import Allocation, MemoryCourse, Profile
from torchweld.report.flame_stacks import op_name


def memory_of(profile: Profile) -> MemoryView | None:
    """None if no memory was recorded."""
    memory = profile.memory
    if memory is None:
        return None
    at_us, sizes = _course(profile, memory.course)
    return MemoryView(
        peak_bytes=memory.peak_bytes,
        allocations=memory.allocations,
        allocated_bytes=memory.allocated_bytes,
        at_us=at_us,
        bytes=sizes,
        at_peak=_together(profile, memory.at_peak),
    )


def _course(profile: Profile, course: MemoryCourse) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """On the axis of the timeline. It begins without any memory of the step."""
    if not course.at_us or isinstance(profile.step_us, NotMeasured):
        return (), ()
    at_us = on_timeline(profile, course.at_us)
    return (0.0, *(round(max(us, 0.0), 3) for us in at_us)), (0, *course.bytes)


def _together(profile: Profile, alive: tuple[Allocation, ...]) -> tuple[AliveBytes, ...]:
    """Allocations of one op in one module as one, the largest first."""
    groups: dict[tuple[str, str, str], list[int]] = {}
    for one in alive:
        key = (profile.modules[one.module].path, op_name(one.op), one.phase)
        groups.setdefault(key, []).append(one.bytes)
    found = [
        AliveBytes(bytes=sum(sizes), count=len(sizes), module=path, op=op, phase=phase)
        for (path, op, phase), sizes in groups.items()
    ]
    return tuple(sorted(found, key=lambda one: -one.bytes))
