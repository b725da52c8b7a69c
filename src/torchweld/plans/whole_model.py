"""The whole model before and after: verified end to end, timed in turn, against its ceiling.

In: a model, its tuned blocks, the workloads. Out: a `MeasuredWhole` for each workload. The model is
unwelded, and left so.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from torchweld.core.errors import NotMeasuredError
from torchweld.core.measured_speed import Speed
from torchweld.core.model_inputs import Workload
from torchweld.core.not_measured import NotMeasured
from torchweld.findings import welding_bound
from torchweld.machine import measured_peaks
from torchweld.numerics.model_check import Check, TensorCheck, compare_results, depth_of
from torchweld.numerics.model_results import results, step_of
from torchweld.numerics.model_truth import truth_of
from torchweld.plans.choice_timing import FaceSide
from torchweld.plans.choice_verifying import brief
from torchweld.plans.kernel_choice import TunedBlocks
from torchweld.plans.measurement_cache import MeasurementCache
from torchweld.plans.plan import (
    SETTLED,
    UNASKED,
    Planned,
    PlannedGroup,
    TensorError,
    Tuned,
    Whole,
    structure_of,
    unwelded,
)
from torchweld.plans.plan_options import PlanOptions
from torchweld.plans.speed_ceiling import ceiling
from torchweld.plans.time_budget import TimeBudget
from torchweld.timing import Comparison, compare
from torchweld.welds.swapping.module_faces import both_faces

# If the times of all blocks are remembered, a plan should take seconds, the whole model included.
REMEMBERED_S = 4.0


@dataclass(frozen=True, kw_only=True)
class MeasuredWhole:
    """The figures of a plan, and the rounds behind them if they were timed now."""

    whole: Whole
    comparison: Comparison | None = None


def measure_wholes(
    model: nn.Module,
    tuned: TunedBlocks,
    workloads: Sequence[Workload],
    options: PlanOptions,
    budget: TimeBudget,
    memory: MeasurementCache,
) -> tuple[MeasuredWhole, ...]:
    """Each workload before and after, in the time that is left; none if nothing is measured."""
    if not tuned.decisions or options.force:
        return ()
    if measured_peaks.peaks() is None and None in budget.untimed:
        options.say("measuring this machine's peaks", 0.6)
        with suppress(NotMeasuredError):  # then no ceiling is shown
            measured_peaks.peaks(measure=True)
    end_s = budget.end_s
    if all(t.remembered for one in (*tuned.planned, *tuned.groups) for t in one.tunings):
        end_s = min(end_s, time.perf_counter() + REMEMBERED_S)
    predicted: float | NotMeasured = UNASKED
    if options.profile is not None and len(workloads) == 1:
        predicted = welding_bound(options.profile)
    structure, found = structure_of(model), []
    for i, (workload, untimed) in enumerate(zip(workloads, budget.untimed, strict=True)):
        options.say(f"the whole model, {workload.name}", 0.65 + 0.35 * i / len(workloads))
        to_time = max(1, budget.untimed[i:].count(None))
        about = (structure, workload.name, tuned.training, tuned.decisions)
        # A callable's name does not say what it does.
        asked = workload.inputs is not None and untimed is None and not options.rounds
        kept = memory.recall(about, Whole) if asked else None
        one = measure_whole(
            model,
            tuned,
            workload,
            budget_s=max(end_s - time.perf_counter(), 1.0) / to_time,
            predicted=predicted,
            kept=kept,
            untimed=untimed,
        )
        if kept is None and one.whole.verdict in SETTLED:
            memory.keep(about, replace(one.whole, errors=()))  # they are of these weights
        found.append(one)
    return tuple(found)


def measure_whole(
    model: nn.Module,
    tuned: TunedBlocks,
    workload: Workload,
    *,
    budget_s: float,
    predicted: float | NotMeasured = UNASKED,
    kept: Whole | None = None,
    untimed: NotMeasured | None = None,
) -> MeasuredWhole:
    """Welds, verifies, times, and undoes again.

    The numbers are always verified. Nothing is timed if there is a time that was `kept`, or a
    reason why the model stays `untimed`.
    """
    training, decisions = tuned.training, tuned.decisions
    expected = results(model, workload, training)
    truth = truth_of(model, workload, training)
    step = step_of(model, workload, training)
    with both_faces(model, decisions) as (original, welded):
        if tuned.groups:  # which run together from the second call on
            step()
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
            errors=tuple(map(_error, compared)),
        )
        if compared and not check.ok:
            why = NotMeasured(check.reason)
            return MeasuredWhole(whole=replace(whole, verdict="wrong", speed=why))
        if kept is not None:
            return MeasuredWhole(
                whole=replace(
                    kept,
                    error_ratio=whole.error_ratio,
                    against=whole.against,
                    errors=whole.errors,
                )
            )
        if untimed is not None:
            return MeasuredWhole(whole=whole)
        rounds = compare(
            FaceSide(original, [step]),
            FaceSide(welded, [step]),
            names=("eager", "welded"),
            budget_s=budget_s,
        )
    whole = replace(whole, verdict=rounds.verdict, speed=rounds.speed)
    if isinstance(whole.speed, Speed):
        whole = replace(
            whole, promised=promised(tuned.planned, whole.speed.before_us, tuned.groups)
        )
    if not training:
        above = ceiling(model, decisions, step)
        whole = replace(whole, ceiling=above.limit, time_share=above.share)
    return MeasuredWhole(whole=_without_false_bounds(whole), comparison=rounds)


def _error(found: TensorCheck) -> TensorError:
    within = 0.0 if found.ok else math.inf
    return TensorError(
        tensor=found.name,
        eager=math.nan if found.error == math.inf else brief(found.reference_error),
        fused=brief(found.error),
        of_allowed=brief(found.error / found.allowed) if found.allowed else within,
        ok=found.ok,
    )


def _without_false_bounds(whole: Whole) -> Whole:
    """A bound below the measured gain was wrong, and is not shown."""
    if not isinstance(whole.speed, Speed):
        return whole
    broken: dict[str, Any] = {
        name: NotMeasured(f"{bound:.2f}x was found, less than what was measured")
        for name in ("predicted", "ceiling")
        if not isinstance(bound := getattr(whole, name), NotMeasured)
        and bound < whole.speed.speedup
    }
    return replace(whole, **broken)


def promised(
    planned: Sequence[Planned], whole_us: float, groups: Sequence[PlannedGroup] = ()
) -> float | NotMeasured:
    """The speed-up of a step of `whole_us` if every block gains what it gained by itself.

    If the blocks took longer by themselves than the whole step, only their shares count. The gain
    of a group is added: it was timed against its members as they are planned.
    """
    before, saved = _timed_us(planned)
    of_groups, more = _timed_us(groups)
    before, saved = max(before, of_groups), saved + more
    if not before:
        return NotMeasured("no block was timed")
    saved *= min(1.0, whole_us / before)
    return whole_us / max(whole_us - saved, 1e-3 * whole_us)


def _timed_us(planned: Sequence[Tuned]) -> tuple[float, float]:
    """What all calls took before, and what was saved."""
    before, saved = 0.0, 0.0
    for tuning in (tuning for one in planned for tuning in one.tunings):
        speed = tuning.best.speed if tuning.best is not None else None
        if isinstance(speed, Speed):
            taken = tuning.count * speed.before_us
            before += taken
            saved += taken * (1 - 1 / speed.speedup)
    return before, saved


def without_wrong(tuned: TunedBlocks, wholes: Sequence[MeasuredWhole]) -> TunedBlocks:
    """Unwelds all blocks if the whole model does not give the same numbers."""
    if all(one.whole.verdict != "wrong" for one in wholes):
        return tuned
    reason = "the whole model gave other numbers"
    return replace(
        tuned,
        planned=tuple(unwelded(one, reason) for one in tuned.planned),
        groups=tuple(unwelded(one, reason) for one in tuned.groups),
    )
