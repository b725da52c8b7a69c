"""What this machine costs is measured when a profile is made, and the profile carries it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.support.made_profiles import Builder
from torch import nn

from torchweld import ops
from torchweld.core.not_measured import NotMeasured
from torchweld.machine import fingerprint
from torchweld.profiles.profile import Profile
from torchweld.profiles.recording import pricing_machine
from torchweld.profiles.recording.live_profile import profile


@pytest.mark.usefixtures("brief_profiles")
def test_a_live_profile_says_what_its_machine_costs() -> None:
    taken = profile(nn.Linear(3, 5), torch.randn(2, 3), steps=2)
    assert taken.fused_call_us == pricing_machine._least_us > 0
    assert taken.machine.op_cost_us == taken.op_cost_us > 0
    assert taken.machine.fingerprint == fingerprint.key_here()


def test_the_best_call_ever_seen_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pricing_machine, "_least_us", 1e-9)
    assert pricing_machine.fused_call_us() == 1e-9


def test_the_users_random_numbers_stay_as_they_are() -> None:
    before = torch.get_rng_state()
    pricing_machine.fused_call_us()
    assert torch.equal(torch.get_rng_state(), before)


def test_it_does_not_depend_on_where_the_user_makes_tensors() -> None:
    with torch.device("meta"), torch.inference_mode():
        assert isinstance(pricing_machine.fused_call_us(), float)


def test_without_kernels_a_fused_call_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "compiled", None)
    assert isinstance(pricing_machine.fused_call_us(), NotMeasured)


@pytest.mark.parametrize("known", [2.5, NotMeasured("no kernels")])
def test_it_is_saved_with_the_profile(known: float | NotMeasured, tmp_path: Path) -> None:
    made = replace(Builder().build(), fused_call_us=known)
    made.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == made


def test_a_profile_from_before_it_was_measured_still_loads(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    replace(Builder().build(), fused_call_us=2.5).save(path)
    data = json.loads(path.read_text())
    del data["fused_call_us"]
    path.write_text(json.dumps(data))
    assert isinstance(Profile.load(path).fused_call_us, NotMeasured)
