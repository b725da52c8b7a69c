"""A whole model: eager against welded, from a TARGET; what cannot be timed is refused."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.bench_samples import FakeCompare, check_of, comparison_of

import torchweld as tw
from torchweld.bench import (
    Cell,
    measure_model,
    model_bench,
    plan_model,
    stage_timing,
)
from torchweld.bench.bench_stages import Stage
from torchweld.bench.model_sources import SizedSource, TargetSource
from torchweld.bench.runtimes.runtime import loaded
from torchweld.bench.workers.local_worker import LocalWorker
from torchweld.core.errors import TorchweldError
from torchweld.welds.swapping.swap import stats

FILE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
        self.calls = 0

    def forward(self, x):
        return self.mlp(x)

class Mutates(Net):
    def forward(self, x):
        return self.mlp(x.add_(1.0))

class Counts(Net):
    def forward(self, x):
        self.calls += 1
        return self.mlp(x) * self.calls

class Raises(Net):
    def forward(self, x):
        raise RuntimeError("no such head")

def net():
    return Net(), [torch.randn(2, 8), torch.randn(3, 8)]

def one():
    return Net(), torch.randn(2, 8)

def mutates():
    return Mutates(), torch.randn(2, 8)

def counts():
    return Counts(), torch.randn(2, 8)

def raises():
    return Raises(), torch.randn(2, 8)
"""


@pytest.fixture
def model_file(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "bench_nets.py"
    path.write_text(FILE)
    yield path
    loaded.cache_clear()
    sys.modules.pop("bench_nets", None)


@pytest.fixture
def plan_file(model_file: Path, tmp_path: Path, one_thread: None) -> Path:
    """A plan that welds by force, so that nothing is timed for it."""
    made = TargetSource(target=f"{model_file}:net").make()
    plan = tw.plan(made.model, [w.inputs for w in made.workloads], force=True)
    assert plan.decisions
    plan.save(tmp_path / "plan.json")
    return tmp_path / "plan.json"


def source(path: Path, name: str, **options: object) -> TargetSource:
    return TargetSource(target=f"{path}:{name}", **options)  # type: ignore[arg-type]


def held(stage: Stage, name: str) -> Any:
    """The server of a side in this process."""
    worker = stage.workers[name]
    assert isinstance(worker, LocalWorker)
    return worker.held


def test_eager_and_welded_are_one_model_that_shows_the_one_or_the_other(
    model_file: Path, plan_file: Path
) -> None:
    with Stage(1) as stage:
        stage.start(["eager", "torchweld"])
        for name in stage.names:
            stage.ask(name, "load", source(model_file, "net", plan=str(plan_file)))
            stage.ask(name, "prepare", 0)
        eager, welded = held(stage, "eager"), held(stage, "torchweld")
        assert eager.runtime.model is welded.runtime.model
        stage.side("eager").time(1)
        assert stats(eager.runtime.model) == {}
        stage.side("torchweld").time(3)
        (found,) = stats(eager.runtime.model).values()
        stage.side("eager").time(1)
        assert stats(eager.runtime.model) == {}
    assert found.originals == {}


def test_a_plan_for_other_rows_is_reported_and_not_warned_about(
    model_file: Path, tmp_path: Path, one_thread: None
) -> None:
    made = TargetSource(target=f"{model_file}:net").make()
    plan = tw.plan(made.model, torch.randn(7, 8), force=True)
    plan.save(tmp_path / "other.json")
    with Stage(1) as stage:
        stage.start(["torchweld"])
        stage.ask("torchweld", "load", source(model_file, "net", plan=str(tmp_path / "other.json")))
        stage.ask("torchweld", "prepare", 0)
        stage.side("torchweld").time(1)
        details = held(stage, "torchweld").runtime.details()
    assert details["ran_the_original"]


def test_a_cell_for_every_input_verified_counted_and_timed(
    model_file: Path, plan_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeCompare(speedup=3.0)
    monkeypatch.setattr(stage_timing, "compare", fake)
    bench = plan_model("net")
    loaded, *cells = measure_model(bench, source(model_file, "net", plan=str(plan_file)))
    assert isinstance(loaded, model_bench.LoadedModel)
    assert loaded.workloads == ("2x8 float32", "3x8 float32")
    assert loaded.notes[-1].startswith("plan: ")
    for rows, cell in zip((2, 3), cells, strict=True):
        assert isinstance(cell, Cell)
        assert cell.name == f"{rows}x8 float32"
        eager, welded = cell.results
        assert check_of(cell, welded.name).ok
        assert comparison_of(cell, welded.name).speedup == 3.0
        assert (eager.cost.ops, welded.cost.ops) == (5, 1)
        assert welded.kernel == "1 welded"
        assert cell.flops == 2 * rows * 2 * 8 * 32
        assert cell.weight_bytes == 4 * (2 * 8 * 32 + 32 + 8)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mutates", "Mutates changes its input '2x8 float32': rounds would not do the same work"),
        ("counts", "Counts gives another output 0 when it is called again"),
        ("raises", "Raises does not run on '2x8 float32': RuntimeError: no such head"),
        ("nets", "has no 'nets'; there are:"),
    ],
)
def test_what_cannot_be_timed_is_refused_clearly(model_file: Path, name: str, message: str) -> None:
    with pytest.raises(TorchweldError, match=message):
        next(iter(measure_model(plan_model(name), source(model_file, name))))


