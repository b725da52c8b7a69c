"""Where the calls of a device's runtime stand among the ops of a trace.

In: a `Profile` with its `Device`. Out: lists that run parallel to `Device.calls`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torchweld.profiles.profile import Device, Profile, RuntimeCall


def innermost(intervals: Sequence[tuple[float, float]], points: Sequence[float]) -> Iterator[int]:
    """The innermost interval (start, end) around each point; -1 for none.

    Intervals are nested or apart. They and the points are sorted, of two that start together the
    longer first.
    """
    following, opened = 0, list[int]()
    for point in points:
        while following < len(intervals) and intervals[following][0] <= point:
            opened.append(following)
            following += 1
        while opened and intervals[opened[-1]][1] < point:
            opened.pop()
        yield opened[-1] if opened else -1


def op_around_calls(profile: Profile, device: Device) -> list[int]:
    """The innermost op around each call, by time on its thread; -1 for none."""
    found = [-1] * len(device.calls)
    ops_of: dict[int, list[int]] = {}
    for i, op in enumerate(profile.ops):
        ops_of.setdefault(op.thread, []).append(i)
    for thread, calls in calls_by_thread(device.calls):
        ops = sorted(ops_of.get(thread, ()), key=lambda i: profile.ops[i].start_us)
        intervals = [
            (op.start_us, op.start_us + op.raw_us) for op in map(profile.ops.__getitem__, ops)
        ]
        middles = [_middle_us(device.calls[c]) for c in calls]
        for c, at in zip(calls, innermost(intervals, middles), strict=True):
            found[c] = ops[at] if at >= 0 else -1
    return found


def own_time_of_calls(device: Device) -> list[float]:
    """µs of each call without the calls inside it: a runtime call may make one of the driver."""
    own_us = [call.duration_us for call in device.calls]
    for _, calls in calls_by_thread(device.calls):
        opened: list[int] = []
        for c in calls:
            call = device.calls[c]
            while opened and _end_us(device.calls[opened[-1]]) < _middle_us(call):
                opened.pop()
            if opened:
                own_us[opened[-1]] -= call.duration_us
            opened.append(c)
    return own_us


def calls_by_thread(calls: Sequence[RuntimeCall]) -> Iterator[tuple[int, list[int]]]:
    """Calls of each thread by start, the longer first."""
    found: dict[int, list[int]] = {}
    for c in sorted(range(len(calls)), key=lambda c: (calls[c].start_us, -calls[c].duration_us)):
        found.setdefault(calls[c].thread, []).append(c)
    yield from found.items()


def _middle_us(call: RuntimeCall) -> float:
    return call.start_us + 0.5 * call.duration_us


def _end_us(call: RuntimeCall) -> float:
    return call.start_us + call.duration_us
