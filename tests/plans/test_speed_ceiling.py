"""How much welding could gain at most: by the peaks of the CPU, so for the CPU alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.support.bench_samples import PEAKS
from torch import nn

from torchweld.core.not_measured import NotMeasured
from torchweld.machine import measured_peaks
from torchweld.plans import speed_ceiling


def test_a_model_elsewhere_has_no_ceiling_by_the_peaks_of_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(measured_peaks, "peaks", lambda: PEAKS)
    block = SimpleNamespace(path="", tensors=("weight", "bias"))
    decision = cast(Any, SimpleNamespace(block=block))
    found = speed_ceiling._kernels_us(nn.Linear(3, 4, device="meta"), [decision])
    assert isinstance(found, NotMeasured)
    assert "on meta" in found.reason
