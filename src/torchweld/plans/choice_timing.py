"""Times the choices for alike blocks against the original code, all in the same rounds.

Every choice is a `Face` of the same modules, which is shown before the clock starts. So all choices
run on the same weights at the same addresses, and differ in their code alone. The modules are
called one after the other, as the model calls them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from torchweld.core.errors import TorchweldError
from torchweld.core.measured_speed import Speed
from torchweld.core.not_measured import NotMeasured
from torchweld.core.saved_tensors import saved_bytes
from torchweld.machine.device_waiting import wait_for_gpu
from torchweld.machine.hardware import hardware
from torchweld.plans.block_calls import block_call, block_forward, input_like, module_of
from torchweld.plans.choice_verifying import said_by
from torchweld.plans.plan import UNASKED, Verdict
from torchweld.plans.time_budget import least_budget_s
from torchweld.timing import Comparison, compare
from torchweld.timing.timing_rounds import FEWEST_ROUNDS
from torchweld.welds.found_blocks import Block, Call
from torchweld.welds.swapping.module_faces import Face, faces
from torchweld.welds.swapping.swap import stats
from torchweld.welds.weld_decisions import Choice, Decision

# More blocks than this say nothing new, and take more time.
MOST_INSTANCES = 16
LEAST_BUDGET_S, MOST_BUDGET_S = 0.3, 4.0
# A round visits every side twice, once untimed. Some of the time goes to the warm-up.
ROUNDS_WANTED = 1.6 * FEWEST_ROUNDS
# The question is which choice is faster, not by how much to the percent.
PRECISION, ENOUGH = 0.05, 0.15
# At first look, each choice has this many turns, of which the best counts; calls that take longer
# than LONG_S have one turn. Choices that take BEHIND times as long as the best are left out.
FIRST_TURNS, BEHIND = 3, 1.25
LONG_S = 0.05


@dataclass(frozen=True, kw_only=True)
class Timed:
    """One choice, timed: its speed for one call of one module, or of all members of a group."""

    verdict: Verdict
    speed: Speed | NotMeasured
    copied_bytes: int = 0  # of one module, or of all members
    saved_bytes: int | NotMeasured = UNASKED  # in training, kept by one call for its backward
    original_saved_bytes: int | NotMeasured = UNASKED
    log_ratios: tuple[float, ...] = ()  # of each round, over the original
    control_log_ratios: tuple[float, ...] = ()  # of the original over itself


class FaceSide:
    """A face as a side of a comparison. A call runs all modules once.

    It does not tell when it was preempted. Calls of some milliseconds always are, if another
    process uses one of two cores. With such rounds dropped, plans welded 46 % of the blocks that
    they weld on a quiet machine (Zen 4, 2 cores). What preempts both sides cancels in their ratio.
    """

    def __init__(self, face: Face, runs: Sequence[Callable[[], object]]) -> None:
        self._face, self._runs = face, runs

    def time(self, calls: int) -> float:
        self._face.show()
        wait_for_gpu()
        begun_s = time.perf_counter()
        for _ in range(calls):
            for run in self._runs:
                run()
        wait_for_gpu()
        return time.perf_counter() - begun_s


def time_choices(
    model: nn.Module,
    blocks: Sequence[Block],
    call: Call,
    choices: Sequence[Choice],
    training: bool,
    budget_s: float,
) -> dict[Choice, Timed]:
    """Each choice against the modules' own code. Choices that cannot be welded are left out."""
    if budget_s < LEAST_BUDGET_S:
        return none_timed(choices, "no time was left for it")
    if not choices:
        return {}
    module = module_of(model, blocks[0])
    x = input_like(call).to(next(iter(module.parameters())).device)
    if training:
        x.requires_grad_()
    call_s = seconds_of(block_call(module, blocks[0], x, training))
    budget = comparison_budget(call_s, len(choices), budget_s)
    if isinstance(budget, NotMeasured):
        return none_timed(choices, budget.reason)
    budget_s = budget
    blocks = blocks[: instances(call_s, len(blocks), len(choices), budget_s)]
    runs = [block_call(module_of(model, b), b, x, training) for b in blocks]
    ways = {
        choice: [
            Decision(block=b, by_rows=((call.rows, call.rows, choice),), training=training)
            for b in blocks
        ]
        for choice in choices
    }
    turns = FIRST_TURNS if call_s < LONG_S else 1
    try:
        timed = time_ways(model, runs, (), ways, turns=turns, budget_s=budget_s)
        return with_saved_bytes(model, blocks[0], x, ways, timed) if training else timed
    except Exception as error:
        # One of them cannot be welded, or its backend failed: the modules' own code ran above.
        if len(choices) == 1 and isinstance(error, TorchweldError):
            return {}
        if len(choices) == 1:
            return none_timed(choices, f"it failed while it was timed: {said_by(error)}")
        share_s = budget_s / len(choices)
        alone = [time_choices(model, blocks, call, [c], training, share_s) for c in choices]
        return {choice: timed for one in alone for choice, timed in one.items()}


