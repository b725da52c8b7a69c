"""Live profiles count the page faults of steps that certainly take some."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest
import torch
from tests.support.helpers import run_python
from tests.support.measured import measured
from torch import nn

from torchweld.core.not_measured import NotMeasured
from torchweld.findings import diagnose
from torchweld.machine.page_faults import allocator, fault_cost
from torchweld.profiles.profile import Profile
from torchweld.profiles.recording.live_profile import profile
from torchweld.profiles.step_faults import StepFaults

pytestmark = [
    pytest.mark.usefixtures("brief_profiles"),
    pytest.mark.skipif(
        isinstance(fault_cost(), NotMeasured), reason="the system does not count page faults"
    ),
]

glibc = pytest.mark.skipif(not allocator().startswith("glibc"), reason="needs glibc's malloc")
WIDTH = 3072
GRADIENT_BYTES = WIDTH * WIDTH * 4

# glibc maps blocks above 32 MB afresh, unless an earlier one of any size left a hole that is large
# enough: so these run in a process that has done nothing else, with malloc as it is.
RECORDED = """
import sys
import torch
from torch import nn
from torchweld.profiles.recording import profile_building
from torchweld.timing.core_waiting import CoreWaiting
from torchweld.profiles.recording.live_profile import profile
from torchweld.profiles.recording.loop_profile import profiling

CoreWaiting.lost = lambda self: 0.0
profile_building.doubt = lambda *_: None
torch.set_num_threads(1)
width, place = int(sys.argv[1]), sys.argv[2]
model = nn.Linear(width, width, bias=False)
x = torch.randn(1, width)
"""
BY_STEPS = "profile(model, x, training=True, steps=2).save(place)"
BY_A_LOOP = """
with profiling(model, wait=1, active=2) as p:
    for _ in range(18):
        model.zero_grad()
        model(x).sum().backward()
        p.step()
p.profile.save(place)
"""


def faults(found: Profile) -> StepFaults:
    assert isinstance(found.faults, StepFaults)
    return found.faults


def recorded_afresh(how: str, place: Path) -> Profile:
    stock = {key: value for key, value in os.environ.items() if not key.startswith("MALLOC_")}
    stock.pop("GLIBC_TUNABLES", None)
    run_python(RECORDED + how, str(WIDTH), str(place), env=stock)
    return Profile.load(place)


@glibc
def test_gradients_that_are_dropped_after_every_step_come_back_as_fresh_pages(
    tmp_path: Path,
) -> None:
    found = recorded_afresh(BY_STEPS, tmp_path / "profile.json")
    counted = faults(found)
    assert counted.least >= GRADIENT_BYTES // counted.fault_bytes
    assert counted.most < 2 * GRADIENT_BYTES // counted.fault_bytes + 1000
    assert counted.fresh_bytes >= GRADIENT_BYTES - counted.fault_bytes
    assert counted.fault_us > 0
    assert counted.allocator == allocator()
    (finding,) = [each for each in diagnose(found) if each.rule == "page-faults"]
    assert 0 < finding.saved_us <= measured(found.step_us)


@glibc
def test_a_loop_of_the_user_s_is_counted_too(tmp_path: Path) -> None:
    counted = faults(recorded_afresh(BY_A_LOOP, tmp_path / "profile.json"))
    assert counted.steps == 2
    assert counted.least >= GRADIENT_BYTES // counted.fault_bytes


def test_inference_is_counted_as_training_is() -> None:
    fresh_bytes = 8 << 20

    def workload() -> None:
        torch.ones(3).neg()
        with mmap.mmap(-1, fresh_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as region:
            for at in range(0, fresh_bytes, mmap.PAGESIZE):
                region[at] = 1

    counted = faults(profile(workload, steps=2))
    assert counted.least >= fresh_bytes // counted.fault_bytes


def test_a_step_that_keeps_its_memory_takes_next_to_none() -> None:
    found = profile(nn.Linear(3, 5), torch.randn(2, 3), steps=2)
    assert faults(found).least < 100
    assert not [each for each in diagnose(found) if each.rule == "page-faults"]
