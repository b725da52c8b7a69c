"""A whole model in training: planned and verified apart, then timed, eager against welded."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.support.bench_samples import FakeCompare, check_of

import torchweld as tw
from torchweld.bench import Bench, Cell, plan_model, stage_timing, trained_model_bench
from torchweld.bench.bench_participants import EAGER_ALONE
from torchweld.bench.bench_stages import Stage
from torchweld.bench.model_bench import LoadedModel
from torchweld.bench.model_sources import TargetSource
from torchweld.bench.plan_judge import PlanJudge
from torchweld.bench.runtimes.runtime import loaded
from torchweld.bench.runtimes.runtime_names import Runtimes
from torchweld.bench.runtimes.torchweld_runtimes import PlannedRuntime
from torchweld.bench.trained_model_bench import measure_trained_model
from torchweld.bench.training_step import Malloc, TrainingStep
from torchweld.bench.whole_model_check import output_check
from torchweld.core.errors import TorchweldError
from torchweld.numerics.model_check import TensorCheck
from torchweld.welds.swapping.swap import stats

FILE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
        self.norm = nn.LayerNorm(8)

    def forward(self, x):
        return self.norm(self.mlp(x))

class Counts(Net):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return self.mlp(x) * self.calls

def net():
    return Net(), torch.randn(2, 8)

def two():
    return Net(), [torch.randn(2, 8), torch.randn(3, 8)]

def counts():
    return Counts(), torch.randn(2, 8)
"""
PLAIN, ADAMW = TrainingStep(), TrainingStep(optimizer="adamw")


