"""The memory account: what a step allocates, its peak, who made what is alive then.

In: a recording made with memory, and its attribution. Out: `Memory`, or None when the recording has
no allocations. Memory that was alive before the step is not counted, nor is freeing it.

What is saved for backward is read from the recording: memory that the forward pass made, that a
node of the backward graph reads, and that the op which made this node had at hand. That leaves out
what merely lives on (outputs, detached tensors) and incoming gradients. Hooks on saved tensors
would tell the same, but torch.func refuses to run under them, and the step may belong to a user's
loop. If a recording does not name the storages, nothing is known to be saved.
"""

from __future__ import annotations

from collections import defaultdict

from torchweld.profiles import recorded_events
from torchweld.profiles.accounting.memory_course import course_of
from torchweld.profiles.attributing.attribution import ENGINE, Attribution, is_backward_node
from torchweld.profiles.profile import Allocation, Memory

# A list of everything alive would be as long as the model; the largest are enough.
LISTED = 40
_LATE = ("backward", "recompute", "optimizer")


def memory_account(recording: recorded_events.Recording, found: Attribution) -> Memory | None:
    """Follows the allocations through the step."""
    if not recording.allocations:
        return None
    alive: dict[int, recorded_events.MemoryEvent] = {}
    level = peak = 0
    at_peak: list[recorded_events.MemoryEvent] = []
    grown = False  # since the list at the peak was taken
    made: dict[str, int] = defaultdict(int)
    count = total = 0

    def path_of(allocation: recorded_events.MemoryEvent) -> str:
        return found.modules[_module(allocation, found)].path

    for allocation in recording.allocations:
        if allocation.bytes > 0:
            alive[allocation.storage] = allocation
            level += allocation.bytes
            count += 1
            total += allocation.bytes
            made[path_of(allocation)] += allocation.bytes
            grown = grown or level > peak
            peak = max(peak, level)
        else:
            if grown and level == peak:
                at_peak, grown = list(alive.values()), False
            freed = alive.pop(allocation.storage, None)
            level -= freed.bytes if freed is not None else 0
    if grown and level == peak:
        at_peak = list(alive.values())
    largest = sorted(at_peak, key=lambda allocation: -allocation.bytes)[:LISTED]
    return Memory(
        allocations=count,
        allocated_bytes=total,
        peak_bytes=peak,
        at_peak=tuple(_describe(allocation, recording, found) for allocation in largest),
        saved_bytes=_descending(_saved(recording, found)),
        module_bytes=_descending(made),
        course=course_of(recording, found),
    )


def _saved(recording: recorded_events.Recording, found: Attribution) -> dict[str, int]:
    """Path of the module that saved it first -> bytes that the step made and kept for backward."""
    made = {
        allocation.storage: allocation.bytes
        for allocation in recording.allocations
        if allocation.bytes > 0
        and (allocation.event < 0 or found.phase_of[allocation.event] not in _LATE)
    }
    forward = _ForwardOps(recording)
    nodes: list[int] = []  # by event: the node of the backward graph around it, -1 for none
    savers: dict[int, tuple[float, int]] = {}  # storage -> when it was saved, by which module
    for i, event in enumerate(recording.events):
        around = nodes[event.parent] if event.parent >= 0 else -1
        if is_backward_node(event):
            # The engine's own range holds the sums of gradients, and AccumulateGrad nothing else.
            passes = event.name.startswith(ENGINE) or "AccumulateGrad" in event.name
            nodes.append(-1 if passes else i)
            continue
        nodes.append(around)
        if around < 0 or event.kind != recorded_events.OP:
            continue
        source = forward.source(recording.events[around])
        when_us = recording.events[source].start_us if source >= 0 else event.start_us
        # A forward pass that runs again reads what was kept for it, whichever node asked for that.
        again = found.phase_of[i] == "recompute"
        for tensor in event.inputs:
            if tensor is None or tensor.storage is None or tensor.storage not in made:
                continue
            if again or source < 0 or tensor.storage in forward.at_hand(source):
                saver = (when_us, found.module_of[i])
                savers[tensor.storage] = min(saver, savers.get(tensor.storage, saver))
    saved: dict[str, int] = defaultdict(int)
    for storage, (_, module) in savers.items():
        saved[found.modules[module].path] += made[storage]
    return saved


class _ForwardOps:
    """The ops that made the nodes of the backward graph, and the memory they could save."""

    def __init__(self, recording: recorded_events.Recording) -> None:
        self._events = recording.events
        # If several ops note the same number, the last to begin made the node.
        self._sources = {
            (event.thread, event.sequence): i
            for i, event in enumerate(recording.events)
            if event.kind == recorded_events.OP
            and event.sequence >= 0
            and not is_backward_node(event)
        }
        self._made: dict[int, list[int]] = defaultdict(list)
        for allocation in recording.allocations:
            if allocation.bytes > 0:
                self._made[allocation.event].append(allocation.storage)
        self._at_hand: dict[int, frozenset[int]] = {}

    def source(self, node: recorded_events.Event) -> int:
        """The event of the op that made this node; -1 if it was not recorded."""
        return self._sources.get((node.forward_thread, node.sequence), -1)

    def at_hand(self, source: int) -> frozenset[int]:
        """Storages that the op was given, or made."""
        known = self._at_hand.get(source)
        if known is None:
            outer = self._events[source]
            storages: set[int] = set()
            for i in range(source, len(self._events)):
                event = self._events[i]
                if event.thread != outer.thread or event.start_us > outer.end_us:
                    break
                storages.update(self._made.get(i, ()))
                given = (tensor.storage for tensor in event.inputs if tensor is not None)
                storages.update(storage for storage in given if storage is not None)
            known = self._at_hand[source] = frozenset(storages)
        return known


def _module(allocation: recorded_events.MemoryEvent, found: Attribution) -> int:
    return found.module_of[allocation.event] if allocation.event >= 0 else 0


def _describe(
    allocation: recorded_events.MemoryEvent,
    recording: recorded_events.Recording,
    found: Attribution,
) -> Allocation:
    op = found.op_of[allocation.event] if allocation.event >= 0 else -1
    # The outermost op is the one that stands in the user's code.
    while op >= 0 and found.ops[op].parent >= 0 and not _is_engine(found.ops[op].parent, found):
        op = found.ops[op].parent
    return Allocation(
        bytes=allocation.bytes,
        module=_module(allocation, found),
        op=found.ops[op].name if op >= 0 else "outside all ops",
        phase=found.ops[op].phase if op >= 0 else "other",
    )


def _is_engine(op: int, found: Attribution) -> bool:
    return found.ops[op].name.startswith(ENGINE)


def _descending(by_path: dict[str, int]) -> dict[str, int]:
    return dict(sorted(by_path.items(), key=lambda item: -item[1]))
