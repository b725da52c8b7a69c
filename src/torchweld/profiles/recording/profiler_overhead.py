"""What the profiler itself costs, and what the smallest op costs, both measured on this machine.

Recording an event takes about a microsecond, which a step of small ops pays thousands of times. The
cost of an event is estimated twice: on a loop of tiny ops, and on the user's own steps, unprofiled,
profiled, and profiled with their modules shown, in turn. The two are weighted by how precisely each
was measured: a step of long ops says little about the cost of an event, and its noise must not be
mistaken for that cost.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import nn

from torchweld.core.not_measured import NotMeasured
from torchweld.machine.page_faults import UNCOUNTED, FaultCount
from torchweld.profiles.attributing.attribution import Costs
from torchweld.profiles.recorded_events import MODULE, OP, STEP, Recording
from torchweld.profiles.recording.module_instrument import instrumented
from torchweld.profiles.recording.torch_profiler import record
from torchweld.timing.core_waiting import TOLERATED

TINY_OPS = 300
ROUNDS = 7
# Costs of an event in a model, as multiples of its cost in a loop of tiny ops, where everything
# that the profiler touches stays in the caches. Seen on 2 threads of an EPYC: twice in a policy of
# 50 µs, four times in transformers, eight times in a mixer. USUAL_FACTOR and UNCERTAINTY are
# expected of a step whose own rounds say nothing. MOST_FACTOR is twice the most that was seen: a
# higher cost is time that something else took from the steps.
USUAL_FACTOR = 3.0
UNCERTAINTY = 2.0
MOST_FACTOR = 16.0
# A step was disturbed if it took longer than this many times the better ones.
DISTURBED = 1.25


@dataclass(frozen=True, kw_only=True)
class Loop:
    """What a loop of tiny ops showed, µs."""

    costs: Costs
    smallest_op_us: float


@dataclass(frozen=True, kw_only=True)
class Round:
    """The same step, run in several ways in turn, µs."""

    plain_us: float  # without the profiler
    recording: Recording  # with it, and the modules shown to it
    ops_us: float | None = None  # with it, but the modules not shown; to calibrate on
    alone_us: dict[str, float] = field(default_factory=dict)  # modules, by a bare clock: path -> µs
    lost: float = 0.0  # the largest share of one of these steps in which threads waited for a core
    faults: FaultCount | NotMeasured = UNCOUNTED  # of the step without the profiler

    @property
    def profiled_us(self) -> float:
        return step_us(self.recording)

    @property
    def sides(self) -> tuple[float, ...]:
        """The step's times, one per way it ran."""
        taken = (self.plain_us, self.ops_us, self.profiled_us)
        return tuple(us for us in taken if us is not None)


def step_us(recording: Recording) -> float:
    """Duration of the step as recorded."""
    return next((event.duration_us for event in recording.events if event.kind == STEP), 0.0)


def corrected_inside_us(recording: Recording, path: str, costs: Costs) -> float:
    """µs inside the calls of the module at `path`, without what recording them cost."""
    events = recording.events
    inside = [0.0] * len(events)
    total = 0.0
    for i in range(len(events) - 1, -1, -1):  # children stand behind their parents
        event = events[i]
        if event.kind == MODULE and event.name == path:
            total += event.duration_us - inside[i]
        if event.parent >= 0:
            inside[event.parent] += inside[i] + costs.of(event)
    return total


def calmest(rounds: Sequence[Round], least: int = 2) -> list[Round]:
    """The undisturbed rounds; if there are fewer than `least`, the calmest ones."""
    calm = [r for r in rounds if r.lost <= TOLERATED]
    return calm if len(calm) >= least else sorted(rounds, key=lambda r: r.lost)[:least]


