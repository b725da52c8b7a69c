"""Gives every microsecond of a recorded step an owner: a module, forward or backward.

In: recordings of the same step, and the places of a model's modules. Out: `Attribution`, the
`Module`s and `Op`s of a profile. The rules:

- An op belongs to the innermost module call around it, by nesting on its thread.
- A backward node belongs to the module whose forward op made it. The two share a sequence number
  on the forward's thread. A forward op notes the number that the next node will get, so if several
  ops note the same number, the last to begin made the node.
- AccumulateGrad has no forward op. The engine runs it as soon as its gradient is there, so it
  belongs to the node that ran before it.
- What a module runs inside a backward node (checkpointing) belongs to that module, as `recompute`.
- The time between two backward nodes is the engine's; it belongs to the node that follows.
- The cost of recording an event lies just outside the event, in what is around it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from torchweld.profiles.attributing.op_kinds import kind_of
from torchweld.profiles.profile import Module, Op, Phase, deepest_first
from torchweld.profiles.recorded_events import (
    ANNOTATION,
    MODULE,
    ON_DEVICE,
    OP,
    RUNTIME,
    STEP,
    SYNC,
    Event,
    Recording,
)

ENGINE = "autograd::engine::evaluate_function: "
OPTIMIZER = "optimizer"

# An op was disturbed if it took longer than this many times its median, plus a constant.
LATE_FACTOR = 3.0
LATE_US = 5.0

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What the profiler adds for each event, µs."""

    op_us: float = 0.0
    module_us: float = 0.0

    def of(self, event: Event) -> float:
        return self.module_us if event.kind == MODULE else self.op_us


@dataclass(frozen=True, kw_only=True)
class ModulePlace:
    """A module of the model, before anything ran."""

    path: str
    kind: str
    extra: str = ""
    parameters: int = 0
    compiled: bool = False


@dataclass(kw_only=True)
class Attribution:
    """Modules and ops of a step; the lists `*_of` run parallel to the recording's events."""

    modules: list[Module]
    ops: list[Op]
    module_of: list[int]
    phase_of: list[Phase]
    op_of: list[int]  # index into ops of the innermost op around an event, itself included; -1


@dataclass(kw_only=True)
class _Times:
    """Times of each event over all recordings. The start is in the step, `raw_us` as recorded."""

    start_us: list[float]
    own_us: list[float]
    raw_us: list[float]
    gap_us: list[float]


def usual(samples: Floats) -> list[float]:
    """The mean of each column; values far above the column's median are cut back to a limit.

    Unlike medians, means of ops add up to the mean of the step: every op is late in some steps.
    But a call that was preempted for milliseconds says nothing about the op.
    """
    middle = np.median(samples, axis=0)
    capped = np.minimum(samples, LATE_FACTOR * np.abs(middle) + LATE_US)
    return list(capped.mean(axis=0).tolist())


def signature(recording: Recording) -> list[tuple[str, int]]:
    """Equal for two recordings of the same work."""
    return [(event.name, event.parent) for event in recording.events]


def attribute(
    recording: Recording,
    places: Sequence[ModulePlace] = (),
    timed: Sequence[Recording] = (),
    costs: Costs | None = None,
) -> Attribution:
    """Attributes a recording; times come from `timed`, recordings with the same signature.

    Without `timed`, the recording's own times are used.
    """
    return _Attributor(recording, places, timed or (recording,), costs or Costs()).run()