def test_weights_have_to_be_the_same_in_every_process(
    model_file: Path, plan_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes are played by servers here, which do not share what they load."""

    class ApartBench(Stage):
        def ask(self, name: str, command: str, *arguments: Any) -> Any:
            if command == "load":
                loaded.cache_clear()
                found = super().ask(name, command, *arguments)
                if name == "eager":
                    with torch.no_grad():
                        held(self, name).runtime.model.mlp[0].weight.mul_(1.5)
                return found
            return super().ask(name, command, *arguments)

    monkeypatch.setattr(model_bench, "open_stage", lambda names, threads: ApartBench(1))
    given = source(model_file, "one", plan=str(plan_file))
    with pytest.raises(TorchweldError, match="the model has other weights in every process"):
        next(iter(measure_model(plan_model("net"), given)))


def test_a_sized_model_has_one_output_for_a_batch_of_tokens() -> None:
    given = SizedSource(target="policy", dtype="float32", batch=3, tokens=64)
    made = given.make()
    (workload,) = made.workloads
    with torch.no_grad():
        first, second = (workload.run(model) for model in (made.model, given.make().model))
    assert first.shape[0] == 3
    assert torch.equal(first, second)
    assert given.onnx_folder.name == "policy-3x64"


def test_unknown_peers_of_a_model() -> None:
    with pytest.raises(TorchweldError, match=r"unknown peer 'compil'; did you mean 'compile'\?"):
        plan_model("gpt", ("compil",))


@pytest.mark.skipif(sys.platform == "win32", reason="processes are parked by POSIX signals")
@pytest.mark.skipif(
    any(find_spec(name) is None for name in ("onnxruntime", "onnx", "onnxscript", "openvino")),
    reason="needs ONNX Runtime and OpenVINO",
)
def test_foreign_runtimes_get_the_exported_model(
    model_file: Path, plan_file: Path, tmp_path: Path
) -> None:
    torch.set_num_threads(1)
    bench = plan_model("net", ("onnxruntime", "openvino"), seconds=0.1)
    given = source(model_file, "one", plan=str(plan_file), kept_folder=tmp_path)
    _, cell = measure_model(bench, given)
    assert isinstance(cell, Cell)
    for name in ("onnxruntime", "openvino", "torchweld"):
        assert cell.result(name).refused is None
        assert check_of(cell, name).ok
        assert cell.result(name).comparison is not None
