"""Times the ways to run some modules that are built alike, against their own code, in one go.

Every way is a `Face` of the same modules: a class and what it keeps, swapped in before the clock
starts. So all run on the same weights at the same addresses, and the comparison is about the code
alone. The modules are called one after the other, as the model calls them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from torchweld.core.errors import TorchweldError
from torchweld.core.not_measured import NotMeasured
from torchweld.core.speeds import Speed
from torchweld.machine.hardware import hardware
from torchweld.plans.block_calls import block_call, input_like
from torchweld.plans.plan import Verdict
from torchweld.timing import Comparison, compare
from torchweld.timing.rounds import FEWEST_ROUNDS
from torchweld.timing.verdicts import FEW_ROUNDS
from torchweld.welds.decisions import Choice, Decision
from torchweld.welds.found_blocks import Block, Call
from torchweld.welds.swapping.faces import Face, faces
from torchweld.welds.swapping.swap import stats

# More instances than this say nothing new, and would only take time.
MOST_INSTANCES = 16
LEAST_BUDGET_S, MOST_BUDGET_S = 0.3, 4.0
# A round visits every side twice, once untimed; some of the time goes to the warm-up.
ROUNDS_WANTED = 1.6 * FEWEST_ROUNDS
# Which way is faster is the question, not by how much to the percent.
PRECISION, ENOUGH = 0.05, 0.15
# At a first look, the best of so many turns: what is this much slower than the best is left out.
# Calls that take longer than LONG_S have one turn.
FIRST_TURNS, BEHIND = 3, 1.25
LONG_S = 0.05


@dataclass(frozen=True, kw_only=True)
class Timed:
    """One way, timed: its speed for one call of one module."""

    verdict: Verdict
    speed: Speed | NotMeasured
    copied_bytes: int = 0  # of one module
    log_ratios: tuple[float, ...] = ()  # of each round, over the original


class FaceSide:
    """A face as a side of a comparison: `calls` rounds through all modules.

    It does not tell when it was preempted: calls of some milliseconds always are, beside another
    process on one of two cores. With such rounds dropped, plans welded 46 % of the blocks that they
    weld on a quiet machine (Zen 4, 2 cores). What preempts both sides cancels in their ratio.
    """

    def __init__(self, face: Face, runs: Sequence[Callable[[], object]]) -> None:
        self._face, self._runs = face, runs

    def time(self, calls: int) -> float:
        self._face.show()
        begun_s = time.perf_counter()
        for _ in range(calls):
            for run in self._runs:
                run()
        return time.perf_counter() - begun_s


def time_choices(
    model: nn.Module,
    modules: Sequence[nn.Module],
    blocks: Sequence[Block],
    calls: Sequence[Call],
    choices: Sequence[Choice],
    training: bool,
    budget_s: float,
) -> dict[Choice, Timed]:
    """Each choice against the modules' own code. What cannot be welded is left out."""
    if budget_s < LEAST_BUDGET_S:
        return _none_timed(choices, "no time was left for it")
    if not choices:
        return {}
    x = input_like(calls[0]).to(next(iter(modules[0].parameters())).device)
    if training:
        x.requires_grad_()
    run = block_call(modules[0], blocks[0], x, training)
    call_s = _call_s(run)
    least_s = least_budget_s(call_s)
    budget_s = min(budget_s, max(MOST_BUDGET_S * len(choices), 2 * least_s))
    if least_s > budget_s:
        needed = f"a call takes {call_s:.2g} s, and timing it {least_s:.2g} s"
        why = f"{needed}; {budget_s:.2g} s were left"
        return _none_timed(choices, why)
    count = _instances(call_s, len(modules), len(choices), budget_s)
    modules, blocks = modules[:count], blocks[:count]
    rows = calls[0].rows
    decisions = [
        [Decision(block=b, by_rows=((rows, rows, choice),), training=training) for b in blocks]
        for choice in choices
    ]
    names = [f"{choice.backend} {choice.mode}" for choice in choices]
    try:
        with faces(model, modules, decisions) as (original, *welded):
            runs = [block_call(m, b, x, training) for m, b in zip(modules, blocks, strict=True)]
            sides = [FaceSide(face, runs) for face in (original, *welded)]
            behind = _behind(sides[1:], names, FIRST_TURNS if call_s < LONG_S else 1)
            taken = [i for i, name in enumerate(names) if name not in behind]
            found: Any = compare(
                sides[0],
                *(sides[1 + i] for i in taken),
                names=("original", *(names[i] for i in taken)),
                budget_s=budget_s / len(taken),
                precision=PRECISION,
                enough=ENOUGH,
                cold=_cold(model, modules),
            )
            results = found if isinstance(found, list) else [found]
            timed = {
                choice: Timed(verdict="behind", speed=NotMeasured(behind[name]))
                for choice, name in zip(choices, names, strict=True)
                if name in behind
            }
            for i, comparison in zip(taken, results, strict=True):
                welded[i].show()
                copied = sum(map(copied_bytes, modules)) // len(modules)
                timed[choices[i]] = _timed(comparison, count, copied)
    except TorchweldError:
        if len(choices) == 1:
            return {}
        return {
            choice: one
            for choice in choices
            for one in time_choices(
                model, modules, blocks, calls, [choice], training, budget_s / len(choices)
            ).values()
        }
    return timed


