"""Where the calls of a device's runtime stand among the ops of a trace.

In: a `Profile` with its `Device`. Out: lists that run parallel to `Device.calls`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torchweld.profiles.profile import Device, Profile, RuntimeCall


def op_around_calls(profile: Profile, device: Device) -> list[int]:
    """The innermost op around each call, by time on its thread; -1 for none."""
    found = [-1] * len(device.calls)
    ops_of: dict[int, list[int]] = {}
    for i, op in enumerate(profile.ops):
        ops_of.setdefault(op.thread, []).append(i)
    for thread, calls in _calls_by_thread(device.calls):
        ops = sorted(ops_of.get(thread, ()), key=lambda i: profile.ops[i].start_us)
        following, opened = 0, list[int]()
        for c in calls:
            middle_us = device.calls[c].start_us + 0.5 * device.calls[c].duration_us
            while following < len(ops) and profile.ops[ops[following]].start_us <= middle_us:
                opened.append(ops[following])
                following += 1
            while opened and _end_us(profile, opened[-1]) < middle_us:
                opened.pop()
            found[c] = opened[-1] if opened else -1
    return found


def own_time_of_calls(device: Device) -> list[float]:
    """µs of each call without the calls inside it: a runtime call may make one of the driver."""
    own_us = [call.duration_us for call in device.calls]
    for _, calls in _calls_by_thread(device.calls):
        opened: list[int] = []
        for c in calls:
            call = device.calls[c]
            middle_us = call.start_us + 0.5 * call.duration_us
            while opened and _call_end_us(device.calls[opened[-1]]) < middle_us:
                opened.pop()
            if opened:
                own_us[opened[-1]] -= call.duration_us
            opened.append(c)
    return own_us


def _calls_by_thread(calls: Sequence[RuntimeCall]) -> Iterator[tuple[int, list[int]]]:
    """Calls of each thread by start, the longer first."""
    found: dict[int, list[int]] = {}
    for c in sorted(range(len(calls)), key=lambda c: (calls[c].start_us, -calls[c].duration_us)):
        found.setdefault(calls[c].thread, []).append(c)
    yield from found.items()


def _end_us(profile: Profile, op: int) -> float:
    return profile.ops[op].start_us + profile.ops[op].raw_us


def _call_end_us(call: RuntimeCall) -> float:
    return call.start_us + call.duration_us
