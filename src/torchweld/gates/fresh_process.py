"""A comparison in its own process, so that differences between processes are part of the result.

Where memory lies, and whether it is in huge pages, is settled once per process and can change a
speed-up by some percent. So the comparisons of a baseline are made in several processes, and what
looks slower in one has to look so in another.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from torchweld.bench.workers.worker_process import WorkerError, WorkerProcess
from torchweld.core.errors import NotMeasuredError, TorchweldError
from torchweld.core.model_state import put_back
from torchweld.gates.gate_timing import measure_welded
from torchweld.gates.gated_model import Clock, Subject
from torchweld.plans.plan import Plan
from torchweld.plans.plan_fitting import fit_plan
from torchweld.timing import Comparison
from torchweld.welds.swapping.module_faces import both_faces


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is to be compared: a target as typed, welded by a plan, on one of its workloads."""

    target: str
    inputs: tuple[str, ...]
    training: bool
    plan: Plan
    workload: int
    clock: Clock
    threads: int


def compare_afresh(subject: Subject, plan: Plan, workload: int, clock: Clock) -> Comparison:
    """Times the welded model against its own code in a new process with the same thread count."""
    return ask(
        Request(
            target=subject.target,
            inputs=subject.inputs,
            training=subject.training,
            plan=plan,
            workload=workload,
            clock=clock,
            threads=torch.get_num_threads(),
        )
    )


def ask(request: Request) -> Comparison:
    """What `answer` gives in a new process."""
    try:
        with WorkerProcess(request.target, Comparing) as worker:
            found: Comparison = worker.ask("compare", request)
    except WorkerError as error:
        raise NotMeasuredError(
            f"{request.target} could not be timed in a process of its own: {error}"
        ) from error
    return found


class Comparing:
    """The object in the new process that answers requests."""

    def compare(self, request: Request) -> Comparison:
        torch.set_num_threads(request.threads)
        return answer(request)


def answer(request: Request) -> Comparison:
    """Loads, welds and compares, in this process."""
    subject = Subject.load(request.target, request.inputs, request.training)
    model = subject.model
    if request.workload >= len(subject.workloads):
        raise TorchweldError(
            f"{request.target} has other inputs than a moment ago; a factory has to give the same "
            "at every call"
        )
    decisions = fit_plan(model, request.plan).decisions
    with put_back(model, subject.training), both_faces(model, decisions) as faces:
        return measure_welded(subject, faces, subject.workloads[request.workload], request.clock)
