"""Turns the raw events of a chrome trace into a `Recording`. Every rule names the field it reads.

What cannot be used (an event without a time, a phase that torch does not write, a cut or damaged
rest) is skipped, counted, and mentioned in the recording's notices.
"""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path
from typing import Any

from torchweld.core.errors import TorchweldError
from torchweld.profiles.accounting.device_account import link
from torchweld.profiles.attributing.attribution import ModulePlace
from torchweld.profiles.recorded_events import (
    ANNOTATION,
    KERNEL,
    MARK,
    MEMCPY,
    MEMSET,
    MODULE,
    OP,
    PYTHON,
    RUNTIME,
    STEP,
    STEP_MARK,
    SYNC,
    Event,
    Recording,
    nest,
)
from torchweld.profiles.traces.trace_joins import (
    Instant,
    allocations_of,
    join_forward_threads,
    modules_of_hierarchies,
    modules_of_stacks,
    name_frames,
)
from torchweld.profiles.traces.trace_stream import TraceStream
from torchweld.profiles.traces.trace_tensors import InputReader

# "cat" of an event -> what it is; names of older releases and of other devices too. What is neither
# here nor in IGNORED is counted in a notice.
KINDS = {
    **dict.fromkeys(("cpu_op", "Operator"), OP),
    "user_annotation": ANNOTATION,
    "python_function": PYTHON,
    **dict.fromkeys(("cuda_runtime", "cuda_driver", "Runtime", "hip_runtime"), RUNTIME),
    **dict.fromkeys(("xpu_runtime", "xpu_driver"), RUNTIME),
    **dict.fromkeys(("privateuse1_runtime", "privateuse1_driver"), RUNTIME),
    **dict.fromkeys(("kernel", "Kernel"), KERNEL),
    **dict.fromkeys(("gpu_memcpy", "Memcpy"), MEMCPY),
    **dict.fromkeys(("gpu_memset", "Memset"), MEMSET),
    **dict.fromkeys(("cuda_sync", "xpu_sync", "cuda_event"), SYNC),
}
# The recording's own span, copies of host annotations on the device, the profiler's own work.
IGNORED = frozenset({"Trace", "gpu_user_annotation", "overhead", "cuda_profiler_range"})
# "ph" of an event: names and places on the screen, arrows, marks, counters. "X" is what counts.
SILENT_PHASES = frozenset({"M", "i", "I", "s", "t", "f", "C"})

# µs. No real time is further from the first event than this.
FOREVER = 1e18
# What reading a malformed event raises.
_UNUSABLE = (KeyError, TypeError, ValueError, AttributeError, ArithmeticError)


