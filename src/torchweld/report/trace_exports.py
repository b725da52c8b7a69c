"""Profiles for other tools: chrome traces (Perfetto), folded stacks, speedscope.

In: a `Profile`. Out: dicts ready for `json.dumps`, or text. Fractions of a microsecond are kept
everywhere. `trace_timeline.py` says where the events of a chrome trace lie, `flame_stacks.py` what
the frames of a flame graph weigh.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchweld.core.not_measured import NotMeasured
from torchweld.core.records import to_plain
from torchweld.core.safe_text import clean
from torchweld.profiles.profile import Device, Op, Profile, Tensor
from torchweld.profiles.traces.trace_stream import MACHINE_KEY
from torchweld.profiles.traces.trace_tensors import TYPE_NAMES
from torchweld.report.flame_stacks import Frame, device_frames, host_frames, top_name
from torchweld.report.trace_timeline import (
    Range,
    Span,
    is_node,
    module_ranges,
    spans,
    thread_names,
)

SPEEDSCOPE_SCHEMA = "https://www.speedscope.app/file-format-schema.json"

HOST = 1  # the process that stands for the host; devices follow
STEP = "ProfilerStep#0"


# ---- flame graphs ----


def folded(profile: Profile) -> str:
    """Lines `frame;frame;frame nanoseconds`, as flamegraph.pl and similar tools read them.

    Whole nanoseconds, since those tools want whole numbers; lines are rounded so that they add up
    to the rounded sum. With a device, its kernels follow under a separate frame.
    """
    device = device_frames(profile)
    tops = [host_frames(profile)] if device is None else [host_frames(profile), device]
    prefixes = [""] if device is None else ["host;", "device;"]
    lines: list[str] = []
    for prefix, top in zip(prefixes, tops, strict=True):
        passed_us, given_ns = 0.0, 0
        for stack, weight_us in top.walk():
            passed_us += weight_us
            weight_ns = round(passed_us * 1e3) - given_ns
            given_ns += weight_ns
            if weight_ns:
                lines.append(prefix + ";".join(map(_unseparated, stack)) + f" {weight_ns}")
    return "".join(f"{line}\n" for line in lines)


def _unseparated(name: str) -> str:
    return name.replace(";", ",") or "?"


def speedscope(profile: Profile) -> dict[str, Any]:
    """A file for speedscope.app: a sampled profile in µs, another one for the device if any."""
    numbers: dict[str, int] = {}
    profiles = [_sampled(host_frames(profile), "host", numbers)]
    device = device_frames(profile)
    if device is not None:
        profiles.append(_sampled(device, "device", numbers))
    return {
        "$schema": SPEEDSCOPE_SCHEMA,
        "name": top_name(profile),
        "exporter": "torchweld",
        "activeProfileIndex": 0,
        "shared": {"frames": [{"name": name} for name in numbers]},
        "profiles": profiles,
    }


def _sampled(top: Frame, name: str, numbers: dict[str, int]) -> dict[str, Any]:
    samples: list[list[int]] = []
    weights: list[float] = []
    for stack, weight_us in top.walk():
        samples.append([numbers.setdefault(frame, len(numbers)) for frame in stack])
        weights.append(weight_us)
    return {
        "type": "sampled",
        "name": name,
        "unit": "microseconds",
        "startValue": 0,
        "endValue": sum(weights),
        "samples": samples,
        "weights": weights,
    }


# ---- chrome trace ----


def chrome_trace(profile: Profile) -> dict[str, Any]:
    """A trace in the form torch.profiler writes: Perfetto opens it, `tw.read_trace` reads it.

    A live step is shown on the corrected time axis, a trace as it was recorded. What is known of
    the machine is included: without its peaks nothing could be priced.
    """
    placed = spans(profile)
    events = _rows(profile)
    end_us = max((span.start_us + span.duration_us for span in placed), default=0.0)
    if profile.about.source == "live":
        recorded_us = profile.timing.corrected_us if profile.timing else profile.step_us
        length = end_us if isinstance(recorded_us, NotMeasured) else max(end_us, recorded_us)
        events.append(_event(STEP, "user_annotation", HOST, 0, Span(0.0, length)))
    events += [_module_event(found) for found in module_ranges(profile, placed)]
    forward = _forward_threads(profile.ops)
    for i, (op, span) in enumerate(zip(profile.ops, placed, strict=True)):
        events.append(_op_event(i, op, span, profile, forward))
    if profile.device is not None:
        events += _device_events(profile.device)
    trace: dict[str, Any] = {
        "schemaVersion": 1,
        "displayTimeUnit": "ms",
        "traceName": top_name(profile),
        "deviceProperties": _properties(profile.device),
        MACHINE_KEY: to_plain(profile.machine),
        "traceEvents": events,
    }
    if profile.about.rank is not None:
        trace["distributedInfo"] = {"rank": profile.about.rank}
    return trace


def _event(
    name: str, category: str, pid: int, tid: int, span: Span, **args: object
) -> dict[str, Any]:
    # Whole nanoseconds, so that events which end together still do in the file.
    start_ns, end_ns = round(span.start_us * 1e3), round(span.end_us * 1e3)
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": pid,
        "tid": tid,
        "ts": start_ns / 1e3,
        "dur": (end_ns - start_ns) / 1e3,
        "args": args,
    }


def _meta(what: str, pid: int, tid: int, **args: object) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "ts": 0, "args": args}


def _rows(profile: Profile) -> list[dict[str, Any]]:
    """The names of processes and threads."""
    found = [
        _meta("process_name", HOST, 0, name="host"),
        _meta("process_labels", HOST, 0, labels="CPU"),
    ]
    for thread, name in thread_names(profile).items():
        found.append(_meta("thread_name", HOST, thread, name=name))
    kernels = profile.device.kernels if profile.device is not None else ()
    for device in sorted({kernel.device for kernel in kernels}):
        found.append(_meta("process_name", _device_pid(device), 0, name=f"device {device}"))
        found.append(_meta("process_labels", _device_pid(device), 0, labels=f"GPU {device}"))
    for device, stream in sorted({(kernel.device, kernel.stream) for kernel in kernels}):
        name = f"stream {stream}"
        found.append(_meta("thread_name", _device_pid(device), stream, name=name))
    return found


def _device_pid(device: int) -> int:
    return HOST + 1 + max(device, 0)


def _properties(device: Device | None) -> list[dict[str, Any]]:
    if device is None:
        return []
    numbers = sorted({kernel.device for kernel in device.kernels}) or [0]
    return [{"id": number, "name": device.name} for number in numbers]


def _module_event(found: Range) -> dict[str, Any]:
    return _event(clean(found.name), "user_annotation", HOST, found.thread, found.span)


def _forward_threads(ops: Sequence[Op]) -> dict[int, int]:
    """Sequence number -> the thread of the forward op that has it."""
    return {op.sequence: op.thread for op in ops if op.sequence >= 0 and op.phase != "backward"}


def _op_event(
    index: int, op: Op, span: Span, profile: Profile, forward: dict[int, int]
) -> dict[str, Any]:
    args: dict[str, object] = {
        "External id": index + 1,
        "Record function id": index + 1,
        "module": clean(profile.modules[op.module].path),
        "phase": op.phase,
        "self µs, corrected": op.self_us,
    }
    if op.where:
        args["where"] = clean(op.where)
    if op.sequence >= 0:
        args["Sequence number"] = op.sequence
        args["Fwd thread id"] = forward.get(op.sequence, op.thread) + 1 if is_node(op) else 0
    if op.inputs:
        args["Input Dims"] = [list(t.shape) if t is not None else [] for t in op.inputs]
        args["Input type"] = [_trace_dtype(t) for t in op.inputs]
        if all(t is None or t.strides is not None for t in op.inputs):
            args["Input Strides"] = [list(t.strides or ()) if t else [] for t in op.inputs]
    return _event(clean(op.name), "cpu_op", HOST, op.thread, span, **args)


def _trace_dtype(tensor: Tensor | None) -> str:
    return TYPE_NAMES.get(tensor.dtype, tensor.dtype) if tensor is not None else ""


def _device_events(device: Device) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    for i, call in enumerate(device.calls):
        span = Span(call.start_us, call.duration_us)
        events.append(
            _event(clean(call.name), "cuda_runtime", HOST, call.thread, span, correlation=i + 1)
        )
    for kernel in device.kernels:
        category = {"copy": "gpu_memcpy", "set": "gpu_memset"}.get(kernel.category, "kernel")
        args: dict[str, object] = {"device": kernel.device, "stream": kernel.stream}
        if kernel.launch >= 0:
            args["correlation"] = kernel.launch + 1
        if kernel.op >= 0:
            args["External id"] = kernel.op + 1
        span = Span(kernel.start_us, kernel.duration_us)
        pid = _device_pid(kernel.device)
        events.append(_event(clean(kernel.name), category, pid, kernel.stream, span, **args))
        if kernel.launch >= 0:
            call = device.calls[kernel.launch]
            flow = {"cat": "ac2g", "name": "ac2g", "id": kernel.launch + 1}
            events.append({**flow, "ph": "s", "pid": HOST, "tid": call.thread, "ts": call.start_us})
            events.append(
                {
                    **flow,
                    "ph": "f",
                    "bp": "e",
                    "pid": pid,
                    "tid": kernel.stream,
                    "ts": kernel.start_us,
                }
            )
    return events
