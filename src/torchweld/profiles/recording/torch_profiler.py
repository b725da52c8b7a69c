"""The only user of torch.profiler: runs something under it and gives a `Recording`.

Torch's profiler keeps more than it shows: a tree of events with the identity of every tensor's
memory. That tree is internal and changes between releases. So every undocumented field is read in
one place here, and a field that another release lacks becomes a notice, not a crash.
"""

from __future__ import annotations

import itertools
import os
import random
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any

import torch
from torch.autograd import profiler as torch_profiler

from torchweld.core.errors import NotMeasuredError, TorchweldError
from torchweld.machine.device_waiting import wait_for_all_gpus
from torchweld.profiles.attributing.op_kinds import kind_of
from torchweld.profiles.profile import Tensor
from torchweld.profiles.recorded_events import (
    ANNOTATION,
    MARK,
    MODULE,
    OP,
    STEP,
    STEP_MARK,
    Event,
    MemoryEvent,
    Recording,
    nest,
    users_frame,
    within,
)
from torchweld.profiles.recording.named_memory import joined_memory
from torchweld.profiles.traces.trace_events import read_recording

# The cheap way to open a range. A release without it has the documented way, at ten times the cost.
range_named: Callable[[str], AbstractContextManager[object]] = getattr(
    torch._C._profiler, "_RecordFunctionFast", torch_profiler.record_function
)
# The documented way: shows as an annotation under any name, where the cheap way looks like an op.
annotated: Callable[[str], AbstractContextManager[object]] = torch_profiler.record_function

# Functions, if stacks are recorded: those of Python, and those written in C.
_PYTHON_TAGS = ("PyCall", "PyCCall")

_PADDING = itertools.cycle(random.Random(0).sample(range(20, 220), 50))

_LOG_LEVEL, _ERRORS_ONLY = "KINETO_LOG_LEVEL", "6"


@cache
def has_cuda() -> bool:
    """Asked once: asking takes microseconds, inside what is timed."""
    return torch.cuda.is_available()


class Recorder:
    """Records between `start` and `stop`. torch allows one at a time per process.

    What runs inside `step` is kept; what runs before only warms the caches.
    """

    def __init__(self, *, shapes: bool = False, memory: bool = False, stacks: bool = False) -> None:
        self._options: dict[str, Any] = {
            "record_shapes": shapes,
            "profile_memory": memory,
            "with_stack": stacks,
        }
        self._profiler: Any = None

    def start(self) -> None:
        _refuse_a_second_profiler()
        with _quiet():
            # Not torch.profiler.profile: starting that imports torch._inductor.
            profiler: Any = torch_profiler.profile(
                use_device="cuda" if has_cuda() else None, **self._options
            )
            profiler.__enter__()
        self._profiler = profiler

    def pad(self) -> None:
        """Records a number of empty ranges, a different number each time.

        The profiler allocates memory for events in blocks, and the event that opens a block pays
        20 µs. With the padding, this is not the same op in every recording.
        """
        for _ in range(next(_PADDING)):
            with range_named(""):
                pass

    def step(self) -> AbstractContextManager[object]:
        """The one step that is recorded, to be entered once."""
        # Nothing stands between the range and what runs in it: a step can take as little as tens of
        # µs.
        return _until_the_device_is_done() if has_cuda() else range_named(STEP_MARK)

    def cancel(self) -> None:
        """Stops, and forgets what was recorded."""
        with _quiet():
            self._profiler.__exit__(None, None, None)
        self._profiler = None

    def stop(self) -> Recording:
        profiler, self._profiler = self._profiler, None
        with _quiet():
            profiler.__exit__(None, None, None)
        if has_cuda():
            return with_memory(_through_a_file(profiler), profiler)
        return _recording_of(profiler)


def record(
    run: Callable[[], object],
    warm_up: Callable[[], object] | None = None,
    after: Callable[[], object] | None = None,
    **options: bool,
) -> Recording:
    """Calls `run` once under the profiler; `warm_up` just before it and `after`, unrecorded."""
    recorder = Recorder(**options)
    recorder.start()
    try:
        recorder.pad()
        if warm_up is not None:
            warm_up()
        with recorder.step():
            run()
        if after is not None:
            after()
    except BaseException:
        recorder.cancel()
        raise
    return recorder.stop()


@contextmanager
def _until_the_device_is_done() -> Iterator[None]:
    with range_named(STEP_MARK):
        yield
        wait_for_all_gpus()


