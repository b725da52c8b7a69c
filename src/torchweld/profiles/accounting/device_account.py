"""The device's account: what ran on it, what it waited for, and which op launched it.

In: a `Recording`. Out: `Device`, or None when nothing ran on a device. Each rule says which field
of an event it reads. All figures but the lists cover **whole steps**: if the recording has more
than one step, launches from the start of the last one on are left out, because the profiler is
stopped inside that step (it waits for the device and collects its buffers).
"""

from __future__ import annotations

import bisect
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from operator import attrgetter

from torchweld.profiles.accounting.device_peaks import peaks_of
from torchweld.profiles.attributing.kernel_names import NOT_COMPUTING, category_of, ops_inside
from torchweld.profiles.profile import Device, Gap, Kernel, Op, RuntimeCall, Tensor
from torchweld.profiles.recorded_events import KERNEL, ON_DEVICE, RUNTIME, STEP, Event, Recording

Span = tuple[float, float]
Inputs = tuple[Tensor | None, ...]

# Calls in which the host waits until the device is done, by "name".
_WAITS = re.compile(r"Synchronize|^(cuda|hip)Memcpy$|^hipMemcpyWithStream$")


def link(recording: Recording) -> None:
    """Joins what ran on the device with the calls and the ops that launched it, in place.

    Sets `launch` of device events. If a kernel was launched inside an op, the op's inputs are
    marked as on a device. A trace does not tell where a tensor is; inputs of ops that launch
    nothing (views, or work of the host) keep "cpu".
    """
    events = recording.events
    # "correlation" is the same for a call and for what it put on the device; 0 stands for none.
    calls: dict[int, list[int]] = defaultdict(list)
    for i, event in enumerate(events):
        if event.kind == RUNTIME and event.correlation > 0:
            calls[event.correlation].append(i)
    computing: set[int] = set()
    for event in events:
        if event.kind in ON_DEVICE:
            around = event.launch = _launch(event, calls.get(event.correlation, ()), events)
            while around >= 0 and event.kind == KERNEL and around not in computing:
                computing.add(around)
                around = events[around].parent
    # Keys are ids, since hashing shapes takes longer. The originals are kept, so ids stay valid.
    moved: dict[int, tuple[Inputs, Inputs]] = {}
    for i in computing:
        inputs = events[i].inputs
        if inputs:
            if id(inputs) not in moved:
                on_device = (tensor and replace(tensor, device="cuda") for tensor in inputs)
                moved[id(inputs)] = inputs, tuple(on_device)
            events[i].inputs = moved[id(inputs)][1]


def device_account(recording: Recording, op_of: Sequence[int] | None = None) -> Device | None:
    """What the device did. `op_of[i]` is the number of the op around event i, -1 for none."""
    ran = _ran(recording)
    if not ran:
        return None
    events = recording.events
    calls = [i for i, event in enumerate(events) if event.kind == RUNTIME]
    number = {i: n for n, i in enumerate(calls)}
    kernels = tuple(
        Kernel(
            name=event.name,
            category=category_of(event.name, event.kind),
            start_us=event.start_us,
            duration_us=event.duration_us,
            device=event.device,
            stream=event.stream,
            launch=number.get(event.launch, -1),
            op=op_of[event.launch] if op_of is not None and event.launch >= 0 else -1,
            inside=ops_inside(event.name) if event.kind == KERNEL else (),
        )
        for event in ran
    )
    until_us = None
    if (steps := step_count(recording)) > 1:
        until_us = max(event.start_us for event in events if event.kind == STEP)
        steps -= 1
    # A kernel belongs to the step that launched it ("ts" of the call), wherever it ran.
    counted = [
        i
        for i, event in enumerate(ran)
        if _before(events[event.launch] if event.launch >= 0 else event, until_us)
    ]
    busy = covered(_span(ran[i]) for i in counted)
    computing = covered(_span(ran[i]) for i in counted if kernels[i].category not in NOT_COMPUTING)
    span_us = busy[-1][1] - busy[0][0] if busy else 0.0
    busy_us, compute_us = _length(busy), _length(computing)
    launched_us: dict[int, float] = defaultdict(float)  # runtime call -> µs on the device
    for i in counted:
        if ran[i].launch >= 0:
            launched_us[ran[i].launch] += ran[i].duration_us
    queries = [
        events[i].duration_us
        for i in calls
        if "Occupancy" in events[i].name and _before(events[i], until_us)
    ]
    name = _name(recording, kernels)
    peak_gflops, peak_gbps = peaks_of(name)
    return Device(
        name=name,
        span_us=span_us,
        idle_us=max(0.0, span_us - busy_us),
        compute_us=compute_us,
        non_compute_us=max(0.0, busy_us - compute_us),
        launches=len(launched_us),
        launch_us=sum(events[i].duration_us for i in launched_us),
        launched_us=sum(launched_us.values()),
        occupancy_queries=len(queries),
        occupancy_query_us=sum(queries),
        by_category=_totals((kernels[i].category, kernels[i]) for i in counted),
        by_stream=_totals(
            (f"device {kernels[i].device} stream {kernels[i].stream}", kernels[i]) for i in counted
        ),
        kernels=kernels,
        calls=tuple(
            RuntimeCall(
                name=event.name,
                start_us=event.start_us,
                duration_us=event.end_us - event.start_us,
                thread=event.thread,
            )
            for event in map(events.__getitem__, calls)
        ),
        gaps=tuple(_gaps(busy, [kernels[i] for i in counted], events, calls)),
        peak_gflops=peak_gflops,
        peak_gbps=peak_gbps,
        steps=steps,
        until_us=until_us,
    )


