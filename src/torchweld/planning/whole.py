"""The whole model before and after: verified end to end, timed in turn, against its ceiling."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from torchweld.decisions import Decision
from torchweld.inputs import Workload
from torchweld.measuring import Comparison, compare
from torchweld.planning.ceiling import ceiling
from torchweld.planning.plan import Planned, Whole
from torchweld.planning.timing import FaceSide, faces
from torchweld.planning.tuning import module_of
from torchweld.verifying import (
    Check,
    backward,
    compare_results,
    depth_of,
    floating,
    results,
    truth_of,
)

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
    predict: Callable[[float], float],
    kept: Whole | None = None,
    untimed: str = "",
) -> Whole:
    """Welds, verifies, times, and undoes again. The model is unwelded, and in the right mode.

    `predict` gives the gain that diagnosis allows, given what a step takes. With `kept`, or with a
    reason why it cannot be, `untimed`, nothing is timed, but the numbers are verified.
    """
    expected = results(model, workload, training)
    truth = truth_of(model, workload, training)
    modules = [module_of(model, decision.block) for decision in decisions]
    run = runner(model, workload, training)
    with faces(model, modules, [decisions]) as (original, welded):
        welded.show()
        got = results(model, workload, training)
        compared = compare_results(got, expected, truth, depth_of(model))
        check = Check.of(compared, truth.why_not_exact)
        del expected, truth, got
        common: dict[str, Any] = {
            "workload": workload.name,
            "predicted": 0.0 if kept is None else kept.predicted,
            "error_ratio": min(check.error_ratio, 1e30),
            "against": check.against,
        }
        if compared and not check.ok:
            return _unmeasured(common, f"wrong: {check.reason}")
        if kept is not None:
            return replace(kept, **common, remembered=True)
        if untimed:
            return _unmeasured(common, untimed)
        found = compare(
            FaceSide(original, [run]),
            FaceSide(welded, [run]),
            names=("eager", "welded"),
            budget_s=budget_s,
        )
    common["predicted"] = predict(found.baseline_us if found.rounds else 0.0)
    if found.rounds == 0:
        return _unmeasured(common, found.reason)
    whole = Whole(
        **common,
        verdict=found.verdict,
        speedup=found.speedup,
        interval=found.interval,
        before_us=found.baseline_us,
        after_us=found.candidate_us,
        saved_us=saved_us(planned, found.baseline_us),
        ceiling=0.0 if training else ceiling(model, decisions, run),
        reason=found.reason if found.verdict == "not measured" else "",
    )
    if (kept_rounds := _rounds.get()) is not None:
        kept_rounds[whole] = found
    return whole


def _unmeasured(common: dict[str, Any], reason: str) -> Whole:
    return Whole(
        **common,
        verdict="wrong" if reason.startswith("wrong") else "not measured",
        speedup=0.0,
        interval=(0.0, 0.0),
        before_us=0.0,
        after_us=0.0,
        saved_us=0.0,
        ceiling=0.0,
        reason=reason,
    )


def saved_us(planned: Sequence[Planned], whole_us: float) -> float:
    """What the blocks' own measurements add up to, of a step that takes `whole_us`.

    Where the blocks, timed by themselves, took longer than the whole, their shares count.
    """
    before, saved = 0.0, 0.0
    for one in planned:
        for tuning in one.tunings:
            best = tuning.best
            if best is not None and best.speedup > 0:
                taken = tuning.count * best.original_us
                before += taken
                saved += taken * (1 - 1 / best.speedup)
    return saved * min(1.0, whole_us / before) if before else 0.0


def runner(model: nn.Module, workload: Workload, training: bool) -> Callable[[], Any]:
    """One step: forward, in training with the backward."""

    def infer() -> Any:
        with torch.no_grad():
            return workload.run(model)

    def train() -> Any:
        for parameter in model.parameters():
            parameter.grad = None
        output = workload.run(model)
        backward(floating(output))
        return output

    return train if training else infer
