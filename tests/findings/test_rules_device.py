"""A device that waits for the host, copies between the two, and real traces of GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.support.diagnosed import found
from tests.support.made_profiles import Builder, kernel, make_device, tensor
from tests.support.measured import measured

from torchweld.findings import combined_bound, diagnose
from torchweld.profiles.accounting.time_account import account
from torchweld.profiles.profile import Gap, Kernel, Profile
from torchweld.profiles.recording.trace_profile import read_trace

TRACES = Path(__file__).parents[1] / "traces"

Row = tuple[str, str, float, float]  # name, category, start, µs


def on_device(rows: Sequence[Row], causes: Sequence[str], until_us: float | None = None) -> Profile:
    """Each row is a kernel launched by an op of its own; gaps between them have these causes."""
    made = Builder()
    net = made.module("net")
    kernels: list[Kernel] = []
    gaps: list[Gap] = []
    done_us = rows[0][2]
    for i, (name, category, start_us, us) in enumerate(rows):
        inputs = (tensor(100, 100), tensor(100, 100))
        op = "aten::copy_" if category == "copy" else "aten::mm"
        made.op(op, 5.0, module=net, inputs=inputs, makes=40_000, kernels=(i,))
        kernels.append(kernel(name, start_us, us, op=i, launch=i, category=category))
        if start_us > done_us:
            cause, idle_us = causes[len(gaps)], start_us - done_us
            gaps.append(Gap(start_us=done_us, duration_us=idle_us, cause=cause, before=name, op=i))
        done_us = max(done_us, start_us + us)
    peaks = {"peak_gflops": {"float32": 100.0}, "peak_gbps": 10.0}
    return made.build(device=make_device(kernels, gaps, until_us=until_us, **peaks))


def gemms(*starts: float) -> list[Row]:
    return [("gemm", "gemm", start, 20.0) for start in starts]


def test_a_device_that_waits_for_launches_is_found() -> None:
    profile = on_device(gemms(0.0, 50.0, 100.0), ["host wait", "host wait"])
    finding = found(profile, "device-idle")
    assert finding is not None
    assert finding.saved_us == pytest.approx(60.0)
    assert finding.bound == pytest.approx(120.0 / 60.0)
    assert "Launching" in finding.cause
    assert finding.modules == ("net",)


def test_a_host_that_waits_for_results_is_told_apart() -> None:
    finding = found(on_device(gemms(0.0, 50.0), ["synchronisation"]), "device-idle")
    assert finding is not None
    assert finding.saved_us == pytest.approx(30.0)
    assert ".item()" in finding.cause


def test_gaps_between_kernels_that_were_launched_in_time_are_not_claimed() -> None:
    assert found(on_device(gemms(0.0, 50.0), ["kernel wait"]), "device-idle") is None
    assert found(on_device(gemms(0.0, 21.0), ["host wait"]), "device-idle") is None


def test_overhead_of_the_host_is_not_claimed_beside_the_device_s_idle_time() -> None:
    profile = on_device(gemms(0.0, 500.0), ["host wait"])
    assert [finding.rule for finding in diagnose(profile)] == ["device-idle"]


def test_copies_between_host_and_device_are_found() -> None:
    rows = [*gemms(0.0), ("Memcpy HtoD (Pageable -> Device)", "copy", 30.0, 40.0), *gemms(70.0)]
    finding = found(on_device(rows, ["copy"]), "device-copy")
    assert finding is not None
    assert finding.saved_us == pytest.approx(40.0 + 10.0)
    assert "asked for by copy_ (1)" in finding.evidence


@pytest.mark.parametrize("name", ["Memcpy PtoP (Device -> Device)", "CopyPeerToPeer"])
def test_a_copy_from_one_device_to_another_is_found(name: str) -> None:
    rows: list[Row] = [*gemms(0.0), (name, "copy", 30.0, 40.0), *gemms(70.0)]
    finding = found(on_device(rows, ["copy"]), "device-copy")
    assert finding is not None
    assert finding.title == "1 copy between devices"
    rows.append(("Memcpy DtoH (Device -> Pageable)", "copy", 90.0, 5.0))
    finding = found(on_device(rows, ["copy"]), "device-copy")
    assert finding is not None
    assert finding.title == "2 copies between host and devices"


def test_a_copy_that_a_kernel_hides_costs_nothing() -> None:
    copy: Row = ("Memcpy HtoD (Pinned -> Device)", "copy", 5.0, 10.0)
    assert found(on_device([*gemms(0.0), copy, *gemms(20.0)], []), "device-copy") is None
    half: Row = ("Memcpy HtoD (Pinned -> Device)", "copy", 10.0, 20.0)
    finding = found(on_device([*gemms(0.0), half, *gemms(30.0)], []), "device-copy")
    assert finding is not None
    # Its op shares the time that anything ran, in which kernels overlapped.
    assert finding.saved_us == pytest.approx(10.0)


def test_copies_on_the_device_stay() -> None:
    rows = [*gemms(0.0), ("Memcpy DtoD (Device -> Device)", "copy", 20.0, 40.0)]
    assert found(on_device(rows, []), "device-copy") is None


def test_what_the_device_s_figures_leave_out_is_not_claimed() -> None:
    rows = [*gemms(0.0), ("Memcpy DtoH (Device -> Pageable)", "copy", 20.0, 40.0)]
    assert found(on_device(rows, []), "device-copy") is not None
    assert found(on_device(rows, [], until_us=10.0), "device-copy") is None


# ---- real traces ----


@pytest.fixture(scope="module")
def training() -> Profile:
    return read_trace(TRACES / "a100_training_step.json.gz")


def test_a_training_step_on_an_a100(training: Profile) -> None:
    assert training.device is not None
    explained = account(training)
    found_there = diagnose(training, explained)
    by_rule = {finding.rule: finding for finding in found_there}
    assert {"device-idle", "device-copy", "pointwise-chain", "mlp-block"} <= by_rule.keys()
    assert "slow-16-bit" not in by_rule  # which is about CPUs
    # The reference: 16.2 % of the span is idle, 22.6 % is no computing. Findings are per step.
    steps = training.accounted_steps
    assert steps == 5
    saved_us = {rule: steps * finding.saved_us for rule, finding in by_rule.items()}
    assert 0.5 * training.device.idle_us < saved_us["device-idle"] <= training.device.idle_us
    assert saved_us["device-copy"] <= training.device.non_compute_us
    busy_us = training.device.span_us - training.device.idle_us
    assert saved_us["pointwise-chain"] < busy_us
    together = measured(combined_bound(found_there, training, explained))
    assert max(finding.bound for finding in found_there) <= together < 2.0


@pytest.mark.parametrize("name", ["a100_alexnet_inference", "mi250_toy_training"])
def test_devices_that_hardly_work_wait_for_the_host(name: str) -> None:
    profile = read_trace(TRACES / f"{name}.json.gz")
    finding = diagnose(profile)[0]
    assert finding.rule == "device-idle"
    assert finding.bound > 10


def test_a_device_without_known_peaks_has_no_rooflines() -> None:
    profile = read_trace(TRACES / "mi250_toy_training.json.gz")
    assert profile.device is not None
    assert profile.device.peak_gbps is None
    rules = {finding.rule for finding in diagnose(profile)}
    assert not rules & {"pointwise-chain", "mlp-block", "few-rows", "shared-input"}


def test_a_single_fused_kernel_has_nothing_to_find() -> None:
    assert diagnose(read_trace(TRACES / "a100_triton_fused.json.gz")) == ()
