"""A profile that was saved before the modules moved, and before page faults were counted."""

import json
from pathlib import Path

import pytest
from tests.support.measured import measured

from torchweld.cli.main import run
from torchweld.findings import diagnose
from torchweld.profiles.accounting.time_account import account
from torchweld.profiles.profile import Profile
from torchweld.profiles.step_faults import SAVED_BEFORE

FILE = Path(__file__).parents[1] / "data" / "profile_2.json"


def test_it_loads_and_says_the_same_when_it_is_saved_again(tmp_path: Path) -> None:
    found = Profile.load(FILE)
    assert [module.path for module in found.modules][:3] == ["", "body", "body.0"]
    assert len(found.ops) == 32
    assert found.peaks is not None
    assert found.peaks.fingerprint == found.about.fingerprint
    found.save(tmp_path / "again.json")
    again, before = (json.loads(path.read_text()) for path in (tmp_path / "again.json", FILE))
    assert (before.pop("torchweld_profile"), again.pop("torchweld_profile")) == (2, 4)
    assert again.pop("faults") == {"not_measured": SAVED_BEFORE.reason}
    assert list(again.items()) == list(before.items())


def test_its_page_faults_are_not_measured_which_is_not_none() -> None:
    assert Profile.load(FILE).faults == SAVED_BEFORE


def test_it_is_accounted_diagnosed_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    found = Profile.load(FILE)
    made = account(found)
    assert measured(made.explained) > 0.5
    assert diagnose(found, made)
    assert run(["diff", str(FILE), str(FILE)]) == 0
    assert "Policy" in capsys.readouterr().out
