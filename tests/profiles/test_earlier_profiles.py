"""A profile that was saved before the modules moved."""

from pathlib import Path

import pytest
from tests.support.measured import measured

from torchweld.cli.main import run
from torchweld.findings import diagnose
from torchweld.profiles.accounting.time_account import account
from torchweld.profiles.profile import Profile

FILE = Path(__file__).parents[1] / "data" / "profile_2.json"


def test_it_loads_and_is_the_same_when_it_is_saved_again(tmp_path: Path) -> None:
    found = Profile.load(FILE)
    assert [module.path for module in found.modules][:3] == ["", "body", "body.0"]
    assert len(found.ops) == 32
    assert found.peaks is not None
    assert found.peaks.fingerprint == found.about.fingerprint
    found.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_text() == FILE.read_text()


def test_it_is_accounted_diagnosed_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    found = Profile.load(FILE)
    made = account(found)
    assert measured(made.explained) > 0.5
    assert diagnose(found, made)
    assert run(["diff", str(FILE), str(FILE)]) == 0
    assert "Policy" in capsys.readouterr().out
