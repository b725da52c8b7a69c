"""`torchweld profile` and `torchweld diff`: what they run, print, write and refuse."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.block_profiles import blocks, fused_blocks
from tests.support.made_profiles import make_faults
from tests.support.measured import measured

from torchweld.cli import profile_command as verb
from torchweld.cli.main import run
from torchweld.cli.output_files import check_targets
from torchweld.core.errors import NotMeasuredError, TorchweldError
from torchweld.profiles.profile import UNTOLD, Profile
from torchweld.report import chrome_trace

Captured = pytest.CaptureFixture[str]

MODEL = """
import torch
from torch import nn

def make():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    return model, torch.randn(4, 8)
"""


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Profiling replaced by a profile made by hand; what it was asked for is in the list."""
    asked: list[dict[str, Any]] = []

    def take(model: Any, inputs: Any, **options: Any) -> Profile:
        options.pop("progress")("profiling", 0.5)
        asked.append({"model": type(model).__name__, "inputs": inputs, **options})
        return blocks(training=options["training"])

    monkeypatch.setattr(verb, "take", take)
    return asked


def never(*_: object, **__: object) -> Profile:
    raise AssertionError("the profiling started")


def model_file(folder: Path) -> str:
    path = folder / "model.py"
    path.write_text(MODEL)
    return f"{path}:make"


# ---- end to end ----


@pytest.mark.usefixtures("brief_profiles")
def test_a_model_from_a_file_is_profiled_saved_and_compared(
    tmp_path: Path, capsys: Captured
) -> None:
    target = model_file(tmp_path)
    saved = str(tmp_path / "a.json")
    arguments = ["--steps", "2", "--save", saved, "--expect", "linear=2,pointwise=1"]
    assert run(["profile", target, *arguments]) == 0
    out, _ = capsys.readouterr()
    assert "Sequential: one step takes" in out
    for part in ("(0): Linear", "(1): GELU", "findings", "ops", "timing", "memory"):
        assert part in out
    assert "2 guesses confirmed" in out
    assert max(len(line) for line in out.splitlines()) <= 100
    assert run(["profile", saved, "--module", "0"]) == 0
    out, _ = capsys.readouterr()
    assert "\n0: " in f"\n{out}"
    assert run(["diff", saved, saved]) == 0
    out, _ = capsys.readouterr()
    assert "1.00x" in out
    assert "nothing changed" in out


# ---- what runs ----


def test_without_a_target_the_demo_is_profiled(
    taken: list[dict[str, Any]], capsys: Captured
) -> None:
    assert run(["profile"]) == 0
    (asked,) = taken
    assert asked["training"] is False
    assert asked["steps"] == 3
    out, err = capsys.readouterr()
    assert out.startswith("Net: one step takes")
    assert err == ""  # no progress where nobody looks


def test_options_reach_the_profiler(
    taken: list[dict[str, Any]], tmp_path: Path, capsys: Captured
) -> None:
    target = model_file(tmp_path)
    assert run(["profile", target, "--input", "3x8", "--training", "--steps", "5"]) == 0
    (asked,) = taken
    assert (asked["model"], asked["training"], asked["steps"]) == ("Sequential", True, 5)
    assert [list(given.tensors()[0].shape) for given in asked["inputs"]] == [[3, 8]]
    assert "one training step takes" in capsys.readouterr().out


def test_the_view_is_chosen_by_options(taken: list[dict[str, Any]], capsys: Captured) -> None:
    assert run(["profile", "--depth", "1"]) == 0
    assert "(mlp)" not in capsys.readouterr().out
    assert run(["profile", "--module", "layers.*.mlp", "--sort", "time"]) == 0
    assert capsys.readouterr().out.startswith("layers.*.mlp: ")
    assert run(["profile", "--module", "layers.9"]) == 2
    assert "no module 'layers.9'" in capsys.readouterr().err


