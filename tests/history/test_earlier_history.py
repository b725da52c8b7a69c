"""A history that was written before the modules moved: a profile, a baseline and a plan in it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from torchweld.cli.main import run
from torchweld.gates.gate_baseline import load_baseline
from torchweld.history import History
from torchweld.timing import Comparison

DATA = Path(__file__).parents[1] / "data"


@pytest.fixture
def earlier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "history.sqlite"
    shutil.copy(DATA / "history_0_1_rooms.sqlite", path)
    monkeypatch.setenv("TORCHWELD_HISTORY", str(path))
    return path


@pytest.mark.usefixtures("earlier")
def test_its_runs_are_listed_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["history", "list"]) == 0
    listed = capsys.readouterr().out
    for name, figure in (("prof", "7.75"), ("main", "3.98"), ("fuse1", "4.06")):
        assert f"{name}  policy" in listed
        assert run(["history", "show", name]) == 0
        assert figure in capsys.readouterr().out
        assert run(["history", "show", name, "--json"]) == 0
    assert run(["history", "compare", "main", "main"]) == 0


def test_its_baseline_is_read_with_plan_counters_and_times(earlier: Path) -> None:
    with History.open(earlier) as history:
        found = load_baseline(history, "main", "policy", "accept")
    (planned,) = found.plan.planned
    assert (planned.block.kind, planned.welded) == ("Policy", True)
    assert found.counters.welded == ("",)
    (time,) = found.times
    assert (time.workload, len(time.comparisons)) == ("1x64 float32", 5)
    assert time.comparisons[0] == Comparison.load(DATA / "comparison_2.json")