def with_kernels(ops: Sequence[Op], device: Device | None) -> tuple[Op, ...]:
    """The ops, each with the kernels that it launched itself."""
    result = list(ops)
    launched: dict[int, list[int]] = defaultdict(list)
    for number, kernel in enumerate(device.kernels if device is not None else ()):
        if kernel.op >= 0:
            launched[kernel.op].append(number)
    for i, numbers in launched.items():
        result[i] = replace(ops[i], kernels=tuple(numbers))
    return tuple(result)


def covered(spans: Iterable[Span]) -> list[Span]:
    """The times that at least one span covers, in order, merged where they touch."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            if end > merged[-1][1]:
                merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return merged


def step_count(recording: Recording) -> int:
    """Steps by "name": ProfilerStep#1009. Several ranks in one file have the same ones."""
    return len(step_starts(recording))


def step_starts(recording: Recording) -> tuple[float, ...]:
    """The "ts" of each step, in order; of several with one name, the first."""
    found: dict[str, float] = {}
    for event in recording.events:
        if event.kind == STEP:
            found[event.name] = min(event.start_us, found.get(event.name, event.start_us))
    return tuple(sorted(found.values()))


def _ran(recording: Recording) -> list[Event]:
    """What ran on the device, by start: `Device.kernels` has the same order."""
    ran = [event for event in recording.events if event.kind in ON_DEVICE]
    ran.sort(key=attrgetter("start_us", "end_us"))
    return ran


def _launch(event: Event, candidates: Sequence[int], events: Sequence[Event]) -> int:
    """The call that launched a kernel: of several with one number, the last one before the kernel.

    If a call is inside another with the same number, the outer one.
    """
    if len(candidates) < 2:
        return candidates[0] if candidates else -1
    before = [i for i in candidates if events[i].start_us <= event.start_us] or candidates
    found = max(before, key=lambda i: events[i].start_us)
    while events[found].parent in candidates:
        found = events[found].parent
    return found


def _gaps(
    busy: Sequence[Span], kernels: Sequence[Kernel], events: Sequence[Event], calls: Sequence[int]
) -> Iterator[Gap]:
    """The intervals in which nothing ran, and why.

    If the call that launched what ran next began ("ts") after the gap did, the host was late; if
    its thread was in a call that waits for the device, a synchronisation made it late. If the call
    began before the gap, the device itself was not ready, for a copy or for a kernel.
    """
    first_at: dict[float, Kernel] = {}
    for kernel in kernels:
        first_at.setdefault(kernel.start_us, kernel)
    waits: dict[int, list[Span]] = defaultdict(list)
    for i in calls:
        if _WAITS.search(events[i].name):
            waits[events[i].thread].append(_span(events[i]))
    for (_, start_us), (end_us, _) in pairwise(busy):
        kernel = first_at[end_us]
        launch = events[calls[kernel.launch]] if kernel.launch >= 0 else None
        if launch is None:
            cause = "unknown"
        elif launch.start_us > start_us:
            on_thread = waits[launch.thread]
            last = bisect.bisect_left(on_thread, (launch.start_us,)) - 1
            waited = last >= 0 and on_thread[last][1] > start_us
            cause = "synchronisation" if waited else "host wait"
        else:
            cause = "copy" if kernel.category == "copy" else "kernel wait"
        yield Gap(
            start_us=start_us,
            duration_us=end_us - start_us,
            cause=cause,
            before=kernel.name,
            op=kernel.op,
        )


def _name(recording: Recording, kernels: Sequence[Kernel]) -> str:
    """ "name" of the "deviceProperties" of each device that ran something."""
    used = sorted({kernel.device for kernel in kernels})
    names = [recording.device_names[i] for i in used if i in recording.device_names]
    return " + ".join(dict.fromkeys(names))


def _totals(pairs: Iterable[tuple[str, Kernel]]) -> dict[str, tuple[int, float]]:
    """Count and µs by key, the longest first."""
    found: dict[str, tuple[int, float]] = {}
    for key, kernel in pairs:
        count, us = found.get(key, (0, 0.0))
        found[key] = (count + 1, us + kernel.duration_us)
    return dict(sorted(found.items(), key=lambda item: -item[1][1]))


def _before(event: Event, until_us: float | None) -> bool:
    return until_us is None or event.start_us < until_us


def _span(event: Event) -> Span:
    return event.start_us, event.end_us


def _length(spans: Iterable[Span]) -> float:
    return sum(end - start for start, end in spans)
