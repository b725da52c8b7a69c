"""`tw.plan`, `tw.apply`, `tw.fuse`, `tw.plan_of`: find, tune, weld.

plan: model and inputs in, `Plan` out, the model as it was. apply: model and plan in, the model
welded in place. fuse: both.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from torchweld import hardware
from torchweld.apart import Apart, undisturbed
from torchweld.arguments import (
    check_flags,
    check_kind,
    check_model,
    check_number,
    check_progress,
)
from torchweld.diagnosis import welding_bound
from torchweld.discovery.cloning import clone_to_run
from torchweld.discovery.finding import find, rebound
from torchweld.discovery.found import Blocks
from torchweld.errors import NotMeasuredError, TorchweldError
from torchweld.inputs import Workload, as_workloads
from torchweld.marks import PLAN_KEY, plain_root
from torchweld.names import known
from torchweld.not_measured import NotMeasured
from torchweld.planning.fitting import OnMismatch, fitting, structure_of
from torchweld.planning.memory import Memory
from torchweld.planning.plan import Plan, Planned, Whole
from torchweld.planning.timing import least_budget_s
from torchweld.planning.tuning import SETTLED, choices_for, tune
from torchweld.planning.whole import measure_whole, runner
from torchweld.profiler.live import profile as make_profile
from torchweld.profiler.profile import Profile
from torchweld.swap import all_or_nothing, decisions_of, reweld

Progress = Callable[[str, float], None]

# For measuring. Finding comes before and takes up to ten seconds: in all a minute, or ten seconds.
BUDGET_S = 48.0
QUICK_S = 8.0
# Of the budget, for the whole model before and after, and for the profile that predicts its gain.
WHOLE_SHARE, PROFILE_SHARE = 0.4, 0.2
# Where the whole takes too long to be timed, for verifying it.
UNTIMED_SHARE = 0.1
# What a profile takes: about so many steps, and some seconds besides.
PROFILE_STEPS, PROFILE_S = 120, 3.0


@undisturbed
def plan(
    model: nn.Module,
    inputs: Any,
    *,
    training: bool = False,
    force: bool = False,
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
    itself, welded or not, is left alone, and may be in use. `force` welds all that verifies and
    times nothing.

    quick:         about ten seconds instead of a minute; budget_s sets the time for measuring
    with_compile:  torch.compile of each block is tried too, which takes seconds a shape
    packing:       False: no copies of weights, which take as much memory as the weights
    profile:       of these inputs, to predict the gain from; made here if there is time
    remember:      take times that were measured for the same shapes before, and keep new ones
    progress:      called with what is being done and how far it is (0 to 1)
    """
    check_model("plan", model)
    flags = {"training": training, "force": force, "quick": quick, "remember": remember}
    check_flags("plan", **flags, with_compile=with_compile, packing=packing)
    if budget_s is not None:
        check_number("plan", "budget_s", budget_s, above=0)
    if profile is not None:
        check_kind("plan", "profile", profile, Profile, "what tw.profile returns")
    check_progress("plan", progress)
    say = progress or (lambda doing, share: None)
    budget_s = budget_s if budget_s is not None else QUICK_S if quick else BUDGET_S
    memory = Memory.of_this_machine() if remember else Memory(None)
    say("finding blocks", 0.0)
    blocks = find(model, inputs, training=training)
    clone = clone_to_run(model)
    workloads = [rebound(workload, clone) for workload in as_workloads(inputs)]
    copy = clone.model.train(training)
    begun_s = time.perf_counter()
    with torch.inference_mode(False):
        whole_s = budget_s * WHOLE_SHARE / len(workloads)
        untimed = [
            "" if force or not blocks else _why_untimed(copy, workload, training, whole_s)
            for workload in workloads
        ]
        whole_share = UNTIMED_SHARE if all(untimed) else WHOLE_SHARE + PROFILE_SHARE
        tuned = tune(
            copy,
            blocks,
            training=training,
            force=force,
            choices=choices_for(training, with_compile, packing),
            deadline_s=begun_s + budget_s * (1 - whole_share),
            memory=memory,
            progress=lambda doing, share: say(f"tuning {doing}", 0.1 + 0.5 * share),
        )
        made = _plan_of(copy, blocks, tuned, training, force)
        notices = list(made.notices)
        whole: list[Whole] = []
        if made.decisions and not force:
            end_s = begun_s + budget_s
            whole = _wholes(copy, made, workloads, profile, training, untimed, end_s, memory, say)
            made, more = _without_wrong(made, whole)
            notices += more
    if memory.notice:
        notices.append(memory.notice)
    say("done", 1.0)
    return replace(
        made, whole=tuple(whole), copied_bytes=_copied_bytes(made), notices=tuple(notices)
    )