@contextmanager
def _quiet() -> Iterator[None]:
    """Hides the profiler's remarks about itself, which users of torchweld cannot act on."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # Kineto writes a line at every start and stop; it reads this once, at the first.
        given = os.environ.setdefault(_LOG_LEVEL, _ERRORS_ONLY)
        try:
            yield
        finally:
            if given is _ERRORS_ONLY:
                del os.environ[_LOG_LEVEL]


def _refuse_a_second_profiler() -> None:
    # The first knows this thread only, the second all of them.
    enabled = getattr(torch._C._autograd, "_profiler_enabled", None)
    if (enabled is not None and enabled()) or getattr(
        torch_profiler, "_is_profiler_enabled", False
    ):
        raise TorchweldError(
            "a torch profiler is running already, and torch allows one at a time; stop it first"
        )


def _recording_of(profiler: Any) -> Recording:
    results = getattr(profiler, "kineto_results", None)
    tree = getattr(results, "experimental_event_tree", None)
    lacks = "its tree of events"
    if tree is not None:
        try:
            return _ProfilerReader().read(tree(), results)
        except AttributeError as error:
            lacks = f"{error.name or error} in its tree of events"
    recording = _through_a_file(profiler)
    recording.notices.append(
        f"torch {torch.__version__} does not give {lacks}; the exported trace was read instead, so "
        "memory round trips are not known"
    )
    return recording


def _through_a_file(profiler: Any) -> Recording:
    handle, path = tempfile.mkstemp(suffix=".json")
    os.close(handle)
    try:
        profiler.export_chrome_trace(path)
        recording = read_recording(path)
    finally:
        os.unlink(path)
    step = next((event for event in recording.events if event.name == STEP_MARK), None)
    if step is None:
        raise _no_step()
    recording = within(recording, step.start_us, step.end_us)
    if len(recording.events) < 2:
        raise _no_ops()
    return recording


def with_memory(recording: Recording, profiler: Any) -> Recording:
    """What was read from the trace of a profiler, with the memory that its tree of events names.

    Only the trace has a device's kernels, and only the tree the memory behind a tensor.
    """
    results = getattr(profiler, "kineto_results", None)
    tree = getattr(results, "experimental_event_tree", None)
    reader = _ProfilerReader()
    try:
        if tree is None:
            raise AttributeError("experimental_event_tree")
        named = reader.read(tree(), results)
    except (AttributeError, NotMeasuredError):
        lost = "does not name the memory behind tensors; round trips are not known"
        recording.notices.append(f"torch {torch.__version__} {lost}")
        return recording
    return joined_memory(recording, named, reader.on_device)


def _find_step(roots: list[Any]) -> Any:
    """A root, or, with stacks, somewhere inside the functions that were running."""
    pending = list(roots)
    for node in pending:
        if node.name == STEP_MARK:
            return node
        if node.tag.name in _PYTHON_TAGS:
            pending.extend(node.children)
    raise _no_step()


def _no_step() -> NotMeasuredError:
    return NotMeasuredError("the profiler did not record the step; another tool may hold it")


def _no_ops() -> NotMeasuredError:
    return NotMeasuredError(
        "nothing was recorded in the step: the workload ran no op, or ran it in a process or "
        "thread of its own"
    )


# Fields that the exported trace does not have, or not as well -> what is lost without them. If any
# other field is missing, the exported trace tells more than the rest of the tree.
_OPTIONAL = {
    "allocation_id": "memory round trips, and where memory goes, are not known",
    "alloc_size": "where memory goes is not known",
    "strides": "tensors are taken to be contiguous",
    "device": "tensors are taken to be on the CPU",
    "correlation_id": "backward time may be charged to a module of another thread",
}
_ABSENT: Any = object()


class _ProfilerReader:
    """Reads the tree. Threads are numbered in the order in which they are met.

    Raises AttributeError if a field is missing without which the tree is useless.
    """

    def __init__(self) -> None:
        self.missing: set[str] = set()  # of the optional fields
        self.events: list[Event] = []
        self.allocations: list[MemoryEvent] = []
        self.on_device: dict[int, bool] = {}  # by storage that was allocated
        self.threads: dict[int, int] = {}
        self.dtypes: dict[Any, str] = {}
        self.correlations: list[int] = []

    def read(self, roots: list[Any], results: Any) -> Recording:
        step = _find_step(roots)
        origin_ns, end_ns = step.start_time_ns, step.end_time_ns
        stacks = any(node.tag.name in _PYTHON_TAGS for node in roots)
        trees = [n for n in roots if stacks or origin_ns <= n.start_time_ns < end_ns]
        for node in sorted(trees, key=lambda node: (self._thread(node), node.start_time_ns)):
            self._walk(node, origin_ns, end_ns)
        if stacks:
            # If one function opens a range and another closes it, as with the step, what ran in
            # between stands beside the range, not inside.
            nest(self.events)
        if len(self.events) < 2:
            raise _no_ops()
        notices = [
            f"torch {torch.__version__} does not give {name} in its tree of events; {lost}"
            for name, lost in _OPTIONAL.items()
            if name in self.missing
        ]
        if len(self.threads) > 1:
            self._join_threads(results, notices)
        self.allocations.sort(key=lambda allocation: allocation.time_us)
        return Recording(events=self.events, allocations=self.allocations, notices=notices)

    def _walk(self, root: Any, origin_ns: int, end_ns: int) -> None:
        # Depth first, children in order, without recursion: models nest deeper than Python allows.
        pending: list[tuple[Any, int, str]] = [(root, -1, "")]
        while pending:
            node, index, where = pending.pop()
            if node.tag.name in _PYTHON_TAGS:
                where = users_frame(node.name) or where
            elif origin_ns <= node.start_time_ns < end_ns:
                index = self._add(node, index, origin_ns, where)
            pending.extend((child, index, where) for child in reversed(node.children))

    def _add(self, node: Any, parent: int, origin_ns: int, where: str) -> int:
        """Adds one node; gives the index that its children have as their parent."""
        tag = node.tag.name
        if tag == "Allocation":
            fields = node.extra_fields
            storage = self._optional(fields, "allocation_id")
            size = self._optional(fields, "alloc_size")
            if storage is not None and size is not None:
                time_us = (node.start_time_ns - origin_ns) / 1e3
                device = getattr(fields, "device", None)
                self.on_device[storage] = device is not None and device.type != "cpu"
                self.allocations.append(
                    MemoryEvent(time_us=time_us, storage=storage, bytes=size, event=parent)
                )
            return parent
        kind, name = self._kind(node, tag)
        if kind is None:
            return parent
        event = Event(
            name=name,
            kind=kind,
            start_us=(node.start_time_ns - origin_ns) / 1e3,
            end_us=(node.end_time_ns - origin_ns) / 1e3,
            thread=self._thread(node),
            parent=parent,
        )
        if tag == "TorchOp":
            fields = node.extra_fields
            event.sequence = fields.sequence_number
            if fields.scope.name == "BACKWARD_FUNCTION":
                event.forward_thread = event.thread
            event.inputs = self._inputs(fields.inputs)
            event.where = where
        self.events.append(event)
        self.correlations.append(self._optional(node, "correlation_id", -1))
        return len(self.events) - 1

    def _optional(self, holder: Any, name: str, otherwise: Any = None) -> Any:
        value = getattr(holder, name, _ABSENT)
        if value is _ABSENT:
            self.missing.add(name)
            return otherwise
        return value

    def _kind(self, node: Any, tag: str) -> tuple[str | None, str]:
        name = node.name
        if tag == "TorchOp":
            if name.startswith(MARK):
                return MODULE, name[len(MARK) :]
            if name == STEP_MARK:
                return STEP, name
            user = node.extra_fields.scope.name == "USER_SCOPE" and kind_of(name) not in (
                "fused",
                "dynamo",
            )
            return (ANNOTATION if user else OP), name
        return None, name

    def _thread(self, node: Any) -> int:
        return self.threads.setdefault(node.start_tid, len(self.threads))

    def _inputs(self, given: list[Any]) -> tuple[Tensor | None, ...]:
        found: list[Tensor | None] = []
        for value in given:
            if isinstance(value, list):
                found.extend(self._tensor(item) for item in value)
            else:
                found.append(self._tensor(value))
        return tuple(found) if any(tensor is not None for tensor in found) else ()

    def _tensor(self, value: Any) -> Tensor | None:
        # Arguments other than tensors have neither.
        if not hasattr(value, "dtype") and not hasattr(value, "sizes"):
            return None
        shape = tuple(value.sizes)
        dtype = self.dtypes.get(value.dtype)
        if dtype is None:
            dtype = self.dtypes[value.dtype] = str(value.dtype).removeprefix("torch.")
        device = self._optional(value, "device")
        return Tensor(
            shape=shape,
            dtype=dtype,
            # None given, though there are dimensions: they were not recorded.
            strides=tuple(self._optional(value, "strides", ())) or (None if shape else ()),
            storage=self._optional(value, "allocation_id"),
            device="cpu" if device is None else device.type,
        )

    def _join_threads(self, results: Any, notices: list[str]) -> None:
        """Notes on which thread the forward op of each backward node ran, if there are several."""
        try:
            forward = {
                event.correlation_id(): event.fwd_thread_id()
                for event in results.events()
                if event.fwd_thread_id()
            }
        except AttributeError:
            notices.append(
                f"torch {torch.__version__} does not tell the forward threads of backward nodes; "
                "backward time may be charged to a module of another thread"
            )
            return
        for event, correlation in zip(self.events, self.correlations, strict=True):
            thread = forward.get(correlation)
            if event.forward_thread >= 0 and thread in self.threads:
                event.forward_thread = self.threads[thread]
