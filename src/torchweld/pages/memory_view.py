"""The memory of a page: bytes of tensors over the step, and what is alive at the peak.

In: a `Profile`. Out: a `MemoryView`.
"""

from __future__ import annotations

from torchweld.pages.page_records import AliveBytes, MemoryView
from torchweld.profiles.profile import Allocation, Profile
from torchweld.report.flame_stacks import op_name


def memory_of(profile: Profile) -> MemoryView | None:
    """None if no memory was recorded."""
    memory = profile.memory
    if memory is None:
        return None
    return MemoryView(
        peak_bytes=memory.peak_bytes,
        allocations=memory.allocations,
        allocated_bytes=memory.allocated_bytes,
        at_us=(),
        bytes=(),
        at_peak=_together(profile, memory.at_peak),
    )


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
