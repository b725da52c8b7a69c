"""The page faults of a step: from counts of single steps to what they cost, and into a file."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.made_profiles import Builder, make_faults

from torchweld.core.errors import TorchweldError
from torchweld.core.not_measured import NotMeasured
from torchweld.machine.page_faults import TICK_US, UNCOUNTED, FaultCost, FaultCount, allocator
from torchweld.profiles.profile import Profile
from torchweld.profiles.step_faults import DISTURBED, KEEP_MEMORY, StepFaults, faults_of

COST = FaultCost(us=2.0, bytes=4096)
glibc = pytest.mark.skipif(
    not allocator().startswith("glibc") or ctypes.sizeof(ctypes.c_void_p) < 8,
    reason="needs glibc's malloc on 64 bits",
)


def count(faults: int, system_us: float = 0.0) -> FaultCount:
    return FaultCount(faults=faults, system_us=system_us)


def test_a_step_takes_the_mean_because_faults_come_and_go() -> None:
    steps = [count(0), count(0), count(3000)]
    found = faults_of(steps, [], COST, "glibc 2.36")
    assert isinstance(found, StepFaults)
    assert (found.per_step, found.least, found.most, found.steps) == (1000.0, 0, 3000, 3)
    assert found.fresh_bytes == 1000 * 4096
    assert found.allocator == "glibc 2.36"


def test_time_in_the_kernel_is_that_of_undisturbed_steps() -> None:
    calm = [count(1000, 3000.0), count(1000, 5000.0)]
    found = faults_of([count(1000, 90_000.0), *calm], calm, COST, "")
    assert isinstance(found, StepFaults)
    assert (found.system_us, found.system_steps) == (4000.0, 2)
    disturbed = faults_of([count(1000, 90_000.0)], [], COST, "")
    assert isinstance(disturbed, StepFaults)
    assert disturbed.system_us == DISTURBED


def test_faults_cost_no_more_than_the_kernel_took() -> None:
    faults = make_faults(1e6, fault_us=2.0, system_us=1e6, system_steps=100)
    whole_us = 100 * 1e6
    error_us = (2 * (whole_us * TICK_US) ** 0.5 + 2 * TICK_US) / 100
    assert faults.cost_us == pytest.approx(1e6 + error_us)
    assert replace(faults, system_us=1e9).cost_us == 2e6
    assert replace(faults, system_us=DISTURBED).cost_us == 2e6


def test_a_few_ticks_do_not_say_that_faults_are_cheap() -> None:
    """One short step may be over before the next tick, and its time in the kernel is then 0."""
    assert make_faults(1000, fault_us=2.0, system_us=0.0, system_steps=1).cost_us == 2000.0


@pytest.mark.parametrize(
    ("steps", "cost"), [([count(5)], UNCOUNTED), ([count(5), UNCOUNTED], COST)]
)
def test_what_is_not_counted_is_not_measured(
    steps: list[FaultCount | NotMeasured], cost: FaultCost | NotMeasured
) -> None:
    assert faults_of(steps, [], cost, "") == UNCOUNTED


@pytest.mark.parametrize("faults", [make_faults(12.5), UNCOUNTED])
def test_it_is_saved_with_the_profile(faults: StepFaults | NotMeasured, tmp_path: Path) -> None:
    made = replace(Builder().build(), faults=faults)
    made.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == made


def test_a_damaged_count_is_refused() -> None:
    data = replace(Builder().build(), faults=make_faults(12.5)).to_dict()
    data["faults"]["per_step"] = -1.0
    with pytest.raises(TorchweldError, match=r"faults\.per_step is -1\.0; expected at least 0"):
        Profile.from_dict(data)


# Blocks as gradients have them, freed after every step; prints the faults of the last step.
TRAINING = """
import ctypes, resource
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
for step in range(4):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = []
    for size in (1 << 20, 9 << 20, 40 << 20, 80 << 20):
        blocks.append(libc.malloc(size))
        ctypes.memset(blocks[-1], 1, size)
    for block in blocks:
        libc.free(block)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@glibc
@pytest.mark.parametrize("kept", [False, True])
def test_the_advice_makes_glibc_keep_blocks_of_any_size(kept: bool) -> None:
    plain = {key: value for key, value in os.environ.items() if not key.startswith("MALLOC_")}
    plain.pop("GLIBC_TUNABLES", None)
    advice = dict(item.split("=") for item in KEEP_MEMORY.split())
    run = subprocess.run(
        [sys.executable, "-c", TRAINING],
        env={**plain, **(advice if kept else {})},
        capture_output=True,
        text=True,
        check=True,
    )
    huge_pages = (100 << 20) // (2 << 20)
    assert (int(run.stdout) < 10) if kept else (int(run.stdout) >= huge_pages)
