"""Autocast around the ways of a GPU, in Triton's interpreter; with `make gpu-test` on a GPU."""

from __future__ import annotations

import pytest
import torch
from tests.support.autocast_steps import check_backward_under_autocast, check_step_under_autocast

from torchweld.ops.gpu.gpu_launches import launched
from torchweld.ops.gpu.gpu_ways import WAYS

pytestmark = pytest.mark.usefixtures("gpu")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_a_step_under_autocast_computes_in_its_type(way: str, dtype: torch.dtype) -> None:
    check_step_under_autocast(way, dtype)
    assert launched() != []


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_a_backward_under_autocast_is_the_one_without(way: str, recompute: bool) -> None:
    check_backward_under_autocast(way, recompute)


@pytest.mark.usefixtures("default_way")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_without_a_plan_too(dtype: torch.dtype) -> None:
    check_backward_under_autocast("chain", False, dtype)