def test_json_is_one_document_with_the_same_figures(
    taken: list[dict[str, Any]], capsys: Captured
) -> None:
    assert run(["profile", "--json", "--expect", "linear=1"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert data["about"]["what"] == "Net"
    assert data["step_us"] == pytest.approx(blocks().step_us)
    paths = [module["path"] for module in data["modules"]]
    assert "layers.3.mlp.up" in paths
    assert data["ops"][0]["name"] == "aten::addmm"
    assert isinstance(data["findings"], list)
    assert data["faults"] == {"not_measured": UNTOLD.reason}
    assert data["expected"]["holds"] is False
    assert data["expected"]["rows"][0]["counter"] == "linear"


def test_page_faults_of_training_are_in_the_text_and_in_json(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    made = blocks(training=True)
    faults = make_faults(4000, fault_us=0.1 * measured(made.step_us) / 4000)
    monkeypatch.setattr(verb, "take", lambda *_, **__: replace(made, faults=faults))
    assert run(["profile", "--training"]) == 0
    out, _ = capsys.readouterr()
    assert "4,000 page faults per step" in out
    assert "MALLOC_MMAP_MAX_=0 python train.py" in " ".join(out.split())
    assert run(["profile", "--training", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["faults"]["per_step"] == 4000
    assert data["faults"]["fault_bytes"] == 4096
    (finding,) = [each for each in data["findings"] if each["rule"] == "page-faults"]
    assert finding["saved_us"] == pytest.approx(0.1 * measured(made.step_us))


# ---- recordings ----


def test_a_saved_profile_and_a_trace_are_told_apart_by_content(
    tmp_path: Path, capsys: Captured
) -> None:
    profile, trace = tmp_path / "p.json.gz", tmp_path / "t.json"
    blocks().save(profile)
    trace.write_text(json.dumps(chrome_trace(blocks())))
    assert run(["profile", str(profile)]) == 0
    assert capsys.readouterr().out.startswith("Net: one step takes")
    assert run(["profile", str(trace)]) == 0
    assert capsys.readouterr().out.startswith("t.json: ")


@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "cannot be read"), (b"", "t.json"), (b"{}", "t.json"), (b"\x1f\x8bxx", "t.json")],
)
def test_a_file_that_is_neither_is_an_error(
    tmp_path: Path, capsys: Captured, content: bytes | None, said: str
) -> None:
    path = tmp_path / "t.json"
    if content is not None:
        path.write_bytes(content)
    assert run(["profile", str(path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert "Traceback" not in err


@pytest.mark.parametrize("option", [["--training"], ["--input", "8x8"], ["--steps", "4"]])
def test_a_recording_cannot_be_run_again(
    tmp_path: Path, capsys: Captured, option: list[str]
) -> None:
    path = tmp_path / "p.json"
    blocks().save(path)
    assert run(["profile", str(path), *option]) == 2
    assert "is a recording" in capsys.readouterr().err


# ---- files ----


def test_every_file_is_written_and_readable(
    taken: list[dict[str, Any]], tmp_path: Path, capsys: Captured
) -> None:
    files = {name: tmp_path / f"{name}.out" for name in ("save", "folded", "speedscope")} | {
        "trace": tmp_path / "trace.json.gz"
    }
    arguments = [part for name, path in files.items() for part in (f"--{name}", str(path))]
    assert run(["profile", *arguments]) == 0
    assert Profile.load(files["save"]) == blocks()
    assert files["folded"].read_text().startswith("Net;")
    assert json.loads(files["speedscope"].read_text())["profiles"]
    assert json.loads(gzip.decompress(files["trace"].read_bytes()))["traceEvents"]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        path.name for path in files.values()
    )


@pytest.mark.parametrize("option", ["--save", "--trace", "--folded", "--speedscope"])
def test_nothing_is_overwritten_without_force_and_nothing_runs_before_that_is_clear(
    monkeypatch: pytest.MonkeyPatch,
    taken: list[dict[str, Any]],
    tmp_path: Path,
    capsys: Captured,
    option: str,
) -> None:
    path = tmp_path / "out"
    path.write_text("precious")
    with monkeypatch.context() as patch:
        patch.setattr(verb, "take", never)
        assert run(["profile", option, str(path)]) == 2
        assert "--force replaces it" in capsys.readouterr().err
        assert path.read_text() == "precious"
        missing = tmp_path / "no" / "out"
        assert run(["profile", option, str(missing)]) == 2
        assert "there is no folder" in capsys.readouterr().err
        assert run(["profile", option, str(tmp_path), "--force"]) == 2
        assert "is a folder" in capsys.readouterr().err
    assert run(["profile", option, str(path), "--force"]) == 0
    assert path.read_text() != "precious"


def test_two_options_cannot_share_a_file(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with pytest.raises(TorchweldError, match="--save and --trace name the same file"):
        check_targets({"--save": path, "--folded": None, "--trace": path}, force=False)


def test_a_folder_that_cannot_be_written_is_found_before_the_work(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(**_: object) -> Any:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("torchweld.cli.output_files.tempfile.TemporaryFile", refuse)
    with pytest.raises(TorchweldError, match="cannot be written"):
        check_targets({"--save": tmp_path / "x"}, force=False)


# ---- exit codes ----


def test_an_expectation_that_fails_is_exit_code_1_with_the_truth(
    taken: list[dict[str, Any]], capsys: Captured
) -> None:
    assert run(["profile", "--expect", "linear=3,pointwise>=1"]) == 1
    out, _ = capsys.readouterr()
    assert "1 of 2 guesses did not hold" in out
    assert run(["profile", "--expect", "linear=9"]) == 0


@pytest.mark.parametrize(
    "arguments",
    [["--expect", "linears=3"], ["--sort", "size"], ["--steps", "1"], ["no-such-model"]],
)
def test_wrong_usage_is_exit_code_2_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured, arguments: list[str]
) -> None:
    monkeypatch.setattr(verb, "take", never)
    assert run(["profile", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err


def test_what_cannot_be_measured_is_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    def fail(*_: object, **__: object) -> Profile:
        raise NotMeasuredError("the profiler recorded nothing")

    monkeypatch.setattr(verb, "take", fail)
    assert run(["profile"]) == 2
    assert capsys.readouterr().err == "torchweld: the profiler recorded nothing\n"


# ---- diff ----


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., str]:
    def save(name: str, profile: Profile) -> str:
        path = tmp_path / f"{name}.json"
        profile.save(path)
        return str(path)

    return save


def test_diff_prints_what_changed(save: Callable[..., str], capsys: Captured) -> None:
    a, b = save("a", blocks()), save("b", fused_blocks())
    assert run(["diff", a, b]) == 0
    out, _ = capsys.readouterr()
    assert "layers.*.mlp  Mlp → FusedMLP" in out
    assert run(["diff", a, b, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["changes"][0]["path"] == "layers.*.mlp"


def test_diff_of_different_machines_is_exit_code_2_with_counts_alone(
    save: Callable[..., str], capsys: Captured
) -> None:
    a, b = save("a", blocks()), save("b", fused_blocks(about_inputs="8x64"))
    assert run(["diff", a, b]) == 2
    out, _ = capsys.readouterr()
    assert "not comparable: inputs: unknown against 8x64" in out
    assert "3 → 1" in out
    assert "3.07x" not in out
    assert run(["diff", a, b, "--force"]) == 0
    assert "3.07x" in capsys.readouterr().out


def test_diff_needs_two_files(capsys: Captured, tmp_path: Path) -> None:
    assert run(["diff", str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == 2
    assert "a.json" in capsys.readouterr().err
