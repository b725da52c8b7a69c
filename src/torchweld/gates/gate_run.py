"""`accept` makes a baseline of a model; `gate` compares a model with one. Data in, data out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from torchweld.core.argument_checks import Progress
from torchweld.core.model_state import put_back
from torchweld.gates.fresh_process import compare_afresh
from torchweld.gates.gate_advice import COUNTERS_ALONE, Effort
from torchweld.gates.gate_baseline import Baseline
from torchweld.gates.gate_outcome import Outcome, TimeVerdict, changes_of, lost_blocks
from torchweld.gates.gate_timing import (
    KeptTime,
    Measure,
    against_history,
    against_other,
    kept_time,
    measure_welded,
    undecided,
)
from torchweld.gates.gated_model import Clock, Subject
from torchweld.gates.held_blocks import held_by, refuse_empty, unheld_lines
from torchweld.gates.step_counters import count_step
from torchweld.machine import fingerprint
from torchweld.machine.fingerprint import taken_here
from torchweld.plans.block_calls import gpus_of
from torchweld.plans.plan import Plan
from torchweld.plans.plan_fitting import Fit, fit_plan
from torchweld.plans.plan_options import PlanOptions
from torchweld.plans.planner import plan as make_plan
from torchweld.welds.swapping.module_faces import Face, both_faces

# Comparisons of a baseline, each in a process of its own. In twenty of them the same speed-up came
# out between 1.32 and 1.42 (one thread of two shared cores), and three can all be at the upper end.
COMPARISONS = 5


@dataclass(frozen=True, kw_only=True)
class Rival:
    """Another model that runs in the same rounds: what it is, and a comparison with it."""

    name: str
    measure: Callable[[int], Measure]  # number of the workload -> candidate against rival


def accept(
    subject: Subject, *, clock: Clock | None, effort: Effort | None = None, progress: Progress
) -> Baseline:
    """Plans the model and measures what a baseline holds; without a `clock`, no times.

    Raises if nothing would be welded; NotMeasuredError if because nothing could be measured.
    """
    model, training = subject.model, subject.training
    effort = effort or Effort()
    made = _planned(subject, effort, progress)
    fit = fit_plan(model, made)
    with put_back(model, training), both_faces(model, fit.decisions) as faces:
        progress("counting", 0.75)
        counters = count_step(model, subject.workloads, training)
        tuning = PlanOptions(quick=effort.quick, budget_s=effort.budget_s)
        refuse_empty(
            held_by(made, counters),
            made,
            counters,
            empty=effort.empty,
            remedies=effort.remedies(tuning.seconds),
        )
        times: list[KeptTime] = []
        if clock is not None and fit.decisions:
            for i, workload in enumerate(subject.workloads):
                progress(f"timing {workload.name}", 0.8 + 0.2 * i / len(subject.workloads))
                here = partial(measure_welded, subject, faces, workload, clock)
                afresh = partial(compare_afresh, subject, made, i, clock)
                measures = [here, *([afresh] * (COMPARISONS - 1))]
                times.append(kept_time(workload.name, measures, clock))
    return Baseline(plan=made, counters=counters, times=tuple(times))


def _planned(subject: Subject, effort: Effort, progress: Progress) -> Plan:
    return make_plan(
        subject.model,
        subject.workloads,
        training=subject.training,
        measure=effort.measure,
        quick=effort.quick,
        budget_s=effort.budget_s,
        progress=lambda doing, share: progress(doing, 0.7 * share),
    )


def gate(
    subject: Subject,
    name: str,
    baseline: Baseline,
    *,
    clock: Clock | None,
    accept_command: str,
    rival: Rival | None = None,
    progress: Progress,
) -> Outcome:
    """Welds by the baseline's plan and counts; with a `clock`, it also times."""
    model, training = subject.model, subject.training
    progress("welding by the baseline's plan", 0.0)
    fit = fit_plan(model, baseline.plan)
    times: list[TimeVerdict] = []
    with put_back(model, training), both_faces(model, fit.decisions) as faces:
        progress("counting", 0.1)
        counters = count_step(model, subject.workloads, training)
        if clock is not None and rival is None:
            times = _times(subject, baseline, fit, faces, clock, progress)
    if clock is not None and rival is not None:
        for i, workload in enumerate(subject.workloads):
            progress(f"timing {workload.name}", 0.3 + 0.7 * i / len(subject.workloads))
            times.append(against_other(workload.name, rival.name, rival.measure(i), clock))
    return Outcome(
        baseline=name,
        what=subject.what,
        accepted=baseline.created,
        changes=tuple(changes_of(baseline.counters, counters)),
        lost=tuple(lost_blocks(baseline.counters, counters, fit.refused)),
        welded=(len(baseline.counters.welded), len(counters.welded)),
        times=tuple(times),
        notes=(*subject.notes, *_notes(baseline, fit, clock)),
        accept_command=accept_command,
    )


def _times(
    subject: Subject,
    baseline: Baseline,
    fit: Fit,
    faces: tuple[Face, Face],
    clock: Clock,
    progress: Progress,
) -> list[TimeVerdict]:
    if not fit.decisions:
        return []  # nothing to time; if that is new, the lost blocks say so
    found = []
    for i, workload in enumerate(subject.workloads):
        why_not = _why_not(baseline, workload.name, gpus_of(subject.model))
        kept = baseline.time(workload.name)
        if why_not or kept is None:
            remedies = (*_OTHERWISE, COUNTERS_ALONE)
            found.append(undecided(workload.name, why_not, clock.tolerance, remedies))
            continue
        progress(f"timing {workload.name}", 0.3 + 0.7 * i / len(subject.workloads))
        here = partial(measure_welded, subject, faces, workload, clock)
        afresh = partial(compare_afresh, subject, baseline.plan, i, clock)
        found.append(against_history(kept, here, afresh, clock))
    return found


# Remedies if the baseline has no time to compare with.
_OTHERWISE = (
    "--accept (a new baseline, with times of this machine)",
    "--against-worktree FOLDER (time against a checkout of main, in one run)",
)


def _why_not(baseline: Baseline, workload: str, gpus: Sequence[str]) -> str:
    """Why the time now cannot be compared with the baseline's; "" if it can."""
    before, made = baseline.fingerprint, baseline.plan.made_on
    if made is not None and made.gpu != (here := taken_here(gpus=gpus)).gpu:
        return f"the baseline was measured elsewhere: {'; '.join(made.since(here))}"
    if before is not None and before.key != fingerprint.key_here():
        said = "; ".join(before.since(taken_here())) or "its set-up is not that of here"
        return f"the baseline was measured elsewhere: {said}"
    if not baseline.times:
        return "the baseline was accepted without times"
    if baseline.time(workload) is None:
        there = ", ".join(one.workload for one in baseline.times)
        return f"the baseline has no time for these inputs, but for {there}"
    return ""


def _notes(baseline: Baseline, fit: Fit, clock: Clock | None) -> list[str]:
    found = []
    before = baseline.fingerprint
    if before is not None and before.torch != torch.__version__:
        found.append(
            f"the baseline was made with torch {before.torch}, this is {torch.__version__}: "
            "counters may differ for that reason alone"
        )
    if not baseline.counters.welded:
        timeless = ", so there is no wall time to compare" if clock is not None else ""
        found.append(f"the baseline welds nothing{timeless}, and holds the model to little")
    unheld = unheld_lines(held_by(baseline.plan, baseline.counters))
    if unheld:
        found.append(f"of the baseline's blocks {'; '.join(unheld)}")
    return found