def read_recording(path: str | os.PathLike[str]) -> Recording:
    """The events of a trace, nested, and otherwise as they were recorded."""
    with without_garbage_collection():
        return TraceReader(Path(path)).read()


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Turns garbage collection off: nothing here makes cycles, and a search takes long."""
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            # New objects go to the old generation at once, instead of being searched as young ones.
            # Not if the user has frozen objects: this would unfreeze them.
            if gc.get_freeze_count() == 0:
                gc.freeze()
                gc.unfreeze()
            gc.enable()


class _Numbers(dict[tuple[Any, ...], int]):
    """Numbers keys in the order in which they occur."""

    def __missing__(self, key: tuple[Any, ...]) -> int:
        number = self[key] = len(self)
        return number


class TraceReader:
    """Reads one file."""

    def __init__(self, path: Path) -> None:
        self.stream = TraceStream(path)
        self.places: list[ModulePlace] = []  # of the modules, where the trace tells their classes
        self.hosts: list[Event] = []
        self.calls: list[Event] = []  # of the runtime
        self.on_device: list[Event] = []
        self.instants: list[Instant] = []
        self.hierarchies: list[tuple[Event, str]] = []
        self.threads = _Numbers()  # and streams
        self.names: dict[str, str] = {}  # one object for each name
        self.inputs = InputReader()
        self.origin: int | None = None
        self.named = False  # there are module calls with names of their own
        self.count = self.malformed = 0
        self.categories: Counter[str] = Counter()
        self.phases: Counter[str] = Counter()

    def read(self) -> Recording:
        add = self._add
        for raw in self.stream:
            self.count += 1
            try:
                add(raw)
            except _UNUSABLE:
                self.malformed += 1
        self._refuse_what_is_no_trace()
        modules, self.places = modules_of_hierarchies(() if self.named else self.hierarchies)
        # If two events have the same interval, the later is inside: a runtime call in its op.
        events = _sorted([*modules, *self.hosts, *self.calls, *self.on_device])
        origin_us = _shift_to_first_step(events)
        nest(events)
        if self.named:
            self.places += modules_of_stacks(events)
        name_frames(events)
        join_forward_threads(events)
        group = self.stream.header.get("distributedInfo")
        group = group if isinstance(group, dict) else {}
        recording = Recording(
            events=events,
            allocations=allocations_of(self.instants, events, origin_us),
            device_names=_device_names(self.stream.header.get("deviceProperties")),
            rank=_whole(group.get("rank"), None),
            notices=self._notices(),
        )
        link(recording)
        return recording

    # ---- one event ----

    def _add(self, raw: Any) -> None:
        phase = raw["ph"]
        if phase != "X":
            if phase not in SILENT_PHASES:
                self.phases[phase] += 1
            elif phase == "i" and raw["name"] == "[memory]":
                self._add_instant(raw)
            return
        category = raw["cat"]
        kind = KINDS.get(category)
        if kind is None:
            if category not in IGNORED:
                self.categories[str(category)] += 1
            return
        name = raw["name"]
        if type(name) is not str:
            raise TypeError
        name = self.names.setdefault(name, name)
        start_us = self._since_first(raw["ts"])
        # "- 0" instead of float(): a string is not a number, even if it consists of digits.
        end_us = start_us + float(raw["dur"] - 0)
        if not -FOREVER < start_us <= end_us < FOREVER:
            raise ValueError
        arguments = raw.get("args") or {}
        if kind is OP or kind is ANNOTATION or kind is PYTHON:
            self._add_host(raw, name, kind, start_us, end_us, arguments)
            return
        event = Event(
            name=name,
            kind=kind,
            start_us=start_us,
            end_us=end_us,
            correlation=_whole(arguments.get("correlation")),
        )
        if kind is RUNTIME:
            event.thread = self.threads[raw["pid"], raw["tid"]]
            self.calls.append(event)
        else:
            event.device = _whole(arguments.get("device", raw["pid"]))
            event.stream = _whole(arguments.get("stream", raw["tid"]))
            event.thread = self.threads["device", event.device, event.stream]
            self.on_device.append(event)

    def _add_host(
        self, raw: Any, name: str, kind: str, start_us: float, end_us: float, arguments: Any
    ) -> None:
        if name.startswith(MARK):
            self.named = True
            if kind is not PYTHON:
                kind, name = MODULE, name[len(MARK) :]
        elif kind is not PYTHON and (name.startswith("ProfilerStep") or name == STEP_MARK):
            kind = STEP
        event = Event(
            name=name,
            kind=kind,
            start_us=start_us,
            end_us=end_us,
            thread=self.threads[raw["pid"], raw["tid"]],
        )
        if kind is OP:
            if "Sequence number" in arguments:
                event.sequence = _whole(arguments["Sequence number"])
                # 0 on forward ops: torch counts threads from 1.
                event.forward_thread = _whole(arguments.get("Fwd thread id")) or -1
            if "Input Dims" in arguments:
                event.inputs = self.inputs(arguments)
            if hierarchy := arguments.get("Module Hierarchy"):
                self.hierarchies.append((event, str(hierarchy)))
        self.hosts.append(event)

    def _add_instant(self, raw: Any) -> None:
        arguments = raw["args"]
        time_us = self._since_first(raw["ts"])
        if not -FOREVER < time_us < FOREVER:
            raise ValueError
        self.instants.append(
            Instant(
                time_us=time_us,
                thread=self.threads[raw["pid"], raw["tid"]],
                address=int(arguments["Addr"]),
                bytes=_bounded(int(arguments["Bytes"])),
                on_device=arguments.get("Device Type", 0) != 0,
            )
        )

    def _since_first(self, ts: Any) -> float:
        """µs since the first event. Whole numbers are subtracted before anything is rounded."""
        if self.origin is None:
            if not -FOREVER < ts < FOREVER:
                raise ValueError
            self.origin = int(ts)
        return float(ts - self.origin)

    # ---- what to say ----

    def _refuse_what_is_no_trace(self) -> None:
        path, damage = self.stream.path, self.stream.damage
        if not self.stream.is_trace:
            if damage is not None:
                raise TorchweldError(
                    f"{path} is damaged before its first event, {damage}; export the trace again"
                )
            raise TorchweldError(
                f'{path} is JSON, but not a trace: it has no list "traceEvents"; give a file that '
                "torch.profiler exported"
            )
        if self.hosts or self.calls or self.on_device:
            return
        if damage is not None:
            raise TorchweldError(f"no event of {path} can be read: it is damaged {damage}")
        if self.count == 0:
            raise TorchweldError(
                f"{path} is a trace with no events; the profiler ran while nothing else did"
            )
        raise TorchweldError(
            f"none of the {self.count:,} events of {path} is one that torch.profiler writes: "
            'complete ("ph": "X"), of a category such as "cpu_op" or "kernel"'
            + "".join(f"; {notice}" for notice in self._notices())
        )

    def _notices(self) -> list[str]:
        found = []
        if self.stream.damage is not None:
            found.append(
                f"only a part of the trace could be read, its first {self.count:,} events; it is "
                f"damaged {self.stream.damage}"
            )
        if self.malformed:
            found.append(
                f"{self.malformed:,} events were skipped: name, category, time, duration or place "
                "is missing or invalid"
            )
        if self.phases:
            found.append(
                f"{self.phases.total():,} events were skipped, of phases that torch.profiler does "
                f"not write: {_listed(self.phases)}; it writes complete events ('X')"
            )
        if self.categories:
            found.append(
                f"{self.categories.total():,} events were skipped, of categories that say nothing "
                f"about time here: {_listed(self.categories)}"
            )
        if self.inputs.unreadable:
            found.append(f"{self.inputs.unreadable:,} ops have shapes that cannot be read")
        if self.stream.replaced:
            found.append(f"{self.stream.replaced:,} characters are not UTF-8 and were replaced")
        return found


def _listed(counts: Counter[str]) -> str:
    shown = [f"{name!r} ({count:,})" for name, count in counts.most_common(5)]
    return ", ".join(shown) + (", and others" if len(counts) > 5 else "")


def _sorted(events: list[Event]) -> list[Event]:
    """Events by thread, then by start, then the longest first. Ties keep their order."""
    events.sort(key=attrgetter("end_us"), reverse=True)
    events.sort(key=attrgetter("start_us"))
    events.sort(key=attrgetter("thread"))
    return events


def _shift_to_first_step(events: list[Event]) -> float:
    """Counts time from the first step, or from the first event where there are no steps."""
    origin_us = next((event.start_us for event in events if event.kind == STEP), None)
    if origin_us is None:
        origin_us = min(event.start_us for event in events)
    for event in events:
        event.start_us -= origin_us
        event.end_us -= origin_us
    return origin_us


def _whole(value: object, otherwise: Any = -1) -> Any:
    """A number that can be an id; torch writes 2**64 - 1 for none."""
    return value if type(value) is int and 0 <= value < 1 << 63 else otherwise


def _bounded(value: int) -> int:
    if abs(value) >= 1 << 63:
        raise ValueError(value)
    return value


def _device_names(properties: object) -> dict[int, str]:
    """ "id" and "name" of each of the "deviceProperties"."""
    rows = properties if isinstance(properties, list) else []
    return {
        row["id"]: row["name"]
        for row in rows
        if isinstance(row, dict) and type(row.get("id")) is int and type(row.get("name")) is str
    }