class _Attributor:
    def __init__(
        self,
        recording: Recording,
        places: Sequence[ModulePlace],
        timed: Sequence[Recording],
        costs: Costs,
    ) -> None:
        self.events = recording.events
        self.recording = recording
        self.timed = timed
        self.costs = costs
        self.places = list(places)
        self.index = {place.path: i for i, place in enumerate(self.places)}
        if "" not in self.index:
            self.places.insert(0, ModulePlace(path="", kind="workload"))
            self.index = {place.path: i for i, place in enumerate(self.places)}
        count = len(self.events)
        self.module_of = [0] * count
        self.phase_of: list[Phase] = ["forward"] * count
        self.call_of = [-1] * count
        self.call_counts: dict[int, int] = {}

    def run(self) -> Attribution:
        self._find_owners()
        self._put_parents_first()
        times = self._usual_times()
        totals = _totals(self.events, times.own_us)
        ops, op_of = self._ops(times, totals)
        modules = self._modules(times)
        return Attribution(
            modules=modules,
            ops=ops,
            module_of=self.module_of,
            phase_of=self.phase_of,
            op_of=op_of,
        )

    # ---- owners ----

    def _module_at(self, path: str) -> int:
        found = self.index.get(path)
        if found is None:
            found = self.index[path] = len(self.places)
            self.places.append(ModulePlace(path=path, kind=path.rpartition(".")[2] or "module"))
        return found

    def _find_owners(self) -> None:
        made_by: dict[tuple[int, int], int] = {}  # (thread, sequence) -> forward event
        before: dict[int, int] = {}  # thread -> the backward node that ran last
        calls = 0
        ordered = range(len(self.events))
        if len({event.thread for event in self.events}) > 1:
            # A backward thread may sort before the forward it belongs to.
            ordered_by_start = sorted(ordered, key=lambda i: (self.events[i].start_us, i))
        else:
            ordered_by_start = list(ordered)
        for i in ordered_by_start:
            event = self.events[i]
            if event.kind in ON_DEVICE or event.kind == SYNC:
                continue
            parent = event.parent
            if parent >= 0:
                self.module_of[i] = self.module_of[parent]
                self.phase_of[i] = self.phase_of[parent]
                self.call_of[i] = self.call_of[parent]
            if event.kind == MODULE:
                self.module_of[i] = self._module_at(event.name)
                self.call_of[i] = calls
                calls += 1
                if self.phase_of[i] in ("backward", "recompute"):
                    self.phase_of[i] = "recompute"
                else:
                    self.call_counts[self.module_of[i]] = (
                        self.call_counts.get(self.module_of[i], 0) + 1
                    )
            elif event.kind == ANNOTATION and event.name.startswith("Optimizer."):
                self.module_of[i] = self._module_at(OPTIMIZER)
                self.phase_of[i] = "optimizer"
            elif event.kind == OP and is_backward_node(event):
                self._own_node(i, made_by, before)
            elif event.kind == OP and event.sequence >= 0:
                made_by[event.thread, event.sequence] = i

    def _own_node(
        self, i: int, made_by: dict[tuple[int, int], int], before: dict[int, int]
    ) -> None:
        event = self.events[i]
        inner = event.parent >= 0 and is_backward_node(self.events[event.parent])
        self.phase_of[i] = "backward"
        forward_thread = event.forward_thread if event.forward_thread >= 0 else event.thread
        source = made_by.get((forward_thread, event.sequence)) if event.sequence >= 0 else None
        if "AccumulateGrad" in event.name:
            source = before.get(event.thread)
        if source is not None:
            self.module_of[i] = self.module_of[source]
            self.call_of[i] = self.call_of[source]
        elif not inner:
            self.module_of[i], self.call_of[i] = 0, -1
        if inner and source is not None:
            # The engine's event does not know the sequence number in every release; its node does.
            self.module_of[event.parent] = self.module_of[i]
            self.call_of[event.parent] = self.call_of[i]
        before[event.thread] = i

    def _put_parents_first(self) -> None:
        """Sorts modules, parents first: a trace may show a child before its parent."""
        order: dict[int, None] = {}
        for i in range(len(self.places)):
            around, chain = i, [i]
            while (around := self._parent(self.places[around].path)) >= 0:
                chain.append(around)
            order.update(dict.fromkeys(reversed(chain)))
        moved = {before: after for after, before in enumerate(order)}
        self.places = [self.places[i] for i in order]
        self.index = {place.path: i for i, place in enumerate(self.places)}
        self.module_of = [moved[i] for i in self.module_of]
        self.call_counts = {moved[i]: count for i, count in self.call_counts.items()}

    # ---- times ----

    def _usual_times(self) -> _Times:
        samples = [self._times_of(recording.events) for recording in self.timed]
        if len(samples) == 1:
            return samples[0]
        return _Times(
            start_us=np.mean([sample.start_us for sample in samples], axis=0).tolist(),
            own_us=usual(np.array([sample.own_us for sample in samples])),
            raw_us=usual(np.array([sample.raw_us for sample in samples])),
            gap_us=usual(np.array([sample.gap_us for sample in samples])),
        )

    def _times_of(self, events: Sequence[Event]) -> _Times:
        """The times of one recording."""
        start_us = next((event.start_us for event in events if event.kind == STEP), None)
        if start_us is None:
            start_us = min((event.start_us for event in events), default=0.0)
        own, raw, gap = ([0.0] * len(events) for _ in range(3))
        latest: dict[int, int] = {}  # parent -> its latest child, where that is a backward node
        for i, event in enumerate(events):
            if event.kind in ON_DEVICE or event.kind == SYNC:
                continue
            duration = event.end_us - event.start_us
            raw[i] = duration
            own[i] += duration
            parent = event.parent
            if parent < 0:
                continue
            cost = self.costs.of(event)
            own[parent] -= duration + cost
            if is_backward_node(event):
                before = latest.get(parent)
                if before is not None:
                    gap[i] = event.start_us - events[before].end_us - cost
                    own[parent] -= gap[i]
                latest[parent] = i
            else:
                latest.pop(parent, None)
        starts = [event.start_us - start_us for event in events]
        return _Times(start_us=starts, own_us=own, raw_us=raw, gap_us=gap)

    # ---- results ----

    def _ops(self, times: _Times, totals: list[float]) -> tuple[list[Op], list[int]]:
        written = self._written()
        ops: list[Op] = []
        op_of = [-1] * len(self.events)
        for i, event in enumerate(self.events):
            around = op_of[event.parent] if event.parent >= 0 else -1
            op_of[i] = around
            if event.kind != OP:
                continue
            op_of[i] = len(ops)
            ops.append(
                Op(
                    name=event.name,
                    module=self.module_of[i],
                    parent=around,
                    phase=self.phase_of[i],
                    start_us=times.start_us[i],
                    raw_us=times.raw_us[i],
                    total_us=totals[i],
                    self_us=times.own_us[i],
                    inputs=event.inputs,
                    written=written.get(i, ()),
                    call=self.call_of[i],
                    sequence=event.sequence,
                    thread=event.thread,
                    where=event.where,
                )
            )
        return ops, op_of

    def _written(self) -> dict[int, tuple[tuple[int, int], ...]]:
        """Op event -> (storage, bytes) it allocated that outlive it.

        Memory that `aten::empty` and the like allocate belongs to the op that asked for it.
        """
        freed_us = {a.storage: a.time_us for a in self.recording.allocations if a.bytes < 0}
        found: dict[int, tuple[tuple[int, int], ...]] = {}
        for allocation in self.recording.allocations:
            i = allocation.event
            while i >= 0 and (
                self.events[i].kind != OP
                or (self.events[i].parent >= 0 and kind_of(self.events[i].name) == "allocation")
            ):
                i = self.events[i].parent
            if allocation.bytes <= 0 or i < 0:
                continue
            if freed_us.get(allocation.storage, float("inf")) >= self.events[i].end_us:
                found[i] = (*found.get(i, ()), (allocation.storage, allocation.bytes))
        return found

    def _modules(self, times: _Times) -> list[Module]:
        count = len(self.places)
        forward, backward = [0.0] * count, [0.0] * count
        python, engine = [0.0] * count, [0.0] * count
        for i, event in enumerate(self.events):
            if event.kind in ON_DEVICE or event.kind == SYNC:
                continue
            module, own = self.module_of[i], times.own_us[i]
            late = self.phase_of[i] in ("backward", "recompute")
            (backward if late else forward)[module] += own
            if event.kind not in (OP, RUNTIME):
                python[module] += own
            engine[module] += times.gap_us[i]
            backward[module] += times.gap_us[i]
        parents = [self._parent(place.path) for place in self.places]
        total_forward, total_backward = list(forward), list(backward)
        for i in deepest_first(parents):
            if parents[i] >= 0:
                total_forward[parents[i]] += total_forward[i]
                total_backward[parents[i]] += total_backward[i]
        return [
            Module(
                path=place.path,
                kind="Optimizer" if place.path == OPTIMIZER else place.kind,
                extra=place.extra,
                parent=parents[i],
                calls=self.call_counts.get(i, 0),
                forward_us=total_forward[i],
                backward_us=total_backward[i],
                self_forward_us=forward[i],
                self_backward_us=backward[i],
                python_us=python[i],
                engine_us=engine[i],
                parameters=place.parameters,
                compiled=place.compiled,
            )
            for i, place in enumerate(self.places)
        ]

    def _parent(self, path: str) -> int:
        if not path:
            return -1
        while "." in path:
            path = path.rpartition(".")[0]
            if path in self.index:
                return self.index[path]
        return self.index[""]


def is_backward_node(event: Event) -> bool:
    """Whether this is a node of the backward graph, or the engine's event around one."""
    return event.forward_thread >= 0 or event.name.startswith(ENGINE)


def _totals(events: Sequence[Event], own_us: Sequence[float]) -> list[float]:
    """Own time plus that of everything inside; a parent stands before its children."""
    totals = list(own_us)
    for i in range(len(events) - 1, -1, -1):
        if events[i].parent >= 0:
            totals[events[i].parent] += totals[i]
    return totals
