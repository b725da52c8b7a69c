"""`tw.read_trace`: the profile of a chrome trace that torch.profiler wrote.

Any release from 1.13 on, NVIDIA, AMD or CPU only, with or without steps, ranks, stacks and module
events; `.json` or `.json.gz`, told apart by content. A cut or damaged file gives what is whole, and
a notice. See docs/traces.md for the rules.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

from torchweld.core.argument_checks import check_flags, check_path
from torchweld.core.errors import TorchweldError
from torchweld.core.records import RecordError, from_plain
from torchweld.profiles.accounting.device_account import (
    covered,
    device_account,
    step_count,
    step_starts,
    with_kernels,
)
from torchweld.profiles.accounting.memory_account import memory_account
from torchweld.profiles.attributing.attribution import ModulePlace, attribute
from torchweld.profiles.profile import About, Machine, Profile
from torchweld.profiles.recorded_events import ON_DEVICE, STEP, Recording
from torchweld.profiles.recording.pricing_machine import this_machine
from torchweld.profiles.step_faults import IN_TRACE
from torchweld.profiles.traces.trace_events import TraceReader, without_garbage_collection
from torchweld.profiles.traces.trace_stream import MACHINE_KEY


def read_trace(path: str | os.PathLike[str], *, this_machine: bool = False) -> Profile:
    """The profile of everything in the file; raises TorchweldError if it is not a trace.

    `this_machine=True` says that the trace was recorded here, on the CPU alone: it is priced with
    this machine's peaks, which are measured if they are not known yet.
    """
    check_path("read_trace", path)
    check_flags("read_trace", this_machine=this_machine)
    with without_garbage_collection():
        reader = TraceReader(Path(path))
        recording = reader.read()
        machine = _machine(reader.stream.header.get(MACHINE_KEY), recording.notices)
        if this_machine:
            machine = _here(machine, recording, Path(path).name)
        return _profile_of(recording, reader.places, machine, Path(path).name)


def _machine(data: object, notices: list[str]) -> Machine:
    """The machine that a trace was taken on, if torchweld exported it; others do not tell."""
    if data is None:
        return Machine()
    try:
        return from_plain(Machine, _with_floats(data), MACHINE_KEY)
    except RecordError as error:
        notices.append(f"what the trace says of its machine cannot be read: {error}")
        return Machine()


def _here(told: Machine, recording: Recording, name: str) -> Machine:
    """This machine; refused if the trace says that it was recorded elsewhere."""
    if any(event.kind in ON_DEVICE for event in recording.events):
        raise TorchweldError(
            f"{name} has kernels of a device, and peaks of devices are only known by name; "
            "this_machine (--this-machine) goes with a trace of a CPU alone"
        )
    here = this_machine(recording.notices)
    if told.cpu and (told.cpu, told.threads) != (here.cpu, here.threads):
        raise TorchweldError(
            f"{name} says that it was recorded on {told.cpu} with {told.threads} threads, and this "
            f"is {here.cpu} with {here.threads}; read it without this_machine (--this-machine)"
        )
    recording.notices.append(
        f"priced as if recorded on this machine, {here.cpu} with {here.threads} threads, because "
        "that was asked for; the trace itself does not tell"
    )
    return here


def _with_floats(data: Any) -> Any:
    """The stream keeps all digits of a number, which only times need."""
    if isinstance(data, Decimal):
        return float(data)
    if isinstance(data, dict):
        return {key: _with_floats(value) for key, value in data.items()}
    return [_with_floats(item) for item in data] if isinstance(data, list) else data


def _profile_of(
    recording: Recording, places: Sequence[ModulePlace], machine: Machine, what: str
) -> Profile:
    found = attribute(recording, places)
    device = device_account(recording, found.op_of)
    notices = list(recording.notices)
    steps = [(e.start_us, e.end_us) for e in recording.events if e.kind == STEP]
    if device is not None and device.until_us is not None:
        notices.append(
            f"the device's figures cover {device.steps} of {device.steps + 1} steps: the "
            "profiler was stopped in the last one, which changes it"
        )
    if device is not None and len({kernel.device for kernel in device.kernels}) > 1:
        notices.append("there is more than one device; idle means that none of them ran anything")
    spans = steps or [(e.start_us, e.end_us) for e in recording.events]
    return Profile(
        about=About(
            source="trace",
            what=what,
            training=any(op.phase == "backward" for op in found.ops),
            steps=max(1, step_count(recording)),
            step_starts_us=step_starts(recording),
            rank=recording.rank,
            torch=machine.torch,
            cpu=machine.cpu,
            threads=machine.threads,
            fingerprint=machine.fingerprint,
        ),
        step_us=sum(end - start for start, end in covered(spans)),
        modules=tuple(found.modules),
        ops=with_kernels(found.ops, device),
        device=device,
        memory=memory_account(recording, found),
        peaks=machine.peaks,
        op_cost_us=machine.op_cost_us,
        fused_call_us=machine.fused_call_us,
        faults=IN_TRACE,
        notices=tuple(notices),
    )
