"""The whole model before and after: verified end to end, timed in turn, against its ceiling."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

from torch import nn

from torchweld.core.inputs import Workload
from torchweld.core.not_measured import NotMeasured
from torchweld.core.speeds import Speed
from torchweld.numerics.model_check import (
    Check,
    compare_results,
    depth_of,
    results,
    step_of,
    truth_of,
)
from torchweld.plans.block_calls import module_of
from torchweld.plans.ceiling import ceiling
from torchweld.plans.measurement_cache import Kept
from torchweld.plans.plan import UNASKED, Planned, Whole
from torchweld.plans.way_timing import FaceSide
from torchweld.timing import Comparison, compare
from torchweld.welds.decisions import Decision
from torchweld.welds.swapping.faces import faces

# A plan is to stay small, so it has the figures; who wants the rounds they were made of asks here.
_rounds: ContextVar[dict[Whole, Comparison] | None] = ContextVar("rounds", default=None)


@contextmanager
def rounds_kept() -> Iterator[dict[Whole, Comparison]]:
    """Inside, what is timed of whole models is kept in the dict that is given.

    A `Whole` that an earlier plan has timed is not in it.
    """
    kept: dict[Whole, Comparison] = {}
    token = _rounds.set(kept)
    try:
        yield kept
    finally:
        _rounds.reset(token)


def measure_whole(
    model: nn.Module,
    decisions: Sequence[Decision],
    planned: Sequence[Planned],
    workload: Workload,
    *,
    training: bool,
    budget_s: float,
    predicted: float | NotMeasured,
    kept: Kept[Whole] | None = None,
    untimed: NotMeasured | None = None,
) -> Whole:
    """Welds, verifies, times, and undoes again. The model is unwelded, and in the right mode.

    `predicted` is the gain that diagnosis allows. With `kept`, or with a reason why it cannot be,
    `untimed`, nothing is timed, but the numbers are verified.
    """
    expected = results(model, workload, training)
    truth = truth_of(model, workload, training)
    modules = [module_of(model, decision.block) for decision in decisions]
    run = step_of(model, workload, training)
    with faces(model, modules, [decisions]) as (original, welded):
        welded.show()
        got = results(model, workload, training)
        compared = compare_results(got, expected, truth, depth_of(model))
        check = Check.of(compared, truth.why_not_exact)
        del expected, truth, got
        ratio = min(check.error_ratio, 1e30)
        whole = Whole(
            workload=workload.name,
            verdict="not measured",
            speed=UNASKED if untimed is None else untimed,
            error_ratio=ratio if compared else NotMeasured("the model gives no numbers"),
            against=check.against,
            predicted=predicted,
        )
        if compared and not check.ok:
            return replace(whole, verdict="wrong", speed=NotMeasured(check.reason))
        if kept is not None:
            return replace(
                kept.record,
                error_ratio=whole.error_ratio,
                against=whole.against,
                remembered=kept.at,
            )
        if untimed is not None:
            return whole
        found = compare(
            FaceSide(original, [run]),
            FaceSide(welded, [run]),
            names=("eager", "welded"),
            budget_s=budget_s,
        )
    speed = found.speed
    whole = replace(whole, verdict=found.verdict, speed=speed)
    if isinstance(speed, Speed):
        whole = replace(whole, promised=promised(planned, speed.before_us))
    if not training:
        above = ceiling(model, decisions, run)
        whole = replace(whole, ceiling=above.limit, time_share=above.share)
    whole = _without_false_bounds(whole)
    if (kept_rounds := _rounds.get()) is not None:
        kept_rounds[whole] = found
    return whole


def _without_false_bounds(whole: Whole) -> Whole:
    """A bound that the measured gain has broken was wrong, and is not shown as one."""
    if not isinstance(whole.speed, Speed):
        return whole
    broken: dict[str, Any] = {
        name: NotMeasured(f"{bound:.2f}x was found, which is less than what was measured")
        for name in ("predicted", "ceiling")
        if not isinstance(bound := getattr(whole, name), NotMeasured)
        and bound < whole.speed.speedup
    }
    return replace(whole, **broken)


def promised(planned: Sequence[Planned], whole_us: float) -> float | NotMeasured:
    """What the blocks' own measurements make of a step that takes `whole_us`, as a speed-up.

    Where the blocks, timed by themselves, took longer than the whole, their shares count.
    """
    before, saved = 0.0, 0.0
    for one in planned:
        for tuning in one.tunings:
            speed = tuning.best.speed if tuning.best is not None else None
            if isinstance(speed, Speed):
                taken = tuning.count * speed.before_us
                before += taken
                saved += taken * (1 - 1 / speed.speedup)
    if not before:
        return NotMeasured("no block was timed")
    saved *= min(1.0, whole_us / before)
    return whole_us / max(whole_us - saved, 1e-3 * whole_us)
