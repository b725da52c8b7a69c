"""`torchweld bench --training`: options, presets, goals, files; nothing is timed."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.bench_samples import FakeCompare
from tests.support.screen_texts import squeezed

import torchweld as tw
from torchweld.bench import Bench, block_bench, trained_model_bench
from torchweld.bench.bench_stages import Stage
from torchweld.bench.model_sources import TargetSource
from torchweld.bench.runtimes.runtime_names import Runtimes
from torchweld.bench.training_step import Malloc, TrainingStep
from torchweld.cli import bench_command
from torchweld.core.errors import TorchweldError
from torchweld.history import History

Bencher = Callable[..., tuple[int, str, str]]
SMALL = ("--training", "--block", "gelu", "--sizes", "8x16x8", "--rows", "3", "--against", "eager")


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    def local(threads: int, runtimes: Runtimes, malloc: Malloc) -> Stage:
        return Stage(threads, runtimes)

    monkeypatch.setattr(block_bench, "open_training_stage", local)
    monkeypatch.setattr(trained_model_bench, "open_training_stage", local)


@pytest.fixture
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Runs nothing; has the cells and models that would be measured."""
    asked: dict[str, list[str]] = {"cells": [], "models": []}

    def run_cases(planned: Bench, cases: list[object], *_: object) -> Bench:
        asked["cells"] += map(str, cases)
        return planned

    def run_trained(planned: Bench, source: TargetSource, steps: list[object], *_: object) -> Bench:
        asked["models"] += [f"{source.target} {' '.join(source.inputs)}" for _ in steps]
        return planned

    monkeypatch.setattr(bench_command, "run_cases", run_cases)
    monkeypatch.setattr(bench_command, "run_trained_model", run_trained)
    return asked


def steps(out: str) -> list[tuple[int, TrainingStep | None]]:
    cases = [cell.case for cell in Bench.from_dict(json.loads(out)).cells]
    return [(case.blocks, case.training) for case in cases if case is not None]


def test_a_step_is_what_the_options_say(bench: Bencher) -> None:
    code, out, err = bench(*SMALL, "--json")
    assert (code, err) == (0, "")
    assert steps(out) == [(1, TrainingStep())]
    given = ("--accumulate", "--autocast", "bf16", "--malloc", "tuned,stock", "--blocks", "2")
    _, out, _ = bench(*SMALL, *given, "--json")
    plain = {"accumulate": True, "autocast": "bfloat16"}
    assert steps(out) == [
        (2, TrainingStep(**plain, malloc="stock")),  # type: ignore[arg-type]
        (2, TrainingStep(**plain, malloc="tuned")),  # type: ignore[arg-type]
    ]
    _, out, _ = bench(*SMALL, "--optimizer", "adamw", "--dtype", "fp16", "--json")
    assert steps(out) == [(1, TrainingStep(optimizer="adamw"))]


def test_tables_say_what_steps_keep_and_fit_100_columns(bench: Bencher) -> None:
    code, out, err = bench(*SMALL, "--accumulate")
    assert (code, err) == (0, "")
    assert "what a step keeps and touches   eager→torchweld:recompute→torchweld" in out
    assert "3 fp32 acc" in out
    assert max(map(len, out.splitlines())) <= 100
    assert "torchweld is 3.20x as fast as eager at 3 × 8→16→8 gelu fp32 acc training" in squeezed(
        out
    )


