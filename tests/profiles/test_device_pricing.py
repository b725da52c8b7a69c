"""The account of a profile with a device."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from tests.support.made_profiles import (
    Builder,
    kernel,
    make_device,
    new_storage,
    parts,
    tensor,
)
from tests.support.made_traces import TRACES
from tests.support.measured import measured

from torchweld.profiles.accounting.time_account import account, roofline
from torchweld.profiles.profile import Gap, Profile, RuntimeCall
from torchweld.profiles.recording.trace_profile import read_trace

SIZE = 40_000  # bytes of a tensor of 100 x 100: 4 us


def on_device(peaks: bool = True, until_us: float | None = None) -> Profile:
    """Two products that run 20 us each and wait for 10, a copy of 5, one kernel of nobody's."""
    made = Builder(peaks=None)
    fc = made.module("fc", "Linear", python_us=100.0)
    a = tensor(100, 100)
    for i in range(2):
        made.op(
            "aten::mm",
            30.0,
            module=fc,
            inputs=(a, tensor(100, 100)),
            makes=SIZE,
            kernels=(i,),
        )
    made.op("aten::copy_", 8.0, module=fc, inputs=(a, a), kernels=(2,))
    kernels = [
        kernel("gemm", 0.0, 20.0, op=0, launch=0),
        kernel("gemm", 30.0, 20.0, op=1, launch=1),
        kernel("Memcpy HtoD", 54.0, 5.0, op=2, launch=2, category="copy"),
        kernel("stranger", 59.0, 1.0, op=-1, launch=3, category="other"),
    ]
    gaps = [
        Gap(start_us=20.0, duration_us=10.0, cause="host wait", before="gemm", op=1),
        Gap(start_us=50.0, duration_us=4.0, cause="synchronisation", before="Memcpy", op=2),
    ]
    calls = tuple(
        RuntimeCall(name="cudaLaunchKernel", start_us=float(i), duration_us=1.0, thread=0)
        for i in range(4)
    )
    device = make_device(
        kernels,
        gaps,
        calls=calls,
        peak_gflops={"float32": 200.0} if peaks else {},
        peak_gbps=100.0 if peaks else None,
        until_us=until_us,
    )
    return made.build(device=device)


def test_a_devices_time_is_split_by_its_kernels_and_gaps() -> None:
    found = account(on_device())
    first, second, copy = found.ops
    # 2e6 operations at 200 GFLOP/s take 10 us of 20.
    assert parts(first.split) == pytest.approx({"arithmetic_us": 10.0, "slow_us": 10.0})
    assert parts(second.split) == pytest.approx(
        {"arithmetic_us": 10.0, "slow_us": 10.0, "launch_us": 10.0}
    )
    assert parts(copy.split) == pytest.approx({"unexplained_us": 5.0, "host_us": 4.0})
    assert measured(found.step).total_us == pytest.approx(60.0)
    assert measured(found.step).unexplained_us == pytest.approx(6.0)
    assert found.modules[1].launches == 3
    # The kernel without an op is on the root.
    assert parts(found.modules[0].own) == pytest.approx({"unexplained_us": 1.0})
    assert found.explained == pytest.approx((60.0 - 6.0) / 60.0)


def test_a_device_without_peaks_leaves_its_kernels_unexplained() -> None:
    found = account(on_device(peaks=False))
    assert parts(found.step) == pytest.approx(
        {"launch_us": 10.0, "host_us": 4.0, "unexplained_us": 46.0}
    )
    assert "Example GPU" in found.notices[0]


def test_kernels_that_run_at_once_share_the_time() -> None:
    profile = on_device()
    assert profile.device is not None
    # 46 us of kernels in 23 us.
    device = dataclasses.replace(profile.device, span_us=37.0)
    found = account(dataclasses.replace(profile, device=device))
    assert measured(found.ops[0].split).total_us == pytest.approx(10.0)
    assert measured(found.step).total_us == pytest.approx(37.0)


def test_faster_than_fp32_can_be_was_tf32() -> None:
    profile = on_device()
    assert profile.device is not None
    rates = {"float32": 50.0, "tf32": 400.0}
    device = dataclasses.replace(profile.device, peak_gflops=rates)
    first = account(dataclasses.replace(profile, device=device)).ops[0]
    assert measured(first.split).arithmetic_us == pytest.approx(5.0)


def test_kernels_that_the_devices_figures_leave_out_do_not_count() -> None:
    found = account(on_device(until_us=1.5))
    assert found.ops[2].launches == 0
    assert found.ops[1].launches == 1


def test_ops_that_the_devices_figures_leave_out_are_no_work() -> None:
    whole = on_device()
    # The second product and the copy begin later than what the figures cover.
    begin = [0.0, 0.8, 0.9]
    ops = tuple(
        dataclasses.replace(op, start_us=us) for op, us in zip(whole.ops, begin, strict=True)
    )
    assert whole.device is not None
    device = dataclasses.replace(whole.device, until_us=0.5, steps=1)
    profile = dataclasses.replace(whole, ops=ops, device=device)
    found = account(profile)
    first, second, copy = found.ops
    assert first.flops == 2_000_000
    assert (second.flops, second.read_bytes, second.written_bytes, copy.read_bytes) == (0, 0, 0, 0)
    assert found.modules[0].flops == first.flops
    (row,) = roofline(profile, found)
    assert (row.name, row.calls, row.flops) == ("aten::mm", 1, first.flops)


def test_rates_of_a_real_trace_are_those_of_the_steps_that_are_covered() -> None:
    profile = read_trace(TRACES / "a100_training_step.json.gz")
    rows = {(row.name, row.phase): row for row in roofline(profile, account(profile))}
    added = rows["aten::add", "backward"]
    assert profile.accounted_steps == 5
    assert added.calls % 5 == 0
    # Six steps over the time of five gave 1944 GB/s. What is above 1555 came from the cache.
    assert added.gbps == pytest.approx(1620, rel=0.01)


def test_round_trips_on_a_device_are_counted_with_and_without_its_peaks() -> None:
    made = Builder(peaks=None)
    storage = new_storage()
    x, hidden = tensor(100, 100), tensor(100, 100, storage=storage)
    made.op("aten::mm", 30.0, inputs=(x, x), makes=(storage, SIZE), kernels=(0,))
    made.op("aten::gelu", 30.0, inputs=(hidden,), makes=SIZE, kernels=(1,))
    kernels = [
        kernel("gemm", 0.0, 20.0, op=0, launch=0),
        kernel("gelu", 20.0, 20.0, op=1, launch=1, category="pointwise"),
    ]
    known: dict[str, Any] = {"peak_gflops": {"float32": 200.0}, "peak_gbps": 100.0}
    unknown: dict[str, Any] = {}
    for peaks in (unknown, known):
        found = account(made.build(device=make_device(kernels, **peaks)))
        assert [op.round_trip_bytes for op in found.ops] == [SIZE, SIZE]