def undisturbed(*sides: Sequence[float]) -> list[int]:
    """Indices of the rounds in which other processes took little time.

    `sides` are times of the same rounds. A time is late compared with the better ones of its side.
    At least the better half of the rounds is kept.
    """
    lateness = [1.0] * len(sides[0])
    for side in sides:
        good = sorted(side)[len(side) // 4]
        lateness = [max(late, us / good) for late, us in zip(lateness, side, strict=True)]
    limit = max(DISTURBED, statistics.median(lateness))
    return [i for i, late in enumerate(lateness) if late <= limit]


@cache
def measure_loop() -> Loop:
    """Times tiny ops and empty modules with and without the profiler; once per process, 50 ms."""
    one = torch.ones(1)
    empty = nn.Identity()

    def ops() -> None:
        for _ in range(TINY_OPS):
            torch.neg(one)

    def modules() -> None:
        for _ in range(TINY_OPS):
            empty(one)

    with torch.no_grad():
        plain_us, seen_us, durations = _both(ops, None)
        empty_us, empty_seen_us, _ = _both(modules, empty)
    return Loop(
        costs=Costs(
            op_us=max(0.0, (seen_us - plain_us) / TINY_OPS),
            module_us=max(0.0, (empty_seen_us - empty_us) / TINY_OPS),
        ),
        smallest_op_us=statistics.median(durations),
    )


def _both(run: Callable[[], None], module: nn.Module | None) -> tuple[float, float, list[float]]:
    """Least µs without and with the profiler, in turn, and the durations of the ops recorded."""
    roots = [("", module)] if module is not None else []
    plain, seen = [], []
    durations: list[float] = [0.0]
    elapsed_us = 0.0

    def clocked() -> None:
        nonlocal elapsed_us
        begun = time.perf_counter()
        run()
        elapsed_us = 1e6 * (time.perf_counter() - begun)

    for _ in range(ROUNDS):
        clocked()
        plain.append(elapsed_us)
        with instrumented(roots):
            recording = record(clocked)
        seen.append(elapsed_us)
        durations = [e.duration_us for e in recording.events if e.kind == OP] or durations
    return min(plain), min(seen), durations


def count_events(recording: Recording) -> tuple[int, int]:
    """Ops (everything that is not a module), and modules."""
    modules = sum(event.kind == MODULE for event in recording.events)
    return len(recording.events) - modules, modules


def usual_cost_us(recording: Recording) -> float:
    """What recording it took, judging by a loop of tiny ops."""
    loop = measure_loop().costs
    ops, modules = count_events(recording)
    return USUAL_FACTOR * (loop.op_us * ops + loop.module_us * modules)


def calibrate(loop: Costs, rounds: Sequence[Round]) -> Costs:
    """The cost of an op's event, and of a module's, from rounds of the same step."""
    times = [(r.plain_us, r.ops_us, r.profiled_us) for r in rounds if r.ops_us is not None]
    if len(times) < 2:
        return Costs(op_us=USUAL_FACTOR * loop.op_us, module_us=USUAL_FACTOR * loop.module_us)
    ops, modules = count_events(rounds[0].recording)
    return Costs(
        op_us=_weigh(loop.op_us, ops, [seen - plain for plain, seen, _ in times]),
        module_us=_weigh(loop.module_us, modules, [shown - seen for _, seen, shown in times]),
    )


def _weigh(loop_us: float, events: int, added_us: Sequence[float]) -> float:
    """The cost of one event, from what a loop found and what `events` added to steps."""
    expected_us = loop_us * events
    if expected_us <= 0:
        return loop_us
    middle = statistics.median(added_us)
    # The standard error of a median, from deviations that a few disturbed steps do not enlarge.
    deviation = 1.4826 * statistics.median(abs(us - middle) for us in added_us)
    error = max(1.25 * deviation / math.sqrt(len(added_us)) / expected_us, 0.02)
    # Inverse variances.
    loop_weight, step_weight = 1 / UNCERTAINTY**2, 1 / error**2
    seen = middle / expected_us
    factor = (loop_weight * USUAL_FACTOR + step_weight * seen) / (loop_weight + step_weight)
    return min(max(0.0, factor), MOST_FACTOR) * loop_us
