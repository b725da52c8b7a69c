"""What the tests in Triton's interpreter rest on: bfloat16 is put right, and overruns are seen."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from tests.support.interpreted_gpu import right_bf16
from torch import Tensor


@triton.jit
def multiply(a, b, c):
    i = tl.arange(0, 16)
    at = i[:, None] * 16 + i[None, :]
    tl.store(c + at, tl.dot(tl.load(a + at), tl.load(b + at), input_precision="ieee"))


@triton.jit
def round_off(x, y):
    i = tl.arange(0, 1024)
    tl.store(y + i, tl.load(x + i).to(tl.bfloat16))


def product_error() -> float:
    a, b = torch.randn(16, 16).bfloat16(), torch.randn(16, 16).bfloat16()
    c = torch.empty(16, 16)
    multiply[(1,)](a, b, c)
    return (c.double() - a.double() @ b.double()).abs().max().item()


def rounded_otherwise() -> int:
    x, y = torch.randn(1024), torch.empty(1024, dtype=torch.bfloat16)
    round_off[(1,)](x, y)
    return int((y != x.bfloat16()).sum())


def test_the_interpreter_alone_is_wrong_in_bfloat16() -> None:
    """If this fails, Triton has mended it, and `right_bf16` can go."""
    assert product_error() > 1
    assert rounded_otherwise() > 100


def test_our_correction_puts_bfloat16_right() -> None:
    with right_bf16():
        assert product_error() < 1e-5
        assert rounded_otherwise() == 0
    assert rounded_otherwise() > 100  # and is gone afterwards


def test_rounding_is_torchs_for_every_kind_of_number() -> None:
    special = [0.0, -0.0, float("inf"), float("-inf"), float("nan"), 3.4e38, 1e-40, 1.00390625]
    x: Tensor = torch.tensor(special).repeat(128)
    y = torch.empty(1024, dtype=torch.bfloat16)
    with right_bf16():
        round_off[(1,)](x, y)
    torch.testing.assert_close(y, x.bfloat16(), rtol=0, atol=0, equal_nan=True)
