"""Where the ops and modules of a profile lie on a time axis, for traces.

In: a `Profile`. Out: a `Span` for every op, and `Range`s around the ops of each module call.

A trace keeps its times. A live step was recorded at the profiler's pace, and its times are means
over several steps. Its ops are laid out anew with their corrected durations, and with pauses in the
proportions in which they were recorded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torchweld.profiles.attributing.attribution import ENGINE
from torchweld.profiles.profile import Op, Profile
from torchweld.profiles.recorded_events import MARK


class Span(NamedTuple):
    """An interval, µs."""

    start_us: float
    duration_us: float

    @property
    def end_us(self) -> float:
        return self.start_us + self.duration_us


@dataclass(kw_only=True, slots=True)
class Range:
    """The ops of one call of a module, or of its backward, on one thread.

    It lies inside the op `around`, and there inside `depth` other ranges.
    """

    name: str
    thread: int
    start_us: float
    end_us: float
    module: int
    around: int  # -1 for none
    depth: int
    call: int | None = None

    @property
    def span(self) -> Span:
        return Span(self.start_us, self.end_us - self.start_us)


def is_node(op: Op) -> bool:
    """Whether this is the engine's event around a node of the backward graph, or the node."""
    return op.phase == "backward" and (op.name.startswith(ENGINE) or "Backward" in op.name)


def _inside(ops: Sequence[Op]) -> list[list[int]]:
    """Op -> the ops right inside it, in order; the last list holds those inside none."""
    found: list[list[int]] = [[] for _ in range(len(ops) + 1)]
    for i, op in enumerate(ops):
        found[op.parent].append(i)
    return found


def thread_names(profile: Profile) -> dict[int, str]:
    """Host threads with ops, by number."""
    others = {op.thread for op in profile.ops if op.phase != "backward"}
    every = sorted({op.thread for op in profile.ops})
    return {thread: f"thread {thread}" if thread in others else "backward" for thread in every}


# ---- ops ----


def spans(profile: Profile) -> list[Span]:
    """One per op."""
    ops = profile.ops
    if profile.timing is None:
        return [Span(op.start_us, op.raw_us) for op in ops]
    inside = _inside(ops)
    durations = [max(op.self_us, 0.0) for op in ops]
    for i in range(len(ops) - 1, -1, -1):
        if ops[i].parent >= 0:
            durations[ops[i].parent] += durations[i]
    starts = [0.0] * len(ops)
    corrected_us, raw_us = profile.timing.corrected_us, profile.timing.raw_us
    main = ops[0].thread if ops else 0
    outer = [i for i in inside[-1] if ops[i].thread == main]
    idle_us = max(corrected_us - sum(durations[i] for i in outer), 0.0)
    _lay(ops, outer, (0.0, raw_us), 0.0, idle_us, durations, starts)
    pace = corrected_us / raw_us if raw_us > 0 else 1.0
    busy_until: dict[int, float] = {}
    for i in inside[-1]:
        thread = ops[i].thread
        if thread != main:
            starts[i] = max(ops[i].start_us * pace, busy_until.get(thread, 0.0))
            busy_until[thread] = starts[i] + durations[i]
    for i, op in enumerate(ops):
        recorded = (op.start_us, op.start_us + op.raw_us)
        own_us = max(op.self_us, 0.0)
        _lay(ops, inside[i], recorded, starts[i], own_us, durations, starts)
    return [Span(start, duration) for start, duration in zip(starts, durations, strict=True)]


def _lay(
    ops: Sequence[Op],
    children: Sequence[int],
    recorded: tuple[float, float],
    start_us: float,
    own_us: float,
    durations: Sequence[float],
    starts: list[float],
) -> None:
    """Places `children` one after the other; the own time of what is around them lies between."""
    before_us, pauses = recorded[0], []
    for i in children:
        pauses.append(max(ops[i].start_us - before_us, 0.0))
        before_us = ops[i].start_us + ops[i].raw_us
    all_us = sum(pauses) + max(recorded[1] - before_us, 0.0)
    now_us = start_us
    for i, pause_us in zip(children, pauses, strict=True):
        now_us += own_us * pause_us / all_us if all_us > 0 else 0.0
        starts[i] = now_us
        now_us += durations[i]


# ---- modules ----


def module_ranges(profile: Profile, placed: Sequence[Span]) -> Iterator[Range]:
    """Ranges around the ops of each call, the outer ones first. The root has none: it is all."""
    ops = profile.ops
    inside = _inside(ops)
    around = [-1, *range(len(ops))]
    for parent in around:
        by_thread: dict[int, list[int]] = {}
        for i in inside[parent]:
            by_thread.setdefault(ops[i].thread, []).append(i)
        for children in by_thread.values():
            yield from _ranges_of(profile, placed, children, parent)


def range_counts(profile: Profile) -> list[int]:
    """For each op, how many ranges lie between it and the op around it."""
    ops = profile.ops
    known: dict[tuple[int, int, bool], int] = {}
    found = []
    for op in ops:
        around = ops[op.parent] if op.parent >= 0 else None
        inside = around.module if around is not None else -1
        turned = around is not None and _is_late(around) != _is_late(op)
        key = (op.module, inside, turned)
        if key not in known:
            known[key] = len(_chain(profile, op, around))
        found.append(known[key])
    return found


def _is_late(op: Op) -> bool:
    return op.phase == "backward"


def _ranges_of(
    profile: Profile, placed: Sequence[Span], children: Sequence[int], parent: int
) -> Iterator[Range]:
    """Ranges among ops that stand beside each other inside the op `parent`, -1 for none."""
    around = profile.ops[parent] if parent >= 0 else None
    found: list[Range] = []
    opened: list[Range] = []
    for i in children:
        op, span = profile.ops[i], placed[i]
        chain = _chain(profile, op, around)
        names = [_name(profile, module, op) for module in chain]
        same = 0
        while same < min(len(opened), len(chain)) and (
            (opened[same].module, opened[same].name) == (chain[same], names[same])
        ):
            same += 1
        if chain and same == len(chain) and opened[same - 1].call not in (None, op.call):
            same -= 1
        del opened[same:]
        for module, name in zip(chain[same:], names[same:], strict=True):
            opened.append(
                Range(
                    name=name,
                    thread=op.thread,
                    start_us=span.start_us,
                    end_us=span.end_us,
                    module=module,
                    around=parent,
                    depth=len(opened),
                )
            )
            found.append(opened[-1])
        if chain and len(opened) == len(chain):
            opened[-1].call = op.call
        for open_range in opened:
            open_range.end_us = max(open_range.end_us, span.end_us)
    yield from found


def _chain(profile: Profile, op: Op, around: Op | None) -> list[int]:
    """The modules to open for `op`, outermost first: those that `around` is not in already."""
    found: list[int] = []
    stop = around.module if around is not None else 0
    if around is not None and _is_late(around) != _is_late(op):
        stop = 0
    index = op.module
    while index > 0 and index != stop:
        found.append(index)
        index = profile.modules[index].parent
    return found[::-1]


def _name(profile: Profile, module: int, op: Op) -> str:
    if op.phase == "optimizer":
        return f"Optimizer.step#{profile.modules[module].kind}.step"
    path = profile.modules[module].path
    return f"backward of {path}" if op.phase == "backward" else MARK + path
