"""The finding about page faults: what it claims, from where on, and what it says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.support.block_profiles import blocks, on_device
from tests.support.diagnosed import found
from tests.support.made_profiles import Builder, make_faults, make_timing, tensor
from tests.support.measured import measured

from torchweld.core.not_measured import NotMeasured
from torchweld.findings import Finding, combined_bound, diagnose
from torchweld.profiles.accounting.time_account import account
from torchweld.profiles.profile import Profile
from torchweld.profiles.step_faults import DISTURBED, KEEP_MEMORY

STEP_US = 10_000.0


def step_with(faults: Any, training: bool = True, us: float = STEP_US) -> Profile:
    """One slow op: 8 × 64 times 64 × 64, with next to no arithmetic."""
    made = Builder()
    made.op("aten::mm", us, inputs=(tensor(8, 64), tensor(64, 64)), makes=8 * 64 * 4)
    return replace(made.build(training=training), faults=faults)


def faults_in(profile: Profile) -> Finding:
    finding = found(profile, "page-faults")
    assert finding is not None
    return finding


def test_the_bound_is_the_faults_times_the_cost_of_one() -> None:
    finding = faults_in(step_with(make_faults(1000, fault_us=1.5)))
    assert finding.saved_us == pytest.approx(1500.0)
    assert finding.bound == pytest.approx(STEP_US / (STEP_US - 1500.0))


def test_no_margin_is_added_to_what_was_counted_without_the_profiler() -> None:
    profile = step_with(make_faults(1000, fault_us=1.5))
    live = replace(profile, timing=make_timing(STEP_US))
    assert faults_in(live).saved_us == pytest.approx(1500.0)


def test_it_is_at_most_the_time_in_the_kernel() -> None:
    """Ticks tell that only roughly; a million steps leave no doubt."""
    faults = make_faults(1000, fault_us=1.5, system_us=600.0, system_steps=10**6)
    assert faults_in(step_with(faults)).saved_us == pytest.approx(600.0, rel=0.02)
    assert faults_in(step_with(replace(faults, system_us=DISTURBED))).saved_us == 1500.0


@pytest.mark.parametrize(("count", "reported"), [(99, False), (101, True)])
def test_it_is_reported_from_one_percent_of_the_step_on(count: int, reported: bool) -> None:
    finding = found(step_with(make_faults(count)), "page-faults")
    assert (finding is not None) == reported


def test_it_needs_no_peaks() -> None:
    assert faults_in(replace(step_with(make_faults(1000)), peaks=None)).saved_us == 1000.0


def test_nothing_is_found_where_nothing_was_counted() -> None:
    assert found(step_with(NotMeasured("a reason")), "page-faults") is None
    assert found(step_with(make_faults(0)), "page-faults") is None


def test_with_a_device_the_host_s_faults_cost_nothing() -> None:
    profile = replace(on_device(blocks(training=True)), faults=make_faults(10**6))
    assert found(profile, "page-faults") is None


def test_it_says_how_many_what_they_bring_and_what_the_kernel_took() -> None:
    finding = faults_in(step_with(make_faults(1000, fault_us=1.5, least=0, most=9000)))
    assert finding.title == "1,000 page faults per step"
    assert finding.evidence == (
        "1,000 faults per step (0 to 9,000): 4.10 MB of fresh pages",
        "one costs 1.50 µs here, all of them at most 1.50 ms of 10.0 ms; the kernel took 1.50 ms "
        "per step in all",
    )
    assert "glibc" in finding.cause
    assert "15 % of the step is fetching memory that was given back" in finding.sentence


def test_without_a_sampled_kernel_it_says_what_the_faults_cost() -> None:
    finding = faults_in(step_with(make_faults(1000, fault_us=1.5, system_us=DISTURBED)))
    assert finding.evidence[1] == "one costs 1.50 µs here, all of them 1.50 ms of 10.0 ms"


def test_training_has_more_ways_out_than_inference() -> None:
    training, inference = (
        faults_in(step_with(make_faults(1000), training=training)) for training in (True, False)
    )
    for finding in (training, inference):
        assert f"{KEEP_MEMORY} python train.py" in finding.action
    assert "Gradients" in training.cause
    assert "set_to_none=False" in training.action
    assert "tw.fuse(..., training=True)" in training.action
    assert "Gradients" not in inference.cause
    assert "set_to_none" not in inference.action


@pytest.mark.parametrize("allocator", ["", "libjemalloc.so.2"])
def test_another_allocator_gets_no_advice_for_glibc(allocator: str) -> None:
    finding = faults_in(step_with(make_faults(1000, allocator=allocator)))
    assert "glibc" not in finding.cause
    assert "MALLOC_" not in finding.action
    assert (allocator or "an allocator that keeps") in finding.action


def test_together_with_others_it_is_limited_by_what_is_left_of_the_step() -> None:
    """Where the faults were taken is not known: in time that others claim, or in the rest."""
    made = Builder()
    made.op("aten::mm", 4000.0, inputs=(tensor(8, 64), tensor(64, 64)), makes=8 * 64 * 4)
    made.op("aten::_softmax", 6000.0, inputs=(tensor(8, 64),), makes=8 * 64 * 4)
    few_rows = found(made.build(), "few-rows")
    assert few_rows is not None

    def saved_us(faults: int) -> float:
        profile = replace(made.build(), faults=make_faults(faults))
        chosen = [f for f in diagnose(profile) if f.rule in ("few-rows", "page-faults")]
        assert len(chosen) == 2
        return STEP_US * (1 - 1 / measured(combined_bound(chosen, profile)))

    assert saved_us(2000) == pytest.approx(few_rows.saved_us + 2000.0)
    assert saved_us(10**6) == pytest.approx(STEP_US - STEP_US / 1000)  # the most that a bound says


def test_arithmetic_at_the_peak_is_left() -> None:
    made = Builder()
    made.op("aten::mm", 100.0, inputs=(tensor(100, 100), tensor(100, 100)), makes=100 * 100 * 4)
    profile = replace(made.build(), faults=make_faults(10**6))
    arithmetic_us = measured(account(profile).step).arithmetic_us
    assert arithmetic_us > 10
    assert faults_in(profile).saved_us == pytest.approx(100.0 - arithmetic_us)


def test_arithmetic_is_not_trusted_where_ops_beat_the_peaks() -> None:
    made = Builder(gflops=1.0)
    made.op("aten::mm", 100.0, inputs=(tensor(100, 100), tensor(100, 100)), makes=100 * 100 * 4)
    profile = replace(made.build(), faults=make_faults(50))
    assert faults_in(profile).saved_us == pytest.approx(50.0)
