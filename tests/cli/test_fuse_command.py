"""`torchweld fuse` from the shell."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from torchweld.cli.main import run
from torchweld.plans.plan import Plan


def test_a_model_is_planned_and_the_plan_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan.json"
    assert run(["fuse", "policy", "--quick", "--no-profile", "--out", str(out)]) == 0
    text = capsys.readouterr().out
    assert "welded" in text
    assert Plan.load(out).model == "Policy"
    assert run(["fuse", "policy", "--quick", "--no-profile", "--out", str(out)]) == 2
    assert "--force replaces it" in capsys.readouterr().err


def test_json_is_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["fuse", "policy", "--quick", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["model"] == "Policy"
    assert data["planned"]


def test_an_unknown_model_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["fuse", "polcy"]) == 2
    assert "did you mean 'policy'" in capsys.readouterr().err


def test_how_long_to_measure_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["fuse", "policy", "--quick", "--budget", "30"]) == 2
    assert "--quick and --budget each set the time" in capsys.readouterr().err
