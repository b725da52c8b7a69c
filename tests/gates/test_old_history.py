"""A history as version 0.1 wrote it: baselines with and without times, and a plan that was kept."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tests.support.gate_targets import write_model

from torchweld.cli.main import run
from torchweld.gates.gate_baseline import load_baseline
from torchweld.history import History

KEPT = Path(__file__).parents[1] / "data" / "history_0_1.sqlite"
TARGET = "model.py:make"


@pytest.fixture
def old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None) -> Path:
    """A copy of it, which is the history here, beside the model that it is about."""
    path = tmp_path / "history.sqlite"
    shutil.copy(KEPT, path)
    monkeypatch.setenv("TORCHWELD_HISTORY", str(path))
    write_model(tmp_path)
    monkeypatch.chdir(tmp_path)
    return path


def test_its_baselines_load_with_their_times(old: Path) -> None:
    with History.open(old) as history:
        timed = load_baseline(history, "main", TARGET, "accept")
        counted = load_baseline(history, "counters", TARGET, "accept")
    assert timed.counters.welded == ("layers.0", "layers.1")
    assert [one.block.path for one in timed.plan.planned] == ["layers.0", "layers.1"]
    (time,) = timed.times
    assert (time.workload, len(time.comparisons)) == ("128x64 float32", 5)
    assert time.speedup == 1.41
    assert time.interval[0] < 1.39 < 1.43 < time.interval[1]
    assert counted.times == ()


def test_a_gate_holds_the_model_to_them(old: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(["gate", "--baseline", "main", TARGET, "--no-time"])
    assert "2 blocks welded" in capsys.readouterr().out


def test_what_it_welded_nothing_for_is_told(old: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(["gate", "--baseline", "empty", TARGET, "--no-time"])
    said = " ".join(capsys.readouterr().out.split())
    assert "note: the baseline welds nothing" in said
    assert "2 of 2 could not be measured and are not held to anything" in said
    assert "layers.* not measured: the machine is not steady enough" in said


@pytest.mark.parametrize("name", ["main", "counters", "empty", "busy"])
def test_its_runs_are_shown_and_compared(
    old: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["history", "show", name]) == 0
    assert run(["history", "compare", name, name]) == 0
    assert TARGET in capsys.readouterr().out
