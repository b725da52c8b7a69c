"""`torchweld history`, and --save NAME of the verbs that measure."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.bench_samples import FakeCompare
from tests.support.block_profiles import blocks
from torch import nn

from torchweld.cli import fuse_command as fuse_verb
from torchweld.cli import profile_command as profile_verb
from torchweld.cli.main import run
from torchweld.core.measured_speed import Speed
from torchweld.history import Fingerprint, History, fingerprint_here, history_store
from torchweld.plans import planner, whole_model
from torchweld.plans.kernel_choice import TunedBlocks
from torchweld.plans.plan import Plan, Whole
from torchweld.plans.planner import PlanWithRounds
from torchweld.plans.whole_model import MeasuredWhole

Captured = pytest.CaptureFixture[str]
Say = Callable[..., tuple[int, str, str]]


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "history.sqlite"
    monkeypatch.setenv("TORCHWELD_HISTORY", str(path))
    return path


@pytest.fixture
def say(path: Path, capsys: Captured) -> Say:
    """Runs `torchweld`: exit code, output, errors."""

    def say(*arguments: str) -> tuple[int, str, str]:
        code = run(list(arguments))
        return code, *capsys.readouterr()

    return say


def keep(name: str, cells: dict[str, float], finish: bool = True) -> None:
    """A run whose cells have eager at 100 µs, and a fused side that is so many times as fast."""
    with History.open(create=True) as history:
        recording = history.begin(name, "bench", "a grid", {"rows": [1, 8]})
        for cell, speedup in cells.items():
            recording.add(
                cell,
                {"fused": {"speedup": speedup, "interval": [1.0, 9.0]}},
                {"eager_us": [99.0, 100.0, 170.0], "fused_us": [100.0 / speedup] * 3},
            )
        if finish:
            recording.finish({"cells": len(cells)})


# ---- listing and showing ----


def test_runs_are_listed_by_the_names_they_are_found_by(say: Say) -> None:
    keep("main", {"a": 2.0})
    keep("main", {"a": 2.1})
    keep("topic", {"a": 2.2}, finish=False)
    code, out, _ = say("history")
    assert code == 0
    lines = out.splitlines()
    assert [line.split()[0] for line in lines] == ["run", "topic", "main", "main~1"]
    assert lines[1].endswith("unfinished")
    assert all(len(line) <= 100 for line in lines)
    assert say("history", "list", "main")[1].count("a grid") == 2
    code, out, _ = say("history", "--json")
    assert [one["name"] for one in json.loads(out)] == ["topic", "main", "main"]
    assert json.loads(out)[0]["finished"] is False


def test_a_run_is_shown_with_its_figures(say: Say) -> None:
    keep("main", {"8 rows": 2.0})
    keep("main", {"8 rows": 4.0})
    code, out, _ = say("history", "show", "main~1")
    assert code == 0
    assert out.startswith("main: bench of a grid")
    assert f"torch {torch.__version__}" in out
    assert "settings: rows 1,8" in out
    for part in ("8 rows", "eager_us", "100", "fused_us", "50.0", "fused speed-up", "2.00"):
        assert part in out
    code, out, _ = say("history", "show", "main", "--json")
    (cell,) = json.loads(out)["cells"]
    assert cell["samples"]["eager_us"] == [99.0, 100.0, 170.0]
    assert cell["data"]["fused"]["speedup"] == 4.0


def test_an_interrupted_run_says_so(say: Say) -> None:
    keep("main", {"a": 2.0}, finish=False)
    assert "unfinished: it was interrupted" in " ".join(say("history", "show", "main")[1].split())


# ---- comparing ----


def test_two_runs_are_compared_cell_by_cell(say: Say) -> None:
    keep("old", {"a": 2.0, "b": 2.0, "gone": 1.0})
    keep("new", {"b": 1.0, "a": 3.0, "added": 1.0})
    code, out, _ = say("history", "compare", "old", "new")
    assert code == 0
    rows = [line.split() for line in out.splitlines()]
    assert ["a", "eager_us", "100", "100", "1.00x", "faster"] in rows
    assert ["fused_us", "50.0", "33.3", "1.50x", "faster"] in rows
    assert ["fused", "speed-up", "2.00", "3.00", "1.50x", "more"] in rows
    assert ["fused", "speed-up", "2.00", "1.00", "2.00x", "less"] in rows
    assert "only in A: gone" in out
    assert "only in B: added" in out
    assert "fingerprints differ" not in out
    code, out, _ = say("history", "compare", "old", "new", "--json")
    data = json.loads(out)
    assert data["comparable"] is True
    ratios = {(row["cell"], row["figure"]): row["ratio"] for row in data["rows"]}
    assert ratios["a", "fused_us"] == pytest.approx(1.5)
    assert ratios["b", "fused speed-up"] == pytest.approx(0.5)


def test_runs_without_a_figure_in_common_have_no_table(say: Say) -> None:
    keep("old", {"a": 2.0})
    keep("new", {"b": 2.0})
    code, out, _ = say("history", "compare", "old", "new")
    assert code == 0
    assert out.splitlines()[2:] == [
        "only in A: a",
        "only in B: b",
        "no cell of one name has figures in both",
    ]


def test_a_run_is_compared_with_the_one_before(say: Say) -> None:
    keep("main", {"a": 2.0})
    keep("main", {"a": 4.0})
    assert "2.00x more" in say("history", "compare", "main~1", "main")[1]


def test_series_of_log_ratios_are_speed_ups(say: Say) -> None:
    for name, ratios in (("a", [0.0, 0.7, 0.7]), ("b", [0.7, 0.0, 0.0])):
        with History.open(create=True) as history:
            samples = {"log_ratios": ratios, "control_log_ratios": [0.1, 0.1]}
            history.begin(name, "bench", "x", {}).add("cell", {"speedup": 9.0}, samples)
    code, out, _ = say("history", "compare", "a", "b")
    assert code == 0
    assert ["cell", "speed-up", "2.01", "1.00", "2.01x", "less"] in [
        line.split() for line in out.splitlines()
    ]
    assert "9.00" not in out  # what the samples say is the better witness
    assert "control" not in out


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """A run `there` of another machine."""

    def other() -> Fingerprint:
        versions = {"openvino": "1.0"}
        return replace(
            fingerprint_here(), key="0123456789ab", cpu="Z80", threads=64, versions=versions
        )

    with monkeypatch.context() as patch:
        patch.setattr(history_store, "fingerprint_here", other)
        keep("there", {"a": 2.0})


@pytest.mark.usefixtures("elsewhere")
def test_figures_of_different_machines_are_not_compared(say: Say) -> None:
    keep("here", {"a": 3.0})
    code, out, _ = say("history", "compare", "there", "here")
    assert code == 2
    assert "fingerprints differ: cpu Z80 against" in out
    assert "threads 64 against" in out
    assert "openvino 1.0 against" in out
    assert "not compared" in out
    assert "1.50x" not in out
    code, out, _ = say("history", "compare", "there", "here", "--json")
    assert code == 2
    assert json.loads(out)["rows"] == []


# ---- forgetting, and what goes wrong ----


def test_a_name_is_forgotten(say: Say) -> None:
    keep("main", {"a": 2.0})
    keep("main", {"a": 2.0})
    keep("other", {"a": 2.0})
    assert say("history", "forget", "main")[1] == "forgot 2 runs of main\n"
    assert "main" not in say("history")[1]
    assert json.loads(say("history", "forget", "other", "--json")[1])["forgotten"] == 1
    assert say("history")[1] == "no run was kept yet; --save NAME keeps one\n"


@pytest.mark.parametrize("verb", [["show"], ["forget"], ["list"], ["compare", "main"]])
def test_an_unknown_name_is_met_with_the_nearest(say: Say, verb: list[str]) -> None:
    keep("main", {"a": 2.0})
    code, out, err = say("history", *verb, "mian")
    assert (code, out) == (2, "")
    assert "did you mean 'main'?" in err


def test_a_run_further_back_than_there_are_is_refused(say: Say) -> None:
    keep("main", {"a": 2.0})
    code, _, err = say("history", "show", "main~1")
    assert code == 2
    assert "1 run of that name, the oldest is main" in err
    assert say("history", "show", "main~x")[0] == 2


def test_nothing_kept_yet_says_how(say: Say, path: Path) -> None:
    code, out, err = say("history")
    assert (code, out) == (2, "")
    assert f"there is no history at {path}" in err
    assert not path.exists()


def test_another_file_is_named_before_or_after_the_verb(say: Say, tmp_path: Path) -> None:
    keep("main", {"a": 2.0})
    other = str(tmp_path / "other.sqlite")
    (tmp_path / "history.sqlite").rename(other)
    assert say("history")[0] == 2
    assert say("history", "--history", other, "show", "main")[0] == 0
    assert say("history", "show", "main", "--history", other)[0] == 0
    assert json.loads(say("history", "--json", "--history", other, "list")[1])[0]["name"] == "main"


# ---- --save ----


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> Plan:
    """`fuse` plans without measuring, and this comes out."""
    one = Whole(
        workload="1x64 float32",
        verdict="faster",
        speed=Speed(speedup=2.0, interval=(1.9, 2.1), before_us=100.0, after_us=50.0),
        predicted=2.5,
        promised=2.0,
        ceiling=3.0,
        error_ratio=1.0,
    )
    made = Plan(
        model="Policy",
        structure="",
        training=False,
        fingerprint="",
        torch=torch.__version__,
        planned=(),
        whole=(one,),
    )
    timed = PlanWithRounds(plan=made, wholes=(MeasuredWhole(whole=one),))
    monkeypatch.setattr(fuse_verb, "plan_with_rounds", lambda *_: timed)
    return made


def test_a_plan_is_kept_and_shown(say: Say, planned: Plan) -> None:
    code, _, _ = say("fuse", "policy", "--no-profile", "--save", "main")
    assert code == 0
    code, out, _ = say("history", "show", "main")
    assert out.startswith("main: fuse of policy")
    rows = [line.split() for line in out.splitlines()]
    assert ["before_us", "100"] in rows
    assert ["after_us", "50.0"] in rows
    assert ["1x64", "float32", "speed-up", "2.00"] in rows
    data = json.loads(say("history", "show", "main", "--json")[1])
    assert data["cells"][-1]["data"]["plan"]["model"] == "Policy"


def test_a_plan_is_kept_with_the_rounds_of_the_whole_model(
    say: Say, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(whole_model, "compare", FakeCompare(speedup=3.2))

    def plan_with_rounds(model: nn.Module, given: list[Any], _: object) -> PlanWithRounds:
        """Welds by force, and times the whole all the same."""
        made = planner.plan(model, given, force=True)
        tuned = TunedBlocks(planned=made.planned, training=False)
        one = whole_model.measure_whole(model, tuned, given[0], budget_s=1.0)
        return PlanWithRounds(plan=replace(made, whole=(one.whole,)), wholes=(one,))

    monkeypatch.setattr(fuse_verb, "plan_with_rounds", plan_with_rounds)
    file = tmp_path / "plan.json"
    assert say("fuse", "policy", "--no-profile", "--save", "main", "--out", str(file))[0] == 0
    timed, plan = json.loads(say("history", "show", "main", "--json")[1])["cells"]
    assert timed["data"]["speedup"] == 3.2
    assert timed["samples"] == {"log_ratios": [0.5, 0.6], "control_log_ratios": [0.0, 0.1]}
    assert plan["samples"] == {}
    assert "log_ratios" not in file.read_text()  # a plan stays small
    assert "log_ratios" not in json.dumps(plan["data"])


def test_a_profile_is_kept_by_module(say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile_verb, "take", lambda *_, **__: blocks())
    assert say("profile", "--save", "main")[0] == 0
    data = json.loads(say("history", "show", "main", "--json")[1])
    assert (data["kind"], data["what"]) == ("profile", "gpt")
    cells = {cell["cell"]: cell["data"] for cell in data["cells"]}
    assert cells["step"]["step_us"] == pytest.approx(blocks().step_us)
    assert cells["layers.3.mlp.up"]["total_us"] > 0
    assert cells["layers.3.mlp"]["launches"] > 0
    assert cells["the model"]["account"]["arithmetic"] > 0
    assert say("profile", "--save", "main")[0] == 0
    assert "1.00x faster" in say("history", "compare", "main~1", "main")[1]


def test_a_file_is_still_a_file(
    say: Say, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(profile_verb, "take", lambda *_, **__: blocks())
    for name in ("a.json", "b.json.gz", "./c"):
        assert say("profile", "--save", name)[0] == 0
        assert (tmp_path / name).is_file()
    assert not path.exists()


@pytest.mark.parametrize("verb", ["fuse", "profile"])
def test_what_cannot_be_kept_is_found_before_anything_is_measured(
    say: Say, verb: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("measuring began")

    monkeypatch.setattr(fuse_verb, "resolve", never)
    monkeypatch.setattr(profile_verb, "resolve", never)
    code, _, err = say(verb, "policy", "--save", "two words")
    assert code == 2
    assert "cannot be the name of a run" in err
    assert not path.exists()
    path.write_text("not a database, but long enough to be looked at as one" * 20)
    code, _, err = say(verb, "policy", "--save", "main")
    assert code == 2
    assert "not an SQLite file" in err


def test_a_recording_is_not_kept_as_if_it_were_measured_here(say: Say, tmp_path: Path) -> None:
    blocks().save(tmp_path / "p.json")
    code, _, err = say("profile", str(tmp_path / "p.json"), "--save", "main")
    assert code == 2
    assert "is a recording" in err
