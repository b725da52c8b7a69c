"""Joins two recordings of one step: a trace, and the profiler's tree, which names tensors' memory.

An event is the same if its kind and name are, and its start to the nanosecond.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torchweld.profiles.recorded_events import OP, Event, Recording

# At least this share of a trace's ops is in the tree, if both show the same step.
_LEAST_MATCHED = 0.9


def joined_memory(
    recording: Recording, named: Recording, on_device: Mapping[int, bool]
) -> Recording:
    """`recording` with the inputs and the allocations of `named`.

    on_device: of storages that were allocated; if any are, only those count, as for traces
    """
    place = _places(recording.events, named.events)
    ops = sum(event.kind == OP for event in recording.events)
    matched = sum(recording.events[here].kind == OP for here in place.values())
    if matched < _LEAST_MATCHED * ops:
        recording.notices.append(
            f"only {matched} of {ops} ops of the trace are in the profiler's tree of events, so "
            "memory round trips are not known"
        )
        return recording
    events = list(recording.events)
    for there, here in place.items():
        if events[here].kind == OP:
            events[here] = replace(events[here], inputs=named.events[there].inputs)

    def around(there: int) -> int:
        while there >= 0 and there not in place:
            there = named.events[there].parent
        return place.get(there, -1)

    some = any(on_device.values())
    kept = [
        replace(one, event=around(one.event))
        for one in named.allocations
        if not some or on_device.get(one.storage, False)
    ]
    return replace(recording, events=events, allocations=kept)


def _places(events: Sequence[Event], others: Sequence[Event]) -> dict[int, int]:
    """Index among `others` -> the index of the same event among `events`."""
    at = {(e.kind, e.name, round(1e3 * e.start_us)): here for here, e in enumerate(events)}
    found: dict[int, int] = {}
    for there, event in enumerate(others):
        ns = round(1e3 * event.start_us)
        keys = ((event.kind, event.name, ns + off) for off in (0, 1, -1))
        here = next((at[key] for key in keys if key in at), None)
        if here is not None:
            found[there] = here
    return found
