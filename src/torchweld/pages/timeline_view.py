"""The timeline of a page: lanes of host threads and of device streams, as columns.

In: a `Profile`. Out: a `Timeline`. Module calls lie around their ops, one level higher for each
module. Starts and ends are whole nanoseconds, so what touches still does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from torchweld.core.not_measured import NotMeasured
from torchweld.core.safe_text import clean
from torchweld.pages.page_records import Lane, Timeline
from torchweld.profiles.profile import Device, Profile
from torchweld.profiles.recorded_events import MARK
from torchweld.report.flame_stacks import op_name
from torchweld.report.runtime_places import calls_by_thread, innermost, op_around_calls
from torchweld.report.trace_timeline import (
    Range,
    Span,
    module_ranges,
    range_counts,
    spans,
    thread_names,
)

# A span takes 26 to 31 bytes of the page, so two sides with as many stay below 13 MB.
MOST_SPANS = 200_000
# Of the whole time: neighbours within it become one span where there are too many. A screen shows
# 2,000 of these, so that only a closer look than 50-fold sees the difference.
FIRST_RESOLUTION = 1e-5
SEVERAL = "several short ones"


class Bar(NamedTuple):
    """A span of a lane, ns."""

    start_ns: int
    busy_ns: int
    name: str
    depth: int
    module: int


@dataclass(frozen=True)
class Row:
    """Which lane: a thread of the host, or a stream of a device."""

    device: int  # -1 for the host
    number: int


Bars = Mapping[Row, list[Bar]]


def timeline_of(profile: Profile, most: int = MOST_SPANS) -> Timeline | None:
    """None if nothing was recorded, or if the step was not measured."""
    if isinstance(profile.step_us, NotMeasured):
        return None
    placed = spans(profile)
    origin_us = origin_of(profile)
    found: dict[Row, list[Bar]] = {}
    for row, span, name, depth, module in _all(profile, placed):
        start_ns = round(1e3 * (span.start_us - origin_us))
        busy_ns = max(round(1e3 * (span.end_us - origin_us)) - start_ns, 0)
        bar = Bar(start_ns, busy_ns, name, depth, module)
        found.setdefault(row, []).append(bar)
    if not found:
        return None
    for bars in found.values():
        bars.sort(key=lambda bar: (bar.start_ns, bar.depth))
    end_ns = max(bar.start_ns + bar.busy_ns for bars in found.values() for bar in bars)
    if profile.about.source == "live":
        end_ns = max(end_ns, round(1e3 * profile.step_us))
    return _timeline(profile, found, thinned(found, end_ns, most), end_ns)


def origin_of(profile: Profile) -> float:
    """Where the axis of times begins: 0, or earlier if something ran before the first step."""
    starts = [op.start_us for op in profile.ops]
    if profile.device is not None:
        starts += [kernel.start_us for kernel in profile.device.kernels]
        starts += [call.start_us for call in profile.device.calls]
    return min(starts, default=0.0) if profile.timing is None and min(starts, default=0) < 0 else 0


def on_timeline(profile: Profile, times_us: Sequence[float]) -> list[float]:
    """Times on the axis of `Op.start_us` as times on the timeline.

    In a live step they move with the ops of the first thread, whose times are laid out anew.
    """
    if profile.timing is None or not profile.ops:
        origin_us = origin_of(profile)
        return [us - origin_us for us in times_us]
    knots = [(0.0, 0.0), (profile.timing.raw_us, profile.timing.corrected_us)]
    for op, span in zip(profile.ops, spans(profile), strict=True):
        if op.thread == profile.ops[0].thread:
            knots.append((op.start_us, span.start_us))
            knots.append((op.start_us + op.raw_us, span.end_us))
    given, wanted = np.array(sorted(knots)).T
    found: list[float] = np.interp(times_us, given, np.maximum.accumulate(wanted)).tolist()
    return found


def _timeline(profile: Profile, found: Bars, shown: Bars, end_ns: int) -> Timeline:
    numbers: dict[str, int] = {}
    threads = thread_names(profile)
    lanes = tuple(
        _lane(_row_name(row, threads), row, shown[row], len(found[row]), numbers)
        for row in sorted(shown, key=lambda row: (row.device, row.number))
    )
    return Timeline(end_us=end_ns / 1e3, names=tuple(numbers), lanes=lanes, note=_note(profile))


def _lane(name: str, row: Row, bars: list[Bar], count: int, numbers: dict[str, int]) -> Lane:
    return Lane(
        name=name,
        device=row.device >= 0,
        start_us=tuple(bar.start_ns / 1e3 for bar in bars),
        duration_us=tuple(bar.busy_ns / 1e3 for bar in bars),
        name_index=tuple(numbers.setdefault(bar.name, len(numbers)) for bar in bars),
        depth=tuple(bar.depth for bar in bars),
        module=tuple(bar.module for bar in bars),
        merged=count - len(bars),
    )


def _row_name(row: Row, threads: Mapping[int, str]) -> str:
    if row.device >= 0:
        return f"device {row.device}, stream {row.number}"
    return threads.get(row.number, f"thread {row.number}")


def _note(profile: Profile) -> str:
    if profile.timing is None:
        return "times are as recorded, with the profiler's cost"
    note = (
        "laid out anew: every op with its usual time without the profiler's cost, and pauses in "
        "the proportions in which they were recorded"
    )
    return note if profile.device is None else f"{note}; what ran on the device is as recorded"


# ---- spans ----

_Placed = tuple[Row, Span, str, int, int]  # with name, depth and module


def _all(profile: Profile, placed: list[Span]) -> Iterator[_Placed]:
    depths = _op_depths(profile)
    ranges = list(module_ranges(profile, placed))
    for found in ranges:
        base = depths[found.around] + 1 if found.around >= 0 else 0
        name = clean(found.name.removeprefix(MARK))
        yield Row(-1, found.thread), found.span, name, base + found.depth, found.module
    for op, span, depth in zip(profile.ops, placed, depths, strict=True):
        yield Row(-1, op.thread), span, op_name(op.name), depth, op.module
    if profile.device is not None:
        # A live profile has its calls of another step than its ops.
        if profile.timing is None:
            yield from _runtime(profile, profile.device, ranges, depths)
        yield from _kernels(profile, profile.device)


def _op_depths(profile: Profile) -> list[int]:
    found: list[int] = []
    for op, ranges in zip(profile.ops, range_counts(profile), strict=True):
        found.append(ranges + (found[op.parent] + 1 if op.parent >= 0 else 0))
    return found


def _kernels(profile: Profile, device: Device) -> Iterator[_Placed]:
    for kernel in device.kernels:
        module = profile.ops[kernel.op].module if kernel.op >= 0 else -1
        span = Span(kernel.start_us, kernel.duration_us)
        yield Row(max(kernel.device, 0), kernel.stream), span, clean(kernel.name), 0, module


def _runtime(
    profile: Profile, device: Device, ranges: Iterable[Range], depths: list[int]
) -> Iterator[_Placed]:
    """Calls of the device's runtime: inside their op, or inside the module that made them."""
    around = op_around_calls(profile, device)
    outer: dict[int, list[Range]] = {}
    for found in ranges:
        if found.around < 0:
            outer.setdefault(found.thread, []).append(found)
    for thread, calls in calls_by_thread(device.calls):
        known = sorted(outer.get(thread, ()), key=lambda one: (one.start_us, -one.end_us))
        starts = [device.calls[c].start_us for c in calls]
        inside = innermost([(one.start_us, one.end_us) for one in known], starts)
        for c, at in zip(calls, inside, strict=True):
            depth, module = 0, 0
            if around[c] >= 0:
                depth, module = depths[around[c]] + 1, profile.ops[around[c]].module
            elif at >= 0:
                depth, module = known[at].depth + 1, known[at].module
            call = device.calls[c]
            span = Span(call.start_us, call.duration_us)
            yield Row(-1, thread), span, clean(call.name), depth, module


# ---- too many ----


def thinned(found: Bars, end_ns: int, most: int) -> Bars:
    """At most about `most` spans: neighbours become one, which is as long as all of them."""
    resolution_ns = FIRST_RESOLUTION * end_ns
    shown = found
    while sum(map(len, shown.values())) > most and resolution_ns < end_ns:
        shown = {row: _merged(bars, resolution_ns) for row, bars in found.items()}
        resolution_ns *= 2
    return shown


def _merged(bars: list[Bar], resolution_ns: float) -> list[Bar]:
    """Neighbours of one depth that lie within `resolution_ns` as one."""
    kept: list[Bar] = []
    latest: dict[int, int] = {}  # depth -> the last of that depth in `kept`
    for bar in bars:
        at = latest.get(bar.depth)
        before = kept[at] if at is not None else None
        end_ns = bar.start_ns + bar.busy_ns
        if at is None or before is None or end_ns - before.start_ns > resolution_ns:
            latest[bar.depth] = len(kept)
            kept.append(bar)
            continue
        kept[at] = before._replace(
            busy_ns=before.busy_ns + bar.busy_ns,
            name=before.name if before.name == bar.name else SEVERAL,
            module=before.module if before.module == bar.module else -1,
        )
    return kept
