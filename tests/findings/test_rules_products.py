"""Few rows far below the roofline, and 16-bit products slower than 32-bit ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.support.diagnosed import found
from tests.support.made_profiles import Builder, tensor

from torchweld.findings import diagnose
from torchweld.profiles.profile import Device, Phase, Profile

# With the builder's peaks: 100,000 operations and 10,000 bytes a µs; the smallest op takes 1 µs.


def product(
    rows: int,
    times: float,
    dtype: str = "float32",
    phase: Phase = "forward",
    K: int = 256,
    N: int = 256,
    device: Device | None = None,
) -> Profile:
    """One product that takes `times` its roofline, and a softmax as long again."""
    made = Builder()
    fc = made.module("layers.0.fc", "Linear")
    x, w = tensor(rows, K, dtype=dtype), tensor(K, N, dtype=dtype)
    item = x.nbytes // x.numel
    bytes_ = x.nbytes + w.nbytes + rows * N * item
    roofline_us = max(2 * rows * K * N / 100_000, bytes_ / 10_000)
    us = times * roofline_us + 1.0
    made.op("aten::mm", us, module=fc, inputs=(x, w), makes=rows * N * item, phase=phase)
    made.op("aten::_softmax", us, inputs=(tensor(rows, N),), makes=rows * N * 4)
    return made.build(device=device)


@pytest.mark.parametrize("rows", [1, 8, 64])
def test_few_rows_far_below_the_roofline_are_found(rows: int) -> None:
    profile = product(rows, times=5.0)
    finding = found(profile, "few-rows")
    assert finding is not None
    roofline_us = (profile.ops[0].self_us - 1.0) / 5.0
    assert finding.saved_us == pytest.approx(4.0 * roofline_us)
    assert finding.modules == ("layers.0.fc",)
    assert any(f"({rows} × 256 → 256, float32): 5." in line for line in finding.evidence)


def test_few_rows_near_the_roofline_are_not() -> None:
    assert found(product(8, times=1.5), "few-rows") is None


def test_many_rows_are_not_few() -> None:
    assert found(product(65, times=5.0), "few-rows") is None


def test_a_product_that_is_mostly_its_start_is_left_to_the_overhead() -> None:
    made = Builder(op_cost_us=5.0)
    made.op("aten::mm", 7.0, inputs=(tensor(1, 4), tensor(4, 4)), makes=16)
    assert [f.rule for f in diagnose(made.build())] == ["overhead-bound"]


def test_products_of_the_backward_are_no_linears() -> None:
    assert found(product(8, times=5.0, phase="backward"), "few-rows") is None


def test_all_that_belongs_to_the_linear_goes_with_its_product() -> None:
    """Views, the copy of the bias and the Python of the module."""
    made = Builder()
    fc = made.module("fc", "Linear", python_us=3.0)
    made.module("other", python_us=0.5)  # a call takes no less
    x, w, b = tensor(8, 256), tensor(256, 256), tensor(256)
    out = tensor(8, 256)
    assert out.storage is not None
    linear = made.op("aten::linear", 4.0, module=fc, inputs=(x, w, b))
    made.op("aten::t", 2.0, module=fc, inputs=(w,), parent=linear)
    mm = made.op(
        "aten::addmm",
        200.0,
        module=fc,
        inputs=(b, x, w),
        makes=(out.storage, out.nbytes),
        parent=linear,
    )
    spread = tensor(8, 256, storage=b.storage, strides=(0, 1))
    made.op("aten::copy_", 10.0, module=fc, inputs=(out, spread), parent=mm)
    made.op("aten::_softmax", 50.0, inputs=(out,), makes=out.nbytes)
    finding = found(made.build(), "few-rows")
    assert finding is not None
    least_us = (b.nbytes + x.nbytes + w.nbytes + out.nbytes) / 10_000
    assert finding.saved_us == pytest.approx(3.0 + 4.0 + 2.0 + 200.0 + 10.0 - least_us - 1.0 - 0.5)


# ---- 16-bit ----


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_16_bit_products_far_below_the_float32_peak_are_found(dtype: str, phase: Phase) -> None:
    profile = product(128, times=8.0, dtype=dtype, phase=phase)
    finding = found(profile, "slow-16-bit")
    assert finding is not None
    wide_us = 2 * 128 * 256 * 256 / 100_000
    assert finding.saved_us == pytest.approx(profile.ops[0].self_us - 1.0 - wide_us)
    assert dtype in finding.title
    assert finding.evidence[0].endswith("the float32 peak of this machine is 100")


def test_the_bytes_of_float32_are_twice_as_many() -> None:
    profile = product(1, times=30.0, dtype="bfloat16")
    finding = found(profile, "slow-16-bit")
    assert finding is not None
    wide_us = 4 * (256 + 256 * 256 + 256) / 10_000
    assert finding.saved_us == pytest.approx(profile.ops[0].self_us - 1.0 - wide_us)


def test_16_bit_products_at_the_float32_peak_are_not() -> None:
    assert found(product(128, times=1.5, dtype="bfloat16"), "slow-16-bit") is None


def test_few_rows_that_are_slow_in_any_type_are_not_blamed_on_16_bit() -> None:
    """Six times the float32 roofline is what float32 takes itself with eight rows."""
    assert found(product(8, times=12.0, dtype="bfloat16"), "slow-16-bit") is None
    assert found(product(8, times=12.0, dtype="bfloat16"), "few-rows") is not None


def test_32_bit_products_are_not_16_bit_ones() -> None:
    assert found(product(128, times=8.0), "slow-16-bit") is None


def test_a_thread_count_without_measured_peaks_gives_no_bound() -> None:
    profile = product(8, times=5.0)
    assert diagnose(profile)
    assert diagnose(replace(profile, about=replace(profile.about, threads=7))) == ()