@pytest.fixture
def model_file(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "trained_nets.py"
    path.write_text(FILE)
    yield path
    loaded.cache_clear()
    sys.modules.pop("trained_nets", None)


@pytest.fixture
def plan_file(model_file: Path, tmp_path: Path, one_thread: None) -> str:
    """A plan that welds by force, so that nothing is timed for it."""
    made = TargetSource(target=f"{model_file}:two", training=True).make()
    assert made.model.training
    inputs = [workload.inputs for workload in made.workloads]
    plan = tw.plan(made.model, inputs, training=True, force=True)
    assert plan.decisions
    plan.save(tmp_path / "plan.json")
    return str(tmp_path / "plan.json")


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kinds of malloc that sides were opened for. They run in this process, untimed."""
    found: list[str] = []

    def local(threads: int, runtimes: Runtimes, malloc: Malloc) -> Stage:
        found.append(malloc)
        return Stage(threads, runtimes)

    monkeypatch.setattr(trained_model_bench, "open_training_stage", local)
    monkeypatch.setattr(stage_timing, "compare", FakeCompare(speedup=3.0))
    return found


def source(path: Path, name: str, **options: object) -> TargetSource:
    return TargetSource(target=f"{path}:{name}", training=True, **options)  # type: ignore[arg-type]


def test_each_input_has_a_cell_for_each_step_in_processes_of_each_malloc(
    model_file: Path, plan_file: str, opened: list[str]
) -> None:
    bench = plan_model("net", training=True)
    assert bench.names == ("eager", "torchweld")
    steps = [PLAIN, ADAMW, replace(ADAMW, malloc="tuned")]
    given = source(model_file, "two", plan=plan_file)
    first, *found = measure_trained_model(bench, "net", given, steps)
    assert isinstance(first, LoadedModel)
    assert first.workloads == (
        "net 2x8 float32, forward and backward",
        "net 2x8 float32, with adamw",
        "net 3x8 float32, forward and backward",
        "net 3x8 float32, with adamw",
    )
    assert opened == ["stock", "tuned"]
    cells = [one for one in found if isinstance(one, Cell)]
    (second,) = [one for one in found if isinstance(one, LoadedModel)]
    assert second.notes[-1].startswith("plan with malloc tuned: welded 1 of 1 MLPs")
    assert [cell.name for cell in cells] == [*first.workloads, *second.workloads]
    for cell in cells:
        assert cell.what == cell.model
        assert cell.result("torchweld").kernel == "1 welded"
        assert cell.result("torchweld").refused is None
        assert check_of(cell, "torchweld").ok
        eager, welded = (result.training for result in cell.results)
        assert eager is not None
        assert welded is not None
        assert welded.saved_bytes < eager.saved_bytes  # type: ignore[operator]
    # Forward and two products of the same size for each, but none for the input's gradient.
    assert cells[0].flops == 2 * 2 * 8 * 32 * (2 + 2 + 1)
    done = replace(bench, cells=tuple(cells))
    assert Bench.from_dict(json.loads(done.to_json())) == done


def test_sides_that_train_no_models_are_left_out(
    model_file: Path, plan_file: str, opened: list[str]
) -> None:
    assert plan_model("net", ("compile",), training=True).left_out == {"compile": EAGER_ALONE}
    bench = replace(
        plan_model("net", training=True),
        backends=("torchweld", "torchweld:recompute"),
        against=("compile",),
    )
    _, cell = measure_trained_model(
        bench, "net", source(model_file, "net", plan=plan_file), [PLAIN]
    )
    assert isinstance(cell, Cell)
    refused = {result.name: result.refused for result in cell.results}
    assert refused == {
        "eager": None,
        "compile": EAGER_ALONE,
        "torchweld:recompute": EAGER_ALONE,
        "torchweld": None,
    }


def test_a_model_that_learns_something_else_is_not_timed(
    model_file: Path, plan_file: str, opened: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = PlannedRuntime.show

    def spoiled(self: PlannedRuntime) -> None:
        real(self)
        handle = self.model.norm.weight.register_hook(lambda grad: 1.5 * grad)  # type: ignore[union-attr,operator]
        monkeypatch.setattr(PlanJudge, "handle", handle, raising=False)

    monkeypatch.setattr(PlannedRuntime, "show", spoiled)
    bench = plan_model("net", training=True)
    _, cell = measure_trained_model(
        bench, "net", source(model_file, "net", plan=plan_file), [PLAIN]
    )
    assert isinstance(cell, Cell)
    check = check_of(cell, "torchweld")
    assert not check.ok
    assert "grad norm.weight is off by" in str(check.reason)
    assert cell.result("torchweld").comparison is None


def test_a_welded_model_that_runs_the_original_code_is_not_timed(
    model_file: Path, tmp_path: Path, opened: list[str], one_thread: None
) -> None:
    """Its plan is for calls without gradients."""
    made = TargetSource(target=f"{model_file}:net").make()
    plan = tw.plan(made.model, torch.randn(2, 8), force=True)
    plan.save(tmp_path / "other.json")
    given = source(model_file, "net", plan=str(tmp_path / "other.json"))
    bench = plan_model("net", training=True)
    _, cell = measure_trained_model(bench, "net", given, [PLAIN])
    assert isinstance(cell, Cell)
    refused = cell.result("torchweld").refused
    assert refused == "all welded blocks ran the original code: training mode"
    assert cell.result("torchweld").comparison is None


def test_a_model_that_does_other_work_in_every_step_is_refused(
    model_file: Path, opened: list[str], one_thread: None
) -> None:
    with pytest.raises(TorchweldError, match="Counts gives another output 0 when it is called"):
        next(measure_trained_model(plan_model("n"), "n", source(model_file, "counts"), [PLAIN]))


def test_of_many_wrong_gradients_some_are_told() -> None:
    wrong = TensorCheck(
        name="grad", ok=False, error=2.0, reference_error=1.0, allowed=1.0, reason="is off"
    )
    found = output_check([wrong] * 5)
    assert found.reason == "grad is off; grad is off; grad is off; 2 more likewise"
    assert output_check([replace(wrong, ok=True)]).reason is None


def test_the_plan_is_for_training_and_its_file_is_what_sides_get(
    model_file: Path, tmp_path: Path, one_thread: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []

    def made(model: torch.nn.Module, inputs: object, **options: object) -> tw.Plan:
        asked.append(bool(options["training"]))
        return tw.plan(model, inputs, training=True, force=True)

    monkeypatch.setattr("torchweld.bench.runtimes.torchweld_runtimes.plan", made)
    judge = PlanJudge(1)
    file = tmp_path / "written.json"
    with torch.no_grad():
        found = judge.load(source(model_file, "net"), str(file))
        assert judge.judge(0).ok
    assert asked == [True]
    assert found["workloads"] == ["2x8 float32"]
    assert tw.Plan.load(file).training
    assert stats(judge.runtime.model) == {}  # the original is shown again
