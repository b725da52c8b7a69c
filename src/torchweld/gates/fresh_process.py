"""A comparison in a process of its own: what differs from process to process is in it then.

Where memory lies, and whether it is in huge pages, is settled once for a process and can change a
speed-up by some percent. So the comparisons of a baseline are made in several processes, and what
looks slower in one has to look so in another.

`compare_afresh` starts `python -m torchweld.gates.fresh_process REQUEST ANSWER`, both files.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from torchweld.core.errors import NotMeasuredError, TorchweldError
from torchweld.core.files import read_json
from torchweld.core.model_state import put_back
from torchweld.core.records import from_plain, json_text
from torchweld.gates.gate_timing import measure_welded
from torchweld.gates.subject import Clock, Subject
from torchweld.plans.plan import Plan
from torchweld.plans.plan_fitting import fit_plan
from torchweld.timing import Comparison
from torchweld.welds.swapping.faces import both_faces

LOG_LINES = 5


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is to be compared: a target as typed, welded by a plan, on one of its workloads."""

    target: str
    inputs: tuple[str, ...]
    training: bool
    plan: Plan
    workload: int
    seconds: float
    tolerance: float
    threads: int


def compare_afresh(subject: Subject, plan: Plan, workload: int, clock: Clock) -> Comparison:
    """The welded model against its own code, in a new process, with as many threads as here."""
    return ask(
        Request(
            target=subject.target,
            inputs=subject.inputs,
            training=subject.training,
            plan=plan,
            workload=workload,
            seconds=clock.seconds,
            tolerance=clock.tolerance,
            threads=torch.get_num_threads(),
        )
    )


def ask(request: Request) -> Comparison:
    """What `answer` gives in a new process."""
    with tempfile.TemporaryDirectory() as folder:
        asked, answered = Path(folder) / "request.json", Path(folder) / "answer.json"
        asked.write_text(json_text(request))
        done = subprocess.run(
            [sys.executable, "-m", "torchweld.gates.fresh_process", str(asked), str(answered)],
            # What lies in the current folder is not to be imported in place of a library.
            env={**os.environ, "PYTHONSAFEPATH": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        if done.returncode == 0 and answered.exists():
            return Comparison.load(answered)
    lines = [line.strip() for line in done.stdout.splitlines() if line.strip()][-LOG_LINES:]
    raise NotMeasuredError(
        f"{request.target} could not be timed in a process of its own, which ended with "
        f"{done.returncode}: {' | '.join(lines)}"
    )


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
    with put_back(model, subject.training), both_faces(model, decisions) as (original, welded):
        return measure_welded(
            model,
            original,
            welded,
            subject.workloads[request.workload],
            training=subject.training,
            seconds=request.seconds,
            tolerance=request.tolerance,
        )


def main(arguments: Sequence[str]) -> None:
    asked, answered = map(Path, arguments)
    request = from_plain(Request, read_json(asked, "request"), "request")
    torch.set_num_threads(request.threads)
    answer(request).save(answered)


if __name__ == "__main__":
    main(sys.argv[1:])
