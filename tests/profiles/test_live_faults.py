"""Live profiles count the page faults of steps that certainly take some."""

from __future__ import annotations

import mmap
import os

import pytest
import torch
from tests.support.measured import measured
from torch import nn

from torchweld.core.not_measured import NotMeasured
from torchweld.findings import diagnose
from torchweld.machine.page_faults import allocator, fault_cost
from torchweld.profiles.profile import Profile
from torchweld.profiles.recording.live_profile import profile
from torchweld.profiles.recording.loop_profile import profiling
from torchweld.profiles.step_faults import StepFaults

pytestmark = [
    pytest.mark.usefixtures("brief_profiles"),
    pytest.mark.skipif(
        isinstance(fault_cost(), NotMeasured), reason="the system does not count page faults"
    ),
]

# glibc maps blocks above 32 MB afresh, whatever was freed before.
stock_glibc = pytest.mark.skipif(
    not allocator().startswith("glibc")
    or any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ),
    reason="needs glibc's malloc as it is",
)
WIDTH = 3072
GRADIENT_BYTES = WIDTH * WIDTH * 4


def faults(found: Profile) -> StepFaults:
    assert isinstance(found.faults, StepFaults)
    return found.faults


@stock_glibc
def test_gradients_that_are_dropped_after_every_step_come_back_as_fresh_pages() -> None:
    model = nn.Linear(WIDTH, WIDTH, bias=False)
    found = profile(model, torch.randn(1, WIDTH), training=True, steps=2)
    counted = faults(found)
    assert counted.least >= GRADIENT_BYTES // counted.fault_bytes
    assert counted.most < 2 * GRADIENT_BYTES // counted.fault_bytes + 1000
    assert counted.fresh_bytes >= GRADIENT_BYTES - counted.fault_bytes
    assert counted.fault_us > 0
    assert counted.allocator == allocator()
    (finding,) = [each for each in diagnose(found) if each.rule == "page-faults"]
    assert 0 < finding.saved_us <= measured(found.step_us)


@stock_glibc
def test_a_loop_of_the_user_s_is_counted_too() -> None:
    model = nn.Linear(WIDTH, WIDTH, bias=False)
    x = torch.randn(1, WIDTH)
    with profiling(model, wait=1, active=2) as p:
        for _ in range(18):
            model.zero_grad()
            model(x).sum().backward()
            p.step()
    counted = faults(p.profile)
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
