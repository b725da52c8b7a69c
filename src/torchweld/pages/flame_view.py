"""The flames of a page: where the time of the host and of the device goes, as columns.

In: a `Profile`, or a tree of frames. Out: `Flame`s. Times are rounded to whole nanoseconds along
the walk from frame to frame: what is left over goes to the next frame. So all frames, and the
frames inside any one, add up to their rounded sum, and no frame is off by more than 1 ns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from torchweld.core.not_measured import NotMeasured
from torchweld.core.number_text import duration
from torchweld.pages.page_records import FRAME_KINDS, Flame
from torchweld.profiles.profile import Device, Profile
from torchweld.report.flame_stacks import BEYOND, Frame, device_frames, every, host_frames

T = TypeVar("T")

# A screen shows some 2,000 frames side by side, and stacks are some ten frames deep.
MOST_FRAMES = 20_000
SMALLER = "smaller ones"


def host_flame(profile: Profile) -> Flame | None:
    """None if the step was not measured: its times would say nothing about the model."""
    if isinstance(profile.step_us, NotMeasured):
        return None
    top = host_frames(profile)
    missing_us = profile.step_us - sum(frame.self_us for frame, _ in every(top))
    if missing_us > 0:
        top.into(BEYOND).self_us += missing_us
    return flame_of(top, _host_note(profile))


def _host_note(profile: Profile) -> str:
    threads = len({op.thread for op in profile.ops})
    if threads > 1:
        return (
            f"{threads} threads worked, partly at the same time, so frames add up to more than "
            "the clock shows"
        )
    if profile.about.source == "trace":
        return "the time of everything in the trace"
    return "the step without the profiler's cost"


def device_flame(profile: Profile) -> Flame | None:
    """None without a device, or if the step was not measured."""
    top = device_frames(profile)
    if top is None or profile.device is None or isinstance(profile.step_us, NotMeasured):
        return None
    return flame_of(top, _device_note(profile.device))


def _device_note(device: Device) -> str:
    note = f"the time of all kernels; the device was idle for another {duration(device.idle_us)}"
    if device.until_us is not None:
        note += f"; the account covers {device.steps} of {device.steps + 1} steps"
    return note


def flame_of(top: Frame, note: str = "", most: int = MOST_FRAMES) -> Flame:
    """The frames as columns. Of more than `most`, the shortest are merged."""
    merged = _merge_smallest(top, most)
    frames = list(depth_first(top, lambda frame: list(frame.inside.values())))
    numbers: dict[str, int] = {}
    own_us = rounded(frame.self_us for frame, _ in frames)
    return Flame(
        total_us=round(sum(frame.self_us for frame, _ in frames), 3),
        name=tuple(numbers.setdefault(frame.name, len(numbers)) for frame, _ in frames),
        names=tuple(numbers),
        parent=tuple(parent for _, parent in frames),
        own_us=own_us,
        kind=tuple(FRAME_KINDS.index(frame.kind) for frame, _ in frames),
        calls=tuple(frame.calls for frame, _ in frames),
        module=tuple(frame.module for frame, _ in frames),
        merged=merged,
        note=note,
    )


def rounded(times_us: Iterable[float]) -> tuple[float, ...]:
    """Times in whole nanoseconds, which add up to the rounded sum of those before them."""
    found: list[float] = []
    passed_us, given_ns = 0.0, 0
    for us in times_us:
        passed_us += us
        ns = max(round(passed_us * 1e3) - given_ns, 0)
        given_ns += ns
        found.append(ns / 1e3)
    return tuple(found)


def depth_first(top: T, inside: Callable[[T], Sequence[T]]) -> Iterator[tuple[T, int]]:
    """Every frame with the number of the frame around it, -1 for none."""
    pending, count = [(top, -1)], 0
    while pending:
        frame, parent = pending.pop()
        yield frame, parent
        pending.extend((inner, count) for inner in reversed(inside(frame)))
        count += 1


def _merge_smallest(top: Frame, most: int) -> int:
    """Leaves the `most` longest frames and `SMALLER` in each; gives the number of the others.

    Frames without any time are among the others. The frame around another is never shorter, so
    what is left is a tree.
    """
    frames = every(top)
    totals = {id(frame): frame.self_us for frame, _ in frames}
    for frame, around in reversed(frames):
        if around is not None:
            totals[id(around)] += totals[id(frame)]
    order = sorted(range(len(frames)), key=lambda i: -totals[id(frames[i][0])])
    kept = {id(frames[i][0]) for i in order[:most] if totals[id(frames[i][0])] > 0}
    kept.add(id(top))
    for frame, _ in frames:
        if id(frame) in kept:
            _merge_inside(frame, kept, totals)
    return len(frames) - len(kept)


def _merge_inside(frame: Frame, kept: set[int], totals: dict[int, float]) -> None:
    lost = [key for key, inner in frame.inside.items() if id(inner) not in kept]
    lost_us = sum(totals[id(frame.inside.pop(key))] for key in lost)
    if lost_us > 0:
        frame.into(SMALLER).self_us += lost_us