def _none_timed(choices: Sequence[Choice], why: str) -> dict[Choice, Timed]:
    return dict.fromkeys(choices, Timed(verdict="not measured", speed=NotMeasured(why)))


def _behind(sides: Sequence[FaceSide], names: Sequence[str], turns: int) -> dict[str, str]:
    """Those that a first look shows far behind the best, and what it saw."""
    if len(sides) < 2:
        return {}
    best_s = [math.inf] * len(sides)
    for turn in range(1 + turns):
        for i, side in enumerate(sides):
            seconds = side.time(1)
            if turn:  # the first one packs, or compiles
                best_s[i] = min(best_s[i], seconds)
    first = min(range(len(sides)), key=best_s.__getitem__)
    return {
        names[i]: f"{best_s[i] / best_s[first]:.1f} times as long as {names[first]} at first look"
        for i in range(len(sides))
        if best_s[i] > BEHIND * best_s[first]
    }


def _timed(found: Comparison, instances: int, copied: int) -> Timed:
    """Of one module, where all of them were timed together."""
    speed = found.speed
    if isinstance(speed, Speed):
        before_us, after_us = speed.before_us / instances, speed.after_us / instances
        speed = replace(speed, before_us=before_us, after_us=after_us)
    return Timed(
        verdict=found.verdict, speed=speed, copied_bytes=copied, log_ratios=found.log_ratios
    )


def _call_s(run: Callable[[], object]) -> float:
    run()
    begun_s = time.perf_counter()
    run()
    return time.perf_counter() - begun_s


def least_budget_s(call_s: float) -> float:
    """Less than this cannot do: the original and its control take as much in the fewest rounds."""
    return 2 * FEW_ROUNDS * call_s


def _instances(call_s: float, there: int, choices: int, budget_s: float) -> int:
    """As many as leave time for the rounds that a verdict needs."""
    fits = int(budget_s / (ROUNDS_WANTED * 2 * (2 + choices) * max(call_s, 1e-7)))
    return max(1, min(there, fits, MOST_INSTANCES))


def _cold(model: nn.Module, modules: Sequence[nn.Module]) -> bool:
    """Whether the caches have to be emptied to be as they are in the model.

    Not if the weights that are timed in turn push each other out, or if all of the model stays in.
    """
    cache = hardware().caches.l3_bytes or hardware().caches.l2_bytes or 0
    timed = sum(p.nbytes for module in modules for p in module.parameters())
    everything = sum(p.nbytes for p in model.parameters())
    return timed < 2 * cache < everything


def copied_bytes(module: nn.Module) -> int:
    """Bytes of the copy of its weights that a welded module keeps."""
    return sum(one.copied_bytes for one in stats(module).values())
