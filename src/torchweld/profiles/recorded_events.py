"""What a recording consists of: events on threads and streams, as torch.profiler saw them.

`torch_profiler.py` and `trace_events.py` make `Event`s; `attribution.py` and `device_account.py`
read them. Nothing here is interpreted yet: times are as recorded, with the profiler's own cost.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from torchweld.profiles.profile import Tensor

# What an event is, from its category in a trace or its tag in the live tree.
OP = "op"  # an operator, or a node of the backward graph
MODULE = "module"  # the call of an nn.Module
STEP = "step"  # ProfilerStep#n
ANNOTATION = "annotation"  # record_function of the user or of torch (Optimizer.step#...)
PYTHON = "python"  # a Python function, when stacks were recorded
RUNTIME = "runtime"  # a call of the CUDA or HIP runtime or driver on the host
KERNEL = "kernel"  # on a device
MEMCPY = "memcpy"  # on a device
MEMSET = "memset"  # on a device
SYNC = "sync"  # a device's record of a wait; no work of its own

ON_DEVICE = frozenset({KERNEL, MEMCPY, MEMSET})

# Our ranges. The first stands before a module's path in the name of its call; the root's path is
# empty. torch names module calls in the same way. The second is one step of a live recording.
MARK = "nn.Module: "
STEP_MARK = "torchweld step"


@dataclass(slots=True, kw_only=True)
class Event:
    """One interval. `parent` is the index of the event around it on its thread, -1 for none.

    A recording has a hundred thousand, so they are neither frozen nor checked.
    """

    name: str
    kind: str
    start_us: float
    end_us: float
    thread: int = 0  # number of the (process, thread) pair, or of the (device, stream) pair
    parent: int = -1
    sequence: int = -1  # autograd's sequence number: joins a backward node to its forward op
    forward_thread: int = -1  # set on backward nodes: the thread their forward op ran on
    correlation: int = -1  # joins a runtime call to what it put on the device
    device: int = -1
    stream: int = -1
    inputs: tuple[Tensor | None, ...] = ()
    launch: int = -1  # on a device: index of the runtime call that put it there
    where: str = ""  # "model.py(12): forward": the user's line that called it, with stacks

    @property
    def duration_us(self) -> float:
        return self.end_us - self.start_us


@dataclass(slots=True, kw_only=True)
class MemoryEvent:
    """Memory of tensors that was allocated (bytes > 0) or freed (bytes < 0)."""

    time_us: float
    storage: int
    bytes: int
    event: int  # index of the innermost event around it, -1 for none


@dataclass(slots=True, kw_only=True)
class Recording:
    """Events sorted by (thread, start, longest first), with what is known about all of them."""

    events: list[Event]
    allocations: list[MemoryEvent] = field(default_factory=list)  # in order of time
    device_names: dict[int, str] = field(default_factory=dict)
    rank: int | None = None
    notices: list[str] = field(default_factory=list)


def nest(events: list[Event]) -> None:
    """Sets every host event's parent by containment. `events` must be sorted as in a Recording.

    Clocks of different resolution can make an event begin inside another and end after it. It
    counts as inside if its middle is inside.
    """
    stack: list[int] = []
    thread = None
    for index, event in enumerate(events):
        if event.kind in ON_DEVICE or event.kind == SYNC:
            continue
        if event.thread != thread:
            thread, stack = event.thread, []
        middle = 0.5 * (event.start_us + event.end_us)
        while stack and events[stack[-1]].end_us <= event.start_us + 1e-9:
            stack.pop()
        while stack and events[stack[-1]].end_us < middle:
            stack.pop()
        # The parent of a zero-length event at its very end was popped already. That is rare and
        # harmless: the event is charged one level up.
        event.parent = stack[-1] if stack else -1
        stack.append(index)


def within(recording: Recording, start_us: float, end_us: float) -> Recording:
    """What began in this time on the host, and what it put on a device; no Python functions."""
    events = recording.events
    inside = [start_us <= event.start_us < end_us for event in events]
    kept = {-1: -1}  # old index -> new index; of an event left out, that of the one around it
    chosen: list[Event] = []
    for i, event in enumerate(events):
        by_host = event.kind in ON_DEVICE and event.launch >= 0
        if inside[event.launch if by_host else i] and event.kind != PYTHON:
            kept[i] = len(chosen)
            chosen.append(event)
        else:
            kept[i] = kept[event.parent]
    return replace(
        recording,
        events=[
            replace(event, parent=kept[event.parent], launch=kept[event.launch]) for event in chosen
        ],
        allocations=[
            replace(allocation, event=kept[allocation.event])
            for allocation in recording.allocations
            if start_us <= allocation.time_us < end_us
        ],
    )


# Frames of these say nothing about who asked for an op.
_NOT_THE_USERS = ("torch/", "torchweld/", "<", "nn.Module: ")


def users_frame(name: str) -> str:
    """The name of a Python function as the profiler gives it, if it is the user's, else ""."""
    return "" if name.startswith(_NOT_THE_USERS) else name
