"""`tw.plan`, `tw.apply`, `tw.fuse`, `tw.plan_of`: the stages of this package, in order.

plan: takes a model and inputs, returns a `Plan`, and leaves the model as it was.
apply: takes a model and a plan, and welds the model in place.
fuse: does both.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from torchweld.core.argument_checks import Progress, check_kind, check_model
from torchweld.core.interrupt_safety import Apart, undisturbed
from torchweld.core.model_inputs import as_workloads
from torchweld.core.typed_names import known
from torchweld.machine import fingerprint
from torchweld.machine.fingerprint import taken_here
from torchweld.machine.machine_load import load_words
from torchweld.plans.block_calls import gpus_of
from torchweld.plans.flops_share import flops_share
from torchweld.plans.group_tuning import tune_groups
from torchweld.plans.kernel_choice import BlockRounds, tune
from torchweld.plans.measurement_cache import MeasurementCache
from torchweld.plans.plan import Plan, structure_of
from torchweld.plans.plan_fitting import OnMismatch, fit_here
from torchweld.plans.plan_options import PlanOptions
from torchweld.plans.time_budget import share_out
from torchweld.plans.whole_model import MeasuredWhole, measure_wholes, without_wrong
from torchweld.profiles.profile import Profile
from torchweld.welds.cloning.model_clone import clone_to_run
from torchweld.welds.finding.find import find, rebound
from torchweld.welds.swapping.swap import all_or_nothing, reweld
from torchweld.welds.weld_marks import PLAN_KEY, plain_root

log = logging.getLogger("torchweld")


@dataclass(frozen=True, kw_only=True)
class PlanWithRounds:
    """A plan, and the rounds that it is too small to hold: of the whole model, and of blocks."""

    plan: Plan
    wholes: tuple[MeasuredWhole, ...]
    blocks: tuple[BlockRounds, ...] = ()


def plan(
    model: nn.Module,
    inputs: Any,
    *,
    training: bool = False,
    force: bool = False,
    measure: bool = True,
    quick: bool = False,
    budget_s: float | None = None,
    with_compile: bool = False,
    packing: bool = True,
    recompute: bool | None = None,
    profile: Profile | None = None,
    remember: bool = True,
    progress: Progress | None = None,
) -> Plan:
    """Find, verify and measure which blocks of the model are worth welding on these inputs.

    Everything runs on a copy of the model's structure that shares its parameters. The model itself,
    welded or not, is left alone and may be in use.

    training:      plan for training: gradients are verified and timed too
    force:         weld every block that verifies; time nothing
    measure:       if False, time nothing: weld the blocks that verify and that are known to be
                   faster, by the table that torchweld ships for this instruction set
    quick:         measure for about ten seconds instead of a minute
    budget_s:      seconds for measuring
    with_compile:  also try torch.compile on each block, which takes seconds per shape
    packing:       if False, keep no copies of weights, which take as much memory as the weights
    recompute:     in training, what welded blocks keep for the backward: True, their input alone;
                   False, a hidden-sized tensor per layer too (gated: two). By default both are
                   measured, and the input alone is kept unless that costs more than 2 %
    profile:       a profile of these inputs, to predict the gain from
    remember:      reuse times that were measured earlier for the same shapes, and keep new ones
    progress:      called with what is being done and how far it is (0 to 1)
    """
    check_model("plan", model)
    options = PlanOptions(
        training=training,
        force=force,
        measure=measure,
        quick=quick,
        budget_s=budget_s,
        with_compile=with_compile,
        packing=packing,
        recompute=recompute,
        profile=profile,
        remember=remember,
        progress=progress,
    )
    return plan_with_rounds(model, inputs, options).plan


@undisturbed
def plan_with_rounds(model: nn.Module, inputs: Any, options: PlanOptions) -> PlanWithRounds:
    """The same as `plan`, with the rounds that were timed."""
    options.say("finding blocks", 0.0)
    busy = load_words() if options.timing else ""
    workloads = as_workloads(inputs)
    blocks = find(model, workloads, training=options.training)
    clone = clone_to_run(model)
    copy, workloads = clone.model.train(options.training), [rebound(w, clone) for w in workloads]
    gpus = gpus_of(copy)
    memory = MeasurementCache.of_this_machine(gpus) if options.remember else MeasurementCache(None)
    with torch.inference_mode(False):
        budget = share_out(copy, workloads, blocks, options)
        tuned = tune(copy, blocks, options, budget, memory)
        tuned = tune_groups(copy, tuned, options, budget, memory)
        wholes = measure_wholes(copy, tuned, workloads, options, budget, memory)
        kept = without_wrong(tuned, wholes)
        share = flops_share(copy, kept.decisions, workloads)
    made = Plan(
        model=type(plain_root(copy)).__name__,
        structure=structure_of(copy),
        training=options.training,
        fingerprint=fingerprint.key_here(gpus),
        torch=torch.__version__,
        planned=kept.planned,
        refused=blocks.refused,
        groups=kept.groups,
        whole=tuple(one.whole for one in wholes),
        copied_bytes=sum(one.copied_bytes for one in (*kept.planned, *kept.groups)),
        flops_share=share,
        forced=options.force,
        table=tuned.table,
        busy=busy,
        notices=blocks.notices,
        made_on=taken_here(gpus=gpus),
    )
    made = replace(made, notices=(*made.notices, *_notices(made, options, memory)))
    options.say("done", 1.0)
    return PlanWithRounds(plan=made, wholes=wholes, blocks=tuned.rounds)


def _notices(made: Plan, options: PlanOptions, memory: MeasurementCache) -> Iterator[str]:
    """Wrong numbers, what would help to measure the rest, and whether times could be kept."""
    for one in made.whole:
        if one.verdict == "wrong":
            yield f"nothing is welded: on {one.workload} {one.reason}"
    unmeasured = (
        made.outcomes["not measured"]
        or any(one.verdict == "not measured" for one in made.whole)
        or any(group.outcome == "not measured" for group in made.groups)
    )
    if options.timing and unmeasured:
        more = math.ceil(4 * options.seconds)
        yield (
            "some blocks could not be measured; give more time (--budget "
            f"{more}, or budget_s={more}), use a quieter machine, or weld without timing, by the "
            "table of speeds that torchweld ships (--no-measure, or measure=False)"
        )
    if memory.notice:
        yield memory.notice


@all_or_nothing
@undisturbed
def apply(model: nn.Module, plan: Plan, on_mismatch: OnMismatch = "raise") -> nn.Module:
    """Weld a model as planned, in place; nothing is measured.

    `on_mismatch` says what happens if the plan was made on another machine, for another torch or
    for another model: "raise" refuses. "skip" leaves out the blocks that do not fit the model.
    "verify" does so too, and leaves out the blocks whose numbers are not right here. A model that
    is already welded is welded anew, by this plan alone.
    """
    check_model("apply", model)
    check_kind("apply", "plan", plan, Plan, "what tw.plan or tw.Plan.load returns")
    known(on_mismatch, ("raise", "verify", "skip"), "on_mismatch")
    root = plain_root(model)
    with Apart() as apart:
        fit = apart(fit_here, clone_to_run(root).model, plan, on_mismatch)
    return reweld(model, fit.decisions, plan)


@all_or_nothing
def fuse(
    model: nn.Module,
    inputs: Any,
    *,
    training: bool = False,
    measure: bool = True,
    quick: bool = False,
    budget_s: float | None = None,
    packing: bool = True,
    recompute: bool | None = None,
    progress: Progress | None = None,
) -> nn.Module:
    """Plan and apply in one step; `tw.plan_of(model)` says what was done and why.

    The logger "torchweld" gets one line: a warning if blocks could not be measured, else an info.
    """
    made = plan(
        model,
        inputs,
        training=training,
        measure=measure,
        quick=quick,
        budget_s=budget_s,
        packing=packing,
        recompute=recompute,
        progress=progress,
    )
    reweld(model, made.decisions, made)  # planned on this very model, so it fits
    level = logging.WARNING if made.outcomes["not measured"] else logging.INFO
    log.log(level, "%s: %s", made.model, made.sentence())
    return model


def plan_of(model: nn.Module) -> Plan | None:
    """The plan that a model was fused by, even if it welded nothing; None if there is none."""
    check_model("plan_of", model)
    found = plain_root(model).__dict__.get(PLAN_KEY)
    return found if isinstance(found, Plan) else None