def with_saved_bytes(
    model: nn.Module,
    block: Block,
    x: Tensor,
    ways: Mapping[Choice, Sequence[Decision]],
    timed: Mapping[Choice, Timed],
) -> dict[Choice, Timed]:
    """The same, with what a call of the block keeps for its backward, welded and not."""
    forward = block_forward(module_of(model, block), block, x)
    found: dict[Choice, Timed] = {}
    with faces(model, [own[:1] for own in ways.values()]) as (original, *welded):
        original.show()
        before = saved_bytes(forward, model.parameters())
        for choice, face in zip(ways, welded, strict=True):
            face.show()
            after = saved_bytes(forward, model.parameters())
            found[choice] = replace(timed[choice], saved_bytes=after, original_saved_bytes=before)
    return found


def time_ways(
    model: nn.Module,
    runs: Sequence[Callable[[], object]],
    baseline: Sequence[Decision],
    ways: Mapping[Choice, Sequence[Decision]],
    *,
    turns: int,
    budget_s: float,
) -> dict[Choice, Timed]:
    """Modules welded by each choice, against the modules as `baseline` welds them.

    An empty baseline is the modules' own code. All are timed in the same rounds, except choices
    that are far behind at first look. A speed is that of one of the `runs`.
    """
    choices = list(ways)
    paths = dict.fromkeys(d.block.path for own in ways.values() for d in own)
    modules = [model.get_submodule(path) for path in paths]
    names = [f"{choice.backend} {choice.mode}" for choice in choices]
    with faces(model, [baseline, *ways.values()]) as (_, before, *welded):
        sides = [FaceSide(face, runs) for face in welded]
        behind = _behind(sides, names, turns)
        taken = [i for i, name in enumerate(names) if name not in behind]
        found: Any = compare(
            FaceSide(before, runs),
            *(sides[i] for i in taken),
            names=("original", *(names[i] for i in taken)),
            budget_s=budget_s / len(taken),
            precision=PRECISION,
            enough=ENOUGH,
            cold=_cold(model, modules),
        )
        timed = {
            choice: Timed(verdict="behind", speed=NotMeasured(behind[name]))
            for choice, name in zip(choices, names, strict=True)
            if name in behind
        }
        for i, one in zip(taken, found if isinstance(found, list) else [found], strict=True):
            welded[i].show()
            timed[choices[i]] = _timed(one, modules, len(runs))
    return timed


def comparison_budget(call_s: float, choices: int, left_s: float) -> float | NotMeasured:
    """Seconds for timing the choices of a call; not measured if too little time is left."""
    least_s = least_budget_s(call_s)
    budget_s = min(left_s, max(MOST_BUDGET_S * choices, 2 * least_s))
    if least_s > budget_s:
        needed = f"a call takes {call_s:.2g} s, and timing it {least_s:.2g} s"
        return NotMeasured(f"{needed}; {budget_s:.2g} s were left")
    return budget_s


def none_timed(choices: Sequence[Choice], why: str) -> dict[Choice, Timed]:
    return dict.fromkeys(choices, Timed(verdict="not measured", speed=NotMeasured(why)))


def _behind(sides: Sequence[FaceSide], names: Sequence[str], turns: int) -> dict[str, str]:
    """The sides that are far behind the best at first look, and how far."""
    if len(sides) < 2:
        return {}
    best_s = [math.inf] * len(sides)
    for turn in range(1 + turns):
        for i, side in enumerate(sides):
            seconds = side.time(1)
            if turn:  # the first turn packs or compiles
                best_s[i] = min(best_s[i], seconds)
    first = min(range(len(sides)), key=best_s.__getitem__)
    return {
        names[i]: f"{best_s[i] / best_s[first]:.1f} times as long as {names[first]} at first look"
        for i in range(len(sides))
        if best_s[i] > BEHIND * best_s[first]
    }


def _timed(found: Comparison, modules: Sequence[nn.Module], count: int) -> Timed:
    """The figures of one run of `count`. The modules show the face that was timed."""
    speed = found.speed
    if isinstance(speed, Speed):
        before_us, after_us = speed.before_us / count, speed.after_us / count
        speed = replace(speed, before_us=before_us, after_us=after_us)
    copies = (one.copied_bytes for module in modules for one in stats(module).values())
    return Timed(
        verdict=found.verdict,
        speed=speed,
        copied_bytes=sum(copies) // count,
        log_ratios=found.log_ratios,
        control_log_ratios=found.control_log_ratios,
    )


def seconds_of(run: Callable[[], object]) -> float:
    run()
    wait_for_gpu()
    begun_s = time.perf_counter()
    run()
    wait_for_gpu()
    return time.perf_counter() - begun_s


def instances(call_s: float, there: int, choices: int, budget_s: float) -> int:
    """How many to time, so that there is time for the rounds that a verdict needs."""
    fits = int(budget_s / (ROUNDS_WANTED * 2 * (2 + choices) * max(call_s, 1e-7)))
    return max(1, min(there, fits, MOST_INSTANCES))


def _cold(model: nn.Module, modules: Sequence[nn.Module]) -> bool:
    """Whether to empty the caches before each call, so that they are as they are in the model.

    Not if the weights that are timed in turn evict each other, or if the whole model fits in cache.
    """
    cache = hardware().caches.l3_bytes or hardware().caches.l2_bytes or 0
    timed = sum(p.nbytes for module in modules for p in module.parameters())
    everything = sum(p.nbytes for p in model.parameters())
    return timed < 2 * cache < everything
