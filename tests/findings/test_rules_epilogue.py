"""Element-wise kernels between products: what welding could save of them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from tests.support.diagnosed import found
from tests.support.made_profiles import Builder, kernel, make_device, tensor
from tests.support.made_traces import TRACES

from torchweld.findings import combined_bound, diagnose
from torchweld.profiles.profile import Gap, Profile
from torchweld.profiles.recording.trace_profile import read_trace

# Kernel, category, µs. Gate and up, gelu and multiply, down.
GEGLU = [
    ("gemm", "gemm", 100.0),
    ("gemm", "gemm", 100.0),
    ("gelu", "pointwise", 20.0),
    ("mul", "pointwise", 30.0),
    ("gemm", "gemm", 100.0),
]


def on_device(rows: Sequence[tuple[str, str, float]], apart_us: float = 0.0) -> Profile:
    """Kernels one after the other, each with an op of its own; late launches if they are apart."""
    made = Builder()
    net = made.module("net")
    kernels, gaps, now_us = [], [], 0.0
    for i, (name, category, us) in enumerate(rows):
        made.op(
            "aten::mm" if category == "gemm" else "aten::gelu",
            5.0,
            module=net,
            inputs=(tensor(100, 100), tensor(100, 100)),
            makes=40_000,
            kernels=(i,),
        )
        if i and apart_us:
            gaps.append(
                Gap(start_us=now_us, duration_us=apart_us, cause="host wait", before=name, op=i)
            )
            now_us += apart_us
        kernels.append(kernel(name, now_us, us, op=i, launch=i, category=category))
        now_us += us
    return made.build(device=make_device(kernels, gaps))


def test_kernels_between_products_are_found_with_their_time() -> None:
    finding = found(on_device(GEGLU), "between-products")
    assert finding is not None
    assert finding.title == "2 element-wise kernels between matrix products"
    assert finding.saved_us == pytest.approx(50.0)
    assert finding.bound == pytest.approx(350.0 / 300.0)
    assert finding.modules == ("net",)
    assert "2.00 µs" in finding.evidence[1]  # two launches of 1 µs


def test_the_gaps_before_them_go_too_and_those_before_products_stay() -> None:
    finding = found(on_device(GEGLU, apart_us=10.0), "between-products")
    assert finding is not None
    assert finding.saved_us == pytest.approx(50.0 + 2 * 10.0)


@pytest.mark.parametrize(
    "rows",
    [
        [("gelu", "pointwise", 50.0), ("gemm", "gemm", 50.0)],  # nothing before it
        [("gemm", "gemm", 50.0), ("gelu", "pointwise", 50.0)],  # no product reads it
        [
            ("gemm", "gemm", 50.0),
            ("gelu", "pointwise", 50.0),
            ("norm", "reduction", 50.0),
            ("gemm", "gemm", 50.0),
        ],
        [
            ("gemm", "gemm", 50.0),
            ("triton_red_fused_native_layer_norm_0", "triton", 50.0),
            ("gemm", "gemm", 50.0),
        ],
        [("gemm", "gemm", 50.0), ("Memcpy DtoD", "copy", 50.0), ("gemm", "gemm", 50.0)],
    ],
)
def test_what_stands_elsewhere_is_not_claimed(rows: Sequence[tuple[str, str, float]]) -> None:
    assert found(on_device(rows), "between-products") is None


def test_streams_are_told_apart() -> None:
    profile = on_device(GEGLU)
    assert profile.device is not None
    for one in profile.device.kernels[2:4]:
        one.stream = 8
    assert found(profile, "between-products") is None


def test_one_of_inductors_counts() -> None:
    rows = [*GEGLU[:2], ("triton_poi_fused_gelu_mul_0", "triton", 40.0), GEGLU[4]]
    finding = found(on_device(rows), "between-products")
    assert finding is not None
    assert finding.saved_us == pytest.approx(40.0)


def test_a_profile_without_a_device_has_none() -> None:
    made = Builder()
    made.op("aten::gelu", 5.0, inputs=(tensor(10, 10),), makes=400)
    assert found(made.build(), "between-products") is None


def test_a_real_trace() -> None:
    """On an A100, the bound is at most what these kernels took, and adds up with others."""
    profile = read_trace(TRACES / "a100_training_step.json.gz")
    findings = diagnose(profile)
    (finding,) = [one for one in findings if one.rule == "between-products"]
    device = profile.device
    assert device is not None
    count, us = device.by_category["pointwise"]
    assert 0 < finding.saved_us * device.steps <= us + device.idle_us
    assert int(finding.title.split()[0].replace(",", "")) <= count
    together = combined_bound(findings, profile)
    assert isinstance(together, float)
    assert finding.bound <= together