def _why_untimed(model: nn.Module, workload: Workload, training: bool, whole_s: float) -> str:
    """Why the whole model cannot be timed in `whole_s`; "" if it can."""
    if any(parameter.is_meta for parameter in model.parameters()):
        return "the weights are on meta"
    begun_s = time.perf_counter()
    runner(model, workload, training)()
    step_s = time.perf_counter() - begun_s
    times = least_budget_s(step_s) / whole_s
    if times <= 1:
        return ""
    return f"a step takes {step_s:.2g} s; give {2 * times:.2g} times the budget_s (--budget)"


def _wholes(
    model: nn.Module,
    made: Plan,
    workloads: Sequence[Workload],
    profile: Profile | None,
    training: bool,
    untimed: Sequence[str],
    end_s: float,
    memory: Memory,
    say: Progress,
) -> list[Whole]:
    """Each workload before and after, in the time that is left."""
    if hardware.peaks() is None:
        say("measuring this machine's peaks", 0.6)
        with suppress(NotMeasuredError):  # then there is no ceiling to show
            hardware.peaks(measure=True)
    found = []
    for i, workload in enumerate(workloads):
        say(f"the whole model, {workload.name}", 0.65 + 0.35 * i / len(workloads))
        each_s = max(end_s - time.perf_counter(), 1.0) / max(1, untimed[i:].count(""))
        about = (made.structure, workload.name, training, made.decisions)
        # A callable's name does not say what it does.
        kept = memory.recall(about, Whole) if workload.inputs is not None else None

        def predict(
            step_us: float, workload: Workload = workload, left: int = len(workloads) - i
        ) -> float:
            given = profile if len(workloads) == 1 else None
            left_s = (end_s - time.perf_counter()) / left
            if given is None and left_s < PROFILE_STEPS * step_us / 1e6 + PROFILE_S:
                return 0.0
            say(f"profiling {workload.name}", 0.9)
            return _predicted(model, workload, given, training)

        one = measure_whole(
            model,
            made.decisions,
            made.planned,
            workload,
            training=training,
            budget_s=each_s * WHOLE_SHARE / (WHOLE_SHARE + PROFILE_SHARE),
            predict=predict,
            kept=kept,
            untimed=untimed[i],
        )
        if kept is None and one.verdict in SETTLED:
            memory.keep(about, one)
        found.append(one)
    return found


def _predicted(
    model: nn.Module, workload: Workload, given: Profile | None, training: bool
) -> float:
    """The most that diagnosis says welding can win; 0 where the model cannot be profiled."""
    if given is None:
        source = workload.inputs if workload.inputs is not None else workload.run
        try:
            given = make_profile(model, source, training=training)
        except TorchweldError:  # what cannot be profiled can be welded all the same
            return 0.0
    bound = welding_bound(given)
    return 0.0 if isinstance(bound, NotMeasured) else bound


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
    quick: bool = False,
    budget_s: float | None = None,
    packing: bool = True,
    progress: Progress | None = None,
) -> nn.Module:
    """Plan and apply in one step; `tw.plan_of(model)` says what was done and why."""
    made = plan(
        model,
        inputs,
        training=training,
        quick=quick,
        budget_s=budget_s,
        packing=packing,
        progress=progress,
    )
    return reweld(model, made.decisions, made)  # found in this very model: nothing to compare


def plan_of(model: nn.Module) -> Plan | None:
    """The plan that a model was welded by, None if there is none."""
    check_model("plan_of", model)
    found = plain_root(model).__dict__.get(PLAN_KEY)
    return found if isinstance(found, Plan) and decisions_of(model) else None
