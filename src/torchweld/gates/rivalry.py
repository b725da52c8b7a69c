"""Two models in processes of their own, timed in turn: this one, and the one it is gated against.

Each process loads its target from its own folder, which is the first to import from, so two
checkouts do not meet; it welds by the same plan, as far as that fits. One process runs at a time,
the other is stopped meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from torchweld.bench.worker_processes import Stage, WorkerError
from torchweld.core.errors import NotMeasuredError, TorchweldError
from torchweld.gates.advice import COUNTERS_ALONE
from torchweld.gates.gate_run import Rival
from torchweld.gates.gate_timing import Measure, compare_sides
from torchweld.gates.subject import Clock
from torchweld.plans.plan import Plan
from torchweld.timing import Comparison

THIS, OTHER = "this", "other"
RUNTIMES = "torchweld.gates.contending"


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
    """Inside, both processes are there."""
    where = here.target.partition(":")[0]
    shared = where.endswith(".py") and Path(where).expanduser().is_absolute()
    if shared and here.target == other.target:
        raise TorchweldError(
            f"the target {here.target!r} is the same file in every folder; give its path from the "
            f"folder, as in model.py:make in {here.folder} and in {other.folder}"
        )
    with Stage(torch.get_num_threads(), runtimes=RUNTIMES) as stage:
        for reason in stage.start([THIS, OTHER]).values():
            raise NotMeasuredError(
                f"a process to time in did not start: {reason}; what would help: {COUNTERS_ALONE}"
            )
        text = plan.to_json()
        for name, one in ((THIS, here), (OTHER, other)):
            _ask(stage, one, name, "load", str(one.folder), one.target, inputs, training, text)

        def measure(number: int) -> Measure:
            for name, one in ((THIS, here), (OTHER, other)):
                _ask(stage, one, name, "prepare", number)
            return lambda: _compared(stage, clock)

        yield Rival(name=_shown(here, other), measure=measure)


def _compared(stage: Stage, clock: Clock) -> Comparison:
    other, this = stage.side(OTHER), stage.side(THIS)
    return compare_sides(other, this, clock.seconds, clock.tolerance, names=(OTHER, THIS))


def _ask(stage: Stage, one: Contender, name: str, command: str, *arguments: Any) -> None:
    try:
        stage.ask(name, command, *arguments)
    except WorkerError as error:
        raise TorchweldError(f"{one.target} in {one.folder} cannot be run: {error}") from error


def _shown(here: Contender, other: Contender) -> str:
    return other.target if here.folder == other.folder else f"{other.target} in {other.folder}"
