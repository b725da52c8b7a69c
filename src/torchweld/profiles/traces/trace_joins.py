"""What the events of a trace tell only together: modules, forward threads, allocations.

Plain functions over lists of `Event`s, used by `trace_events.py` while it puts a `Recording`
together.
"""

from __future__ import annotations

import bisect
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from torchweld.profiles.attributing.attribution import ModulePlace
from torchweld.profiles.recorded_events import MARK, MODULE, PYTHON, Event, MemoryEvent, users_frame

# One call in "Module Hierarchy": "layer1(Sequential)::forward". TOP is the model, SELF a method.
_CALL = re.compile(r"(\w+)\(([^()]*)\)::\w+")


@dataclass(frozen=True, kw_only=True, slots=True)
class Instant:
    """An event "[memory]": "Bytes" are above 0 for an allocation at "Addr", below for its end."""

    time_us: float
    thread: int
    address: int
    bytes: int
    on_device: bool


def modules_of_hierarchies(
    ops: Iterable[tuple[Event, str]],
) -> tuple[list[Event], list[ModulePlace]]:
    """Module calls from the "Module Hierarchy" that `with_modules` gave ops of scripted models.

    A call lasts from the first op that names it to the last before another is named. Two
    consecutive calls of one module cannot be told apart, and count as one.
    """
    by_thread: dict[int, list[tuple[Event, str]]] = defaultdict(list)
    for event, text in ops:
        by_thread[event.thread].append((event, text))
    found: list[Event] = []
    kinds: dict[str, str] = {}
    for thread, pairs in by_thread.items():
        current: list[Event] = []
        for event, text in sorted(pairs, key=lambda pair: pair[0].start_us):
            paths: list[str] = []
            for name, kind in _CALL.findall(text):
                if name not in ("TOP", "SELF"):
                    paths.append(f"{paths[-1]}.{name}" if paths else name)
                    kinds.setdefault(paths[-1], kind)
            same = 0
            while same < min(len(paths), len(current)) and current[same].name == paths[same]:
                same += 1
            del current[same:]
            for path in paths[same:]:
                start, end = event.start_us, event.end_us
                call = Event(name=path, kind=MODULE, start_us=start, end_us=end, thread=thread)
                current.append(call)
                found.append(call)
            for call in current:
                call.end_us = max(call.end_us, event.end_us)
    return found, [ModulePlace(path=path, kind=kind) for path, kind in kinds.items()]


def modules_of_stacks(events: list[Event]) -> list[ModulePlace]:
    """Turns the Python events "nn.Module: Linear_0" of `with_stack` into module calls, in place.

    Such a name has the class and the number of the instance, so a path is one of these: what is
    called inside "MLP_0" is "MLP_0.Linear_0". If there are ranges with real paths, nothing is
    changed.
    """
    if any(event.kind == MODULE for event in events):
        return []
    kinds: dict[str, str] = {}
    around: list[str] = []  # path of the innermost module, the event itself included
    for event in events:
        path = around[event.parent] if event.parent >= 0 else ""
        if event.kind == PYTHON and event.name.startswith(MARK):
            own = event.name[len(MARK) :].replace(".", "_")
            path = f"{path}.{own}" if path else own
            event.kind, event.name = MODULE, path
            kinds.setdefault(path, re.sub(r"_\d+$", "", own))
        around.append(path)
    return [ModulePlace(path=path, kind=kind) for path, kind in kinds.items()]


def name_frames(events: list[Event]) -> None:
    """Gives each op the innermost Python function around it that is the user's, if any is known."""
    if not any(event.kind == PYTHON for event in events):
        return
    around: list[str] = []
    for event in events:
        where = around[event.parent] if event.parent >= 0 else ""
        if event.kind == PYTHON:
            where = users_frame(event.name) or where
        event.where = where
        around.append(where)


def join_forward_threads(events: list[Event]) -> None:
    """Replaces torch's "Fwd thread id" of backward nodes by the number of the thread.

    The trace does not say which thread has which id. It is the thread whose ops have most of the
    sequence numbers that the nodes with this id ask for.
    """
    wanted: dict[int, set[int]] = defaultdict(set)  # "Fwd thread id" -> sequence numbers
    given: dict[int, set[int]] = defaultdict(set)  # thread -> sequence numbers
    nodes: list[Event] = []
    for event in events:
        if event.sequence >= 0:
            if event.forward_thread >= 0:
                wanted[event.forward_thread].add(event.sequence)
                nodes.append(event)
            else:
                given[event.thread].add(event.sequence)
    threads = {
        number: max(given, key=lambda thread: len(given[thread] & sequences), default=0)
        for number, sequences in wanted.items()
    }
    for node in nodes:
        node.forward_thread = threads[node.forward_thread]


def allocations_of(
    instants: list[Instant], events: list[Event], origin_us: float
) -> list[MemoryEvent]:
    """Allocations in order of time; if there are any on a device, only those.

    The events begin at `origin_us` of the instants' clock.
    """
    only_device = any(instant.on_device for instant in instants)
    starts: dict[int, tuple[list[float], list[int]]] = defaultdict(lambda: ([], []))
    if instants:
        for i, event in enumerate(events):
            times, indices = starts[event.thread]
            times.append(event.start_us)
            indices.append(i)
    found: list[MemoryEvent] = []
    alive: dict[int, int] = {}  # address -> number of the allocation
    count = 0
    for instant in sorted(instants, key=lambda instant: instant.time_us):
        if only_device and not instant.on_device:
            continue
        if instant.bytes > 0:
            storage = alive[instant.address] = count
            count += 1
        else:
            before = alive.pop(instant.address, None)
            if before is None:  # it was there before the recording
                continue
            storage = before
        time_us = instant.time_us - origin_us
        times, indices = starts[instant.thread]
        at = bisect.bisect_right(times, time_us) - 1
        around = indices[at] if at >= 0 else -1
        while around >= 0 and events[around].end_us < time_us:
            around = events[around].parent
        found.append(
            MemoryEvent(time_us=time_us, storage=storage, bytes=instant.bytes, event=around)
        )
    return found