def test_csv_and_files_have_all_of_it(bench: Bencher, tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    _, out, _ = bench(*SMALL, "--csv", "--out", str(file))
    rows = list(csv.DictReader(io.StringIO(out)))
    assert [row["implementation"] for row in rows] == ["eager", "torchweld:recompute", "torchweld"]
    assert float(rows[1]["saved_ratio"]) < 1.0
    code, out, _ = bench("--show", str(file))
    assert code == 0
    assert "what a step keeps and touches" in out


def test_without_options_torch_compile_takes_part(
    bench: Bencher, unmeasured: dict[str, list[str]]
) -> None:
    _, out, _ = bench("--training", "--json")
    found = Bench.from_dict(json.loads(out))
    assert "compile" in (*found.against, *found.left_out)
    assert len(unmeasured["cells"]) == 5
    _, out, _ = bench("--training", "--against", "onnxruntime")
    assert "left out: onnxruntime: it does not train" in out


def test_presets_of_blocks_can_be_trained(bench: Bencher, unmeasured: dict[str, list[str]]) -> None:
    bench("--preset", "blog", "--training", "--rows", "8")
    assert unmeasured["cells"] == [
        "nn.Linear: 8 × 768→3072 linear fp32 training",
        "MLP, gelu: 8 × 768→3072→768 gelu fp32 training",
        "GeGLU: 8 × 768→3072→768 gelu-gated fp32 training",
    ]


# ---- the preset ----


def test_the_preset_measures_all_of_its_parts_or_those_that_are_named(
    bench: Bencher, unmeasured: dict[str, list[str]]
) -> None:
    _, out, _ = bench("--preset", "training", "--json")
    assert Bench.from_dict(json.loads(out)).names == (
        *("eager", "compile", "torchweld:recompute", "torchweld"),
    )
    assert (len(unmeasured["cells"]), len(unmeasured["models"])) == (32, 4)
    unmeasured["cells"].clear()
    unmeasured["models"].clear()
    bench("--preset", "training", "--only", "gated,accumulate")
    assert (len(unmeasured["cells"]), len(unmeasured["models"])) == (5, 0)
    bench("--preset", "training", "--only", "gpt2")
    assert unmeasured["models"] == ["hf:gpt2 input_ids=1x32:int64"] * 4
    unmeasured["cells"].clear()
    bench("--preset", "training", "--rows", "8")  # a model has no rows
    assert len(unmeasured["models"]) == 4
    assert all(cell.startswith("8 × ") for cell in unmeasured["cells"])


def test_goals_of_training_are_judged(bench: Bencher, fake: FakeCompare) -> None:
    part = ("--preset", "training", "--only", "small", "--rows", "1", "--against", "eager")
    code, out, _ = bench(*part)
    assert code == 0
    words = squeezed(out)
    assert "64→256→64 and 128-wide chains, mean 2.20 3.20 of 2 cells met in part" in words
    assert "not measured" in words
    fake.speedup, fake.verdict = 0.9, "slower"
    code, out, _ = bench(*part, "--goals")
    assert code == 1
    assert "0.90 of 2 cells missed" in squeezed(out)


def test_a_model_that_cannot_be_had_leaves_its_goals_unmeasured(
    bench: Bencher, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_: object) -> Bench:
        raise TorchweldError("it needs transformers; install it")

    monkeypatch.setattr(bench_command, "run_trained_model", gone)
    code, out, _ = bench("--preset", "training", "--only", "gpt2", "--goals")
    assert code == 2
    assert "left out: hf:gpt2: it needs transformers; install it" in out


# ---- a whole model ----


def test_a_target_is_trained_alone_and_with_its_optimizer(bench: Bencher, tmp_path: Path) -> None:
    made = TargetSource(target="policy", training=True).make()
    inputs = [workload.inputs for workload in made.workloads]
    plan = tw.plan(made.model, inputs, training=True, force=True)
    plan.save(tmp_path / "plan.json")
    given = ("policy", "--training", "--plan", str(tmp_path / "plan.json"))
    code, out, err = bench(*given, "--optimizer", "adamw", "--against", "compile")
    assert (code, err) == (0, "")
    assert out.startswith("policy; steps of training; torch")
    assert "left out: compile: whole models are trained in eager and welded" in squeezed(out)
    assert "plan: welded" in out
    assert "fp32 adamw" in out
    assert "1 welded" in out
    _, out, _ = bench(*given, "--json")
    (cell,) = Bench.from_dict(json.loads(out)).cells
    assert cell.name == "policy 1x64 float32, forward and backward"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--accumulate",), "--accumulate goes with --training; add it"),
        (("--blocks", "3"), "--blocks goes with --training; add it"),
        (("--malloc", "tuned"), "--malloc goes with --training; add it"),
        (("--training", "--malloc", "tunned"), "unknown malloc 'tunned'; did you mean 'tuned'?"),
        (("--training", "--autocast", "fp32"), "unknown autocast dtype 'float32'"),
        (("--training", "--optimizer", "adam"), "'adam' is not one of 'adamw', 'sgd'"),
        (("--training", "--callers", "2"), "--callers goes with calls without gradients"),
        (("--training", "--table", "t.json"), "--table goes with calls without gradients"),
        (("--training", "--backend", "cpu"), "unknown backend in training 'cpu'"),
        (("--training", "--preset", "peers"), "--preset training has those of training"),
        (("--preset", "training", "--accumulate"), "--preset training has steps of its own"),
        (("--preset", "training", "--only", "gelus"), "did you mean 'gelu'?"),
        (("gpt", "--training", "--blocks", "2"), "--blocks makes a stack of blocks"),
        (("--training", "--sizes", "8x4x2", "--blocks", "2"), "cannot follow each other"),
        (("--training", "--optimizer", "sgd", "--accumulate"), "has no optimizer"),
    ],
)
def test_options_that_do_not_go_together(
    bench: Bencher, options: tuple[str, ...], message: str
) -> None:
    code, _, err = bench(*options)
    assert code == 2
    assert message in squeezed(err)


def test_a_run_is_kept_under_what_was_typed(bench: Bencher, tmp_path: Path) -> None:
    file = tmp_path / "runs.sqlite"
    code, _, err = bench(*SMALL, "--accumulate", "--save", "mine", "--history", str(file))
    assert (code, err) == (0, "")
    with History.open(file) as history:
        (run,) = history.runs()
    assert run.what == "--block gelu --sizes 8x16x8 --rows 3 --training --accumulate"
    assert run.settings["training"] is True


def test_help_has_an_example_of_training(bench: Bencher) -> None:
    _, out, _ = bench("--help")
    said = squeezed(out)
    assert "torchweld bench --training --rows 8,32 --malloc stock,tuned --blocks 6" in said
    for option in ("--training", "--accumulate", "--autocast", "--malloc", "--optimizer"):
        assert option in said
