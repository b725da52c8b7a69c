"""Host and device of a trace as a page has them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from torchweld.pages.device_view import device_of
from torchweld.profiles.accounting.device_products import host_times, products_of
from torchweld.profiles.recording.live_profile import profile
from torchweld.profiles.recording.trace_profile import read_trace

A100 = Path(__file__).parents[1] / "traces" / "a100_training_step.json.gz"


def test_its_figures_are_those_of_the_device() -> None:
    recorded = read_trace(A100)
    device = recorded.device
    assert device is not None
    view = device_of(recorded)
    assert view is not None
    assert view.name == device.name
    assert view.host == host_times(recorded, device)
    assert view.compute_us + view.non_compute_us + view.idle_us == pytest.approx(device.span_us)
    assert view.kernels == sum(count for count, _ in device.by_category.values()) > 1000
    products = products_of(device)
    assert [(row.count, row.us) for row in view.products] == [
        (row.count, row.us) for row in products
    ]
    assert "void cutlass" in products[0].name
    assert view.products[0].name.startswith("cutlass_80_")
    assert "on tensor cores" in view.cores


def test_a_step_without_a_device_has_none(brief_profiles: None) -> None:
    assert device_of(profile(nn.Linear(3, 3), torch.ones(1, 3))) is None
