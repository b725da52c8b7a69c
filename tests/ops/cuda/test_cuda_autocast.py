"""Autocast around the way `cuda`, with its kernels on the host; with `make gpu-test` on a GPU."""

from __future__ import annotations

import pytest
import torch
from tests.support.autocast_steps import check_backward_under_autocast, check_step_under_autocast
from tests.support.cuda_on_host import launched

pytestmark = pytest.mark.usefixtures("cuda_on_host")


@pytest.mark.parametrize("width", [9, 260])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_step_under_autocast_computes_in_its_type(dtype: torch.dtype, width: int) -> None:
    check_step_under_autocast("cuda", dtype, width)
    assert launched() != []


@pytest.mark.parametrize("width", [9, 260])
@pytest.mark.parametrize("recompute", [False, True])
def test_a_backward_under_autocast_is_the_one_without(recompute: bool, width: int) -> None:
    check_backward_under_autocast("cuda", recompute, width=width)
