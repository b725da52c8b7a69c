"""Products of a device by name, and host and device side by side, of a real trace of an A100."""

from __future__ import annotations

import json

import pytest
from tests.support.made_traces import TRACES

from torchweld.findings import diagnose
from torchweld.profiles.accounting.device_products import (
    host_times,
    on_tensor_cores_us,
    products_of,
)
from torchweld.profiles.accounting.time_account import account
from torchweld.profiles.profile import Device, Profile
from torchweld.profiles.recording.trace_profile import read_trace


@pytest.fixture(scope="module")
def profile() -> Profile:
    return read_trace(TRACES / "a100_training_step.json.gz")


@pytest.fixture(scope="module")
def device(profile: Profile) -> Device:
    assert profile.device is not None
    return profile.device


def test_all_products_are_there_once(device: Device) -> None:
    rows = products_of(device)
    count, us = device.by_category["gemm"]
    assert sum(row.count for row in rows) == count
    assert sum(row.us for row in rows) == pytest.approx(us)
    assert [row.us for row in rows] == sorted((row.us for row in rows), reverse=True)


def test_most_of_their_time_is_on_tensor_cores(device: Device) -> None:
    """They are in TF32. Products of plain fp32 and gemv are not; split sums do not say."""
    found = on_tensor_cores_us(products_of(device))
    assert found[True] > 5 * found[False] > 0
    assert found[None] > 0


def test_host_times_are_those_of_the_device_account(profile: Profile, device: Device) -> None:
    host = host_times(profile, device)
    assert host.launch_us == device.launch_us
    assert host.occupancy_us == device.occupancy_query_us > 0
    assert device.launch_us < host.ops_us
    assert host.calls[0].us >= host.calls[-1].us > 0
    names = {row.name for row in host.calls}
    assert "cudaLaunchKernel" in names
    assert host.ops > 100


def test_text_and_json_show_them(profile: Profile) -> None:
    from torchweld import report
    from torchweld.report.text_style import to_text

    found = account(profile)
    data = report.summary(profile, found, diagnose(profile, found))
    json.dumps(data, allow_nan=False)
    first = data["products"][0]
    assert first["gemm"]["maker"] == "CUTLASS"
    assert first["gemm"]["dtype"] == "tf32"
    assert data["host"]["launch_us"] > 0
    view = report.View(width=100)
    text = to_text(report.profile_sections(profile, found, diagnose(profile, found), view), 100)
    assert "products" in text
    assert "of the products' time on tensor cores" in text
    assert "occupancy queries" in text
    assert "round trips are not known" in " ".join(text.split())
    assert "cutlass_80_tensorop_s1688gemm_" in text
    assert "void cutlass" not in text[text.index("  products ") :]
    assert max(map(len, text.splitlines())) <= 100
