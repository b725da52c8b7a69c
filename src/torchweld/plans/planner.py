"""`tw.plan`, `tw.apply`, `tw.fuse`, `tw.plan_of`: find, tune, weld.

plan: model and inputs in, `Plan` out, the model as it was. apply: model and plan in, the model
welded in place. fuse: both.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from torchweld.core.arguments import (
    check_flags,
    check_kind,
    check_model,
    check_number,
    check_progress,
)
from torchweld.core.errors import NotMeasuredError, TorchweldError
from torchweld.core.inputs import Workload, as_workloads
from torchweld.core.names import known
from torchweld.core.not_measured import NotMeasured
from torchweld.core.undisturbed import Apart, undisturbed
from torchweld.findings import welding_bound
from torchweld.machine import hardware
from torchweld.machine.fingerprint import taken_here
from torchweld.machine.load import load_words
from torchweld.numerics.model_check import step_of
from torchweld.plans.flops_share import flops_share
from torchweld.plans.known_speeds import SpeedTable, load_table
from torchweld.plans.measurement_cache import MeasurementCache
from torchweld.plans.plan import UNASKED, Plan, Planned, Whole
from torchweld.plans.plan_fitting import OnMismatch, fitting, structure_of
from torchweld.plans.tuning import SETTLED, choices_for, tune
from torchweld.plans.way_timing import least_budget_s
from torchweld.plans.whole_model import measure_whole
from torchweld.profiles.profile import Profile
from torchweld.report.plan_text import sentence
from torchweld.welds.cloning.model_clone import clone_to_run
from torchweld.welds.finding.find import find, rebound
from torchweld.welds.found_blocks import Blocks
from torchweld.welds.marks import PLAN_KEY, plain_root
from torchweld.welds.swapping.swap import all_or_nothing, reweld

Progress = Callable[[str, float], None]

# For measuring. Finding comes before and takes up to ten seconds: in all a minute, or ten seconds.
BUDGET_S = 48.0
QUICK_S = 8.0
# Of the budget, for the whole model before and after.
WHOLE_SHARE = 0.4
# Where the whole takes too long to be timed, for verifying it.
UNTIMED_SHARE = 0.1
# Where all times of the blocks are remembered, a plan is to take seconds, the whole's own included.
REMEMBERED_S = 4.0

log = logging.getLogger("torchweld")


@undisturbed
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
    profile: Profile | None = None,
    remember: bool = True,
    progress: Progress | None = None,
) -> Plan:
    """What of the model is worth welding on these inputs: found, verified, measured.

    All of it happens on a copy of the model's structure that shares its parameters: the model
    itself, welded or not, is left alone, and may be in use.

    force:         weld all that verifies; nothing is timed
    measure:       False: nothing is timed either, and what verifies is welded where the table that
                   torchweld ships for this instruction set knows it to be faster
    quick:         about ten seconds instead of a minute; budget_s sets the time for measuring
    with_compile:  torch.compile of each block is tried too, which takes seconds a shape
    packing:       False: no copies of weights, which take as much memory as the weights
    profile:       of these inputs, to predict the gain from
    remember:      take times that were measured for the same shapes before, and keep new ones
    progress:      called with what is being done and how far it is (0 to 1)
    """
    check_model("plan", model)
    flags = {"training": training, "force": force, "measure": measure, "quick": quick}
    check_flags("plan", **flags, remember=remember, with_compile=with_compile, packing=packing)
    if force and not measure:
        raise TorchweldError(
            "force=True welds all that verifies, and measure=False what a table knows to be "
            "faster; give one of them"
        )
    if budget_s is not None:
        check_number("plan", "budget_s", budget_s, above=0)
    if profile is not None:
        check_kind("plan", "profile", profile, Profile, "what tw.profile returns")
    check_progress("plan", progress)
    say = progress or (lambda doing, share: None)
    budget_s = budget_s if budget_s is not None else QUICK_S if quick else BUDGET_S
    memory = MeasurementCache.of_this_machine() if remember else MeasurementCache(None)
    table = None if measure else table_here()
    say("finding blocks", 0.0)
    timing = measure and not force
    busy = load_words() if timing else ""
    blocks = find(model, inputs, training=training)
    clone = clone_to_run(model)
    workloads = [rebound(workload, clone) for workload in as_workloads(inputs)]
    copy = clone.model.train(training)
    begun_s = time.perf_counter()
    with torch.inference_mode(False):
        whole_s = budget_s * WHOLE_SHARE / len(workloads)
        untimed: list[NotMeasured | None] = [
            _why_untimed(copy, workload, training, whole_s) if timing and blocks else UNASKED
            for workload in workloads
        ]
        whole_share = UNTIMED_SHARE if all(why is not None for why in untimed) else WHOLE_SHARE
        tuned = tune(
            copy,
            blocks,
            training=training,
            force=force,
            choices=choices_for(training, with_compile, packing),
            deadline_s=begun_s + budget_s * (1 - whole_share),
            memory=memory,
            progress=lambda doing, share: say(f"tuning {doing}", 0.1 + 0.5 * share),
            table=table,
        )
        made = _plan_of(copy, blocks, tuned, training, force)
        made = replace(made, table=None if table is None else _source(table))
        notices = list(made.notices)
        whole: list[Whole] = []
        if made.decisions and not force:
            end_s = begun_s + budget_s
            if all(tuning.remembered for one in tuned for tuning in one.tunings):
                end_s = min(end_s, time.perf_counter() + REMEMBERED_S)
            whole = _wholes(copy, made, workloads, profile, training, untimed, end_s, memory, say)
            made, more = _without_wrong(made, whole)
            notices += more
        if made.decisions and not any(p.is_meta for p in copy.parameters()):
            made = replace(made, flops_share=flops_share(copy, made.decisions, workloads))
    if timing and (advice := _advice(made, whole, budget_s)):
        notices.append(advice)
    if memory.notice:
        notices.append(memory.notice)
    say("done", 1.0)
    return replace(
        made,
        whole=tuple(whole),
        copied_bytes=_copied_bytes(made),
        busy=busy,
        notices=tuple(notices),
    )


def table_here() -> SpeedTable | NotMeasured:
    """The table of known speeds for the kernels that run here; why there is none, if so."""
    isa = hardware.isa_in_use()
    if isa is None:
        return NotMeasured("torchweld's kernels are not built here, so no table of speeds fits")
    return load_table(isa)


def _source(table: SpeedTable | NotMeasured) -> str:
    return table.reason if isinstance(table, NotMeasured) else table.source


def _advice(made: Plan, whole: Sequence[Whole], budget_s: float) -> str:
    """What would help where something could not be measured; "" where all was."""
    unmeasured = made.outcomes["not measured"]
    if not unmeasured and all(one.verdict != "not measured" for one in whole):
        return ""
    more = math.ceil(4 * budget_s)
    return (
        f"what was not measured may be with more time (--budget {more}, or budget_s={more}), or on "
        "a quieter machine; --no-measure, or measure=False, welds without timing, by the table of "
        "speeds that torchweld ships"
    )


def _why_untimed(
    model: nn.Module, workload: Workload, training: bool, whole_s: float
) -> NotMeasured | None:
    """Why the whole model cannot be timed in `whole_s`; None if it can."""
    if any(parameter.is_meta for parameter in model.parameters()):
        return NotMeasured("the weights are on meta")
    begun_s = time.perf_counter()
    step_of(model, workload, training)()
    step_s = time.perf_counter() - begun_s
    if least_budget_s(step_s) <= whole_s:
        return None
    return NotMeasured(f"a step takes {step_s:.2g} s, too long for the {whole_s:.2g} s it has")


def _wholes(
    model: nn.Module,
    made: Plan,
    workloads: Sequence[Workload],
    profile: Profile | None,
    training: bool,
    untimed: Sequence[NotMeasured | None],
    end_s: float,
    memory: MeasurementCache,
    say: Progress,
) -> list[Whole]:
    """Each workload before and after, in the time that is left."""
    if hardware.peaks() is None and None in untimed:
        say("measuring this machine's peaks", 0.6)
        with suppress(NotMeasuredError):  # then there is no ceiling to show
            hardware.peaks(measure=True)
    predicted: float | NotMeasured = UNASKED
    if profile is not None and len(workloads) == 1:
        predicted = welding_bound(profile)
    found = []
    for i, workload in enumerate(workloads):
        say(f"the whole model, {workload.name}", 0.65 + 0.35 * i / len(workloads))
        each_s = max(end_s - time.perf_counter(), 1.0) / max(1, untimed[i:].count(None))
        about = (made.structure, workload.name, training, made.decisions)
        # A callable's name does not say what it does.
        asked = workload.inputs is not None and untimed[i] is None
        kept = memory.recall(about, Whole) if asked else None
        one = measure_whole(
            model,
            made.decisions,
            made.planned,
            workload,
            training=training,
            budget_s=each_s,
            predicted=predicted,
            kept=kept,
            untimed=untimed[i],
        )
        if kept is None and one.verdict in SETTLED:
            memory.keep(about, one)
        found.append(one)
    return found


def _without_wrong(made: Plan, whole: Sequence[Whole]) -> tuple[Plan, list[str]]:
    """Nothing is kept of a plan whose whole does not give the same numbers."""
    wrong = [one for one in whole if one.verdict == "wrong"]
    if not wrong:
        return made, []
    planned = tuple(
        replace(
            one,
            tunings=tuple(
                replace(t, chosen=None, reason="the whole model gave other numbers")
                for t in one.tunings
            ),
        )
        for one in made.planned
    )
    said = [f"nothing is welded: on {one.workload} {one.reason}" for one in wrong]
    return replace(made, planned=planned), said


def _copied_bytes(made: Plan) -> int:
    """Of all blocks: one copy each, however many row counts use it."""
    return sum(
        max((t.best.copied_bytes for t in one.tunings if t.best is not None), default=0)
        for one in made.planned
        if one.welded
    )


def _plan_of(
    model: nn.Module, blocks: Blocks, tuned: list[Planned], training: bool, force: bool
) -> Plan:
    return Plan(
        model=type(plain_root(model)).__name__,
        structure=structure_of(model),
        training=training,
        fingerprint=hardware.fingerprint(),
        torch=torch.__version__,
        planned=tuple(tuned),
        refused=blocks.refused,
        forced=force,
        notices=blocks.notices,
        made_on=taken_here(),
    )


@all_or_nothing
@undisturbed
def apply(model: nn.Module, plan: Plan, on_mismatch: OnMismatch = "raise") -> nn.Module:
    """Weld a model as planned, in place; nothing is measured.

    If the plan was made on another machine, for another torch or another model, "raise" refuses,
    "verify" checks the numbers of every block again and leaves out what fails, and "skip" leaves
    out the blocks that do not fit the model. A model that is welded already is welded anew, by this
    plan alone.
    """
    check_model("apply", model)
    check_kind("apply", "plan", plan, Plan, "what tw.plan or tw.Plan.load returns")
    known(on_mismatch, ("raise", "verify", "skip"), "on_mismatch")
    root = plain_root(model)
    with Apart() as apart:
        decisions = apart(fitting, clone_to_run(root).model, plan, on_mismatch)
    return reweld(model, decisions, plan)


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
    progress: Progress | None = None,
) -> nn.Module:
    """Plan and apply in one step; `tw.plan_of(model)` says what was done and why.

    The logger "torchweld" gets one line: a warning where blocks could not be measured, else for
    your information.
    """
    made = plan(
        model,
        inputs,
        training=training,
        measure=measure,
        quick=quick,
        budget_s=budget_s,
        packing=packing,
        progress=progress,
    )
    reweld(model, made.decisions, made)  # found in this very model: nothing to compare
    level = logging.WARNING if made.outcomes["not measured"] else logging.INFO
    log.log(level, "%s: %s", made.model, sentence(made))
    return model


def plan_of(model: nn.Module) -> Plan | None:
    """The plan that a model was welded by, or that found nothing to weld; None if there is none."""
    check_model("plan_of", model)
    found = plain_root(model).__dict__.get(PLAN_KEY)
    return found if isinstance(found, Plan) else None
