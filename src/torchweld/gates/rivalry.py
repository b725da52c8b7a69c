"""Two models in processes of their own, timed in turn: this one, and the one it is gated against.

Each process loads its target from its own folder, which is the first to import from, so two
checkouts do not meet; it welds by the same plan, as far as that fits. One process runs at a time,
the other is stopped meanwhile.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from torchweld.bench.bench_stages import Stage
from torchweld.bench.runtimes.runtime import Call, Runtime
from torchweld.bench.workers.worker_process import WorkerError
from torchweld.core.errors import NotMeasuredError, TorchweldError
from torchweld.core.muted_warnings import untold
from torchweld.gates.gate_advice import COUNTERS_ALONE
from torchweld.gates.gate_run import Rival
from torchweld.gates.gate_timing import Measure, compare_sides
from torchweld.gates.gated_model import Clock, Subject
from torchweld.numerics.model_results import step_of
from torchweld.plans.plan import Plan
from torchweld.plans.plan_fitting import fit_plan
from torchweld.timing import Comparison
from torchweld.welds.swapping.swap import weld

THIS, OTHER = "this", "other"
# The worker has no use for the model's own output.
NOTHING = torch.zeros(1)


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A target, and the folder that it is loaded in."""

    folder: Path
    target: str


@contextmanager
def rivalry(
    here: Contender,
    other: Contender,
    inputs: Sequence[str],
    training: bool,
    plan: Plan,
    clock: Clock,
) -> Iterator[Rival]:
    """Inside the `with` block both processes run."""
    where = here.target.partition(":")[0]
    shared = where.endswith(".py") and Path(where).expanduser().is_absolute()
    if shared and here.target == other.target:
        raise TorchweldError(
            f"the target {here.target!r} is the same file in every folder; give its path from the "
            f"folder, as in model.py:make in {here.folder} and in {other.folder}"
        )
    runtimes = dict.fromkeys((THIS, OTHER), ContenderRuntime)
    with Stage(torch.get_num_threads(), runtimes, processes=True) as stage:
        for reason in stage.start([THIS, OTHER]).values():
            raise NotMeasuredError(
                f"a process to time in did not start: {reason}; what would help: {COUNTERS_ALONE}"
            )
        for name, one in ((THIS, here), (OTHER, other)):
            source = ContenderSource(own=one, inputs=tuple(inputs), training=training, plan=plan)
            _ask(stage, one, name, "load", source)

        def measure(number: int) -> Measure:
            for name, one in ((THIS, here), (OTHER, other)):
                _ask(stage, one, name, "prepare", number)
            return lambda: _compared(stage, clock)

        yield Rival(name=_shown(here, other), measure=measure)


def _compared(stage: Stage, clock: Clock) -> Comparison:
    return compare_sides(stage.side(OTHER), stage.side(THIS), clock, names=(OTHER, THIS))


def _ask(stage: Stage, one: Contender, name: str, command: str, *arguments: Any) -> None:
    try:
        stage.ask(name, command, *arguments)
    except WorkerError as error:
        raise TorchweldError(f"{one.target} in {one.folder} cannot be run: {error}") from error


def _shown(here: Contender, other: Contender) -> str:
    return other.target if here.folder == other.folder else f"{other.target} in {other.folder}"


@dataclass(frozen=True, kw_only=True)
class ContenderSource:
    """The model that a process is told to load."""

    own: Contender
    inputs: tuple[str, ...]
    training: bool
    plan: Plan


class ContenderRuntime(Runtime):
    """The side in each process: a contender's target, welded as `torchweld gate` welds it."""

    def load(self, source: Any) -> None:
        folder = str(source.own.folder)
        os.chdir(folder)
        sys.path.insert(0, folder)  # for good: a model may import when it is first called
        self.subject = Subject.load(source.own.target, source.inputs, source.training)
        found = fit_plan(self.subject.model, source.plan)
        with untold():
            weld(self.subject.model, found.decisions)

    def show(self) -> None:
        """Does nothing: no other runtime shares this model."""

    def prepare(self, *where: int) -> Call:
        """The call of one workload, by its number."""
        subject = self.subject
        run = step_of(subject.model, subject.workloads[where[0]], subject.training)

        def call() -> Any:
            with torch.set_grad_enabled(subject.training):
                run()
            return NOTHING

        return call
