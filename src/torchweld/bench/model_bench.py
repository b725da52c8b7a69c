"""Running a bench of a whole model: eager against welded and peers, one cell per workload."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from torchweld.bench.bench_results import Bench, Cell, OutputCheck
from torchweld.bench.bench_stages import Stage, open_stage
from torchweld.bench.cell_bench import Outputs, measured_cell
from torchweld.bench.model_sources import ModelSource
from torchweld.bench.runtimes.runtime_names import OWN_MODEL, RUNTIMES
from torchweld.bench.whole_model_check import output_check
from torchweld.bench.workers.worker_process import WorkerError
from torchweld.core.errors import TorchweldError
from torchweld.core.not_measured import NotMeasured
from torchweld.numerics.model_check import compare_results
from torchweld.numerics.model_truth import ModelTruth

# A foreign runtime whose error exceeds eager's by more than this factor computes something else.
MOST_ERROR = 20.0


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """What is known once a model is loaded: its workloads, and notes for the reader.

    `plan` is what the welded model reports about itself.
    """

    workloads: tuple[str, ...]
    notes: tuple[str, ...]
    plan: dict[str, Any]


def measure_model(
    bench: Bench, source: ModelSource, latency: bool = False
) -> Iterator[LoadedModel | Cell]:
    """First what was loaded, then the cells, each as soon as it is done."""
    with open_stage(bench.names, bench.threads) as stage:
        missing = stage.start(bench.names)
        if "eager" in missing:
            raise TorchweldError(missing["eager"])
        stage.ask("eager", "load", source)
        stage.ask("eager", "check")
        about = stage.ask("eager", "about")
        notes = list(about["notes"])
        for name in bench.names[1:]:
            try:
                if name not in missing:
                    load_side(stage, name, source, about["weights"])
            except WorkerError as error:  # noqa: PERF203
                if name == OWN_MODEL:
                    raise
                missing[name] = str(error)
        details = stage.ask(OWN_MODEL, "details")
        notes.append(f"plan: {details['sentence']}")
        workloads = tuple(about["workloads"])
        yield LoadedModel(workloads=workloads, notes=tuple(notes), plan=details)
        for number, name in enumerate(workloads):
            yield _cell(stage, bench, missing, number, name, latency)


def load_side(stage: Stage, name: str, source: ModelSource, weights: str) -> None:
    """Loads a side, which has to have the weights that eager has."""
    stage.ask(name, "load", source)
    if stage.ask(name, "about")["weights"] != weights:
        raise WorkerError(
            "the model has other weights in every process, so there is nothing to compare; draw "
            "them from a fixed seed in its factory, or load them from a file"
        )


def _cell(
    stage: Stage,
    bench: Bench,
    missing: Mapping[str, str],
    number: int,
    workload: str,
    latency: bool,
) -> Cell:
    eager = stage.ask("eager", "prepare", number)
    work = stage.ask("eager", "work")
    return measured_cell(
        stage,
        bench,
        Cell(name=workload, case=None, results=(), **work),
        reasons={
            name: missing.get(name) or RUNTIMES[name]().why_not(work["dtype"])
            for name in bench.names
        },
        prepare=lambda name: eager if name == "eager" else stage.ask(name, "prepare", number),
        judge_of=lambda outputs: _ModelJudge(stage.ask("eager", "truth"), outputs),
        latency=latency,
    )


class _ModelJudge:
    """Outputs held against the model in float64: ours by the rule, others within a factor."""

    def __init__(self, truth: Mapping[str, Any], eager: Outputs) -> None:
        self._dtypes = {name: getattr(torch, dtype) for name, dtype in truth["dtypes"].items()}
        self._depth = int(truth["depth"])
        self._expected = self._tensors(eager)
        exact = truth["exact"]
        self._truth = ModelTruth(
            exact=None if exact is None else {n: torch.from_numpy(a) for n, a in exact.items()},
            jittered=tuple(
                {n: torch.from_numpy(a).to(self._dtypes[n]) for n, a in one.items()}
                for one in truth["jittered"]
            ),
            why_not_exact=truth["why_not_exact"],
        )

    def _tensors(self, arrays: Outputs) -> dict[str, Tensor]:
        found = {}
        for i, array in enumerate(arrays):
            name = f"output {i}"
            tensor = torch.from_numpy(array)
            found[name] = tensor.to(self._dtypes.get(name, tensor.dtype))
        return found

    def __call__(self, name: str, arrays: Outputs) -> OutputCheck:
        compared = compare_results(self._tensors(arrays), self._expected, self._truth, self._depth)
        check = output_check(compared)
        ratio = check.error_ratio
        close = not isinstance(ratio, NotMeasured) and ratio <= MOST_ERROR
        foreign = close and name != OWN_MODEL
        return replace(check, ok=True, reason=None) if check.ok or foreign else check
