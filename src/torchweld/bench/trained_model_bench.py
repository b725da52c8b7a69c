"""Running a bench of a whole model in training: eager against welded, a cell for each kind of step.

The plan is made and verified in a process of its own, which ends before anything is timed. Steps
with tuned malloc have their own processes, and their own plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torchweld.bench.bench_cases import ModelCase
from torchweld.bench.bench_participants import EAGER_ALONE
from torchweld.bench.bench_results import Bench, Cell, OutputCheck
from torchweld.bench.bench_stages import Stage, open_training_stage
from torchweld.bench.cell_bench import measured_cell
from torchweld.bench.model_bench import LoadedModel, load_side
from torchweld.bench.model_sources import ModelSource
from torchweld.bench.plan_judge import PlanJudge
from torchweld.bench.runtimes.runtime_names import OWN_MODEL, RUNTIMES
from torchweld.bench.training_step import Malloc, TrainingStep
from torchweld.core.errors import TorchweldError

SIDES = ("eager", OWN_MODEL)


def measure_trained_model(
    bench: Bench,
    target: str,
    source: ModelSource,
    steps: Sequence[TrainingStep],
    latency: bool = False,
) -> Iterator[LoadedModel | Cell]:
    """What was loaded, then its cells, each as soon as it is done; again for each kind of malloc.

    Each input of the model has a cell for each step.
    """
    for malloc, group in groupby(steps, key=lambda step: step.malloc):
        with (
            TemporaryDirectory(prefix="torchweld-bench-") as folder,
            open_training_stage(bench.threads, RUNTIMES, malloc) as stage,
        ):
            file = Path(folder) / "plan.json"
            model = _judged_model(stage, source, file)
            kinds = list(group)
            yield _about(model, malloc, target, kinds)
            planned = replace(source, plan=str(file))
            missing = stage.start(SIDES)
            if missing:
                raise TorchweldError("; ".join(missing.values()))
            stage.ask("eager", "load", planned)
            load_side(stage, OWN_MODEL, planned, stage.ask("eager", "about")["weights"])
            for number, name in enumerate(model["workloads"]):
                for step in kinds:
                    case = ModelCase(target=target, inputs=name, step=step)
                    yield _cell(stage, bench, case, number, model["judged"][number], latency)


def _judged_model(stage: Stage, source: ModelSource, file: Path) -> dict[str, Any]:
    """Planned and verified, in a process that ends here; what it found, with the work and check of
    every workload."""
    judge = stage.helper("the plan", PlanJudge, stage.threads)
    try:
        judge.ready()
        found: dict[str, Any] = judge.ask("load", source, str(file))
        numbers = range(len(found["workloads"]))
        found["judged"] = [(judge.ask("work", i), judge.ask("judge", i)) for i in numbers]
        return found
    finally:
        judge.end()


def _about(
    model: dict[str, Any], malloc: Malloc, target: str, steps: Sequence[TrainingStep]
) -> LoadedModel:
    tuned = " with malloc tuned" if malloc == "tuned" else ""
    cases = [
        str(ModelCase(target=target, inputs=name, step=step))
        for name in model["workloads"]
        for step in steps
    ]
    notes = (*model["notes"], f"plan{tuned}: {model['sentence']}")
    return LoadedModel(workloads=tuple(cases), notes=notes, plan={"sentence": model["sentence"]})


def _cell(
    stage: Stage,
    bench: Bench,
    case: ModelCase,
    number: int,
    judged: tuple[Any, OutputCheck],
    latency: bool,
) -> Cell:
    work, check = judged

    def prepare(name: str) -> Any:
        stage.ask(name, "train", case.step)
        return stage.ask(name, "prepare", number)

    return measured_cell(
        stage,
        bench,
        Cell(name=str(case), case=None, model=case, results=(), **work),
        reasons={name: "" if name in SIDES else EAGER_ALONE for name in bench.names},
        prepare=prepare,
        judge_of=lambda _: lambda name, outputs: check,
        latency=latency,
    )
