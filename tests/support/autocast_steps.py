"""Steps of training under autocast, in one way of a GPU: the types, and how far eager is."""

from __future__ import annotations

import torch
from tests.support.helpers import random_tensors
from torch import Tensor
from torch.nn.functional import linear, silu

from torchweld.core.blocks import parse_spec

SPEC = "silu/b/separate;identity/b"
# Of the largest value; eager's own error is as large. Values have 8 bits, and 11.
NEAR = {torch.bfloat16: 3e-2, torch.float16: 4e-3}


def leaves(width: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    tensors = random_tensors((7, width, 5), parse_spec(SPEC), dtype)
    return [t.requires_grad_() for t in (torch.randn(6, 7).to(dtype), *tensors)]


def check_step_under_autocast(way: str, dtype: torch.dtype, width: int = 9) -> None:
    """The output has autocast's type, the gradients those of their tensors, as in eager."""
    given = leaves(width)
    x, *tensors = given
    w1, b1, w2, b2, w3, b3 = tensors
    with torch.autocast(x.device.type, dtype):
        ours = torch.ops.torchweld.chain_way(x, tensors, SPEC, way)
        eager = linear(silu(linear(x, w1, b1)) * linear(x, w2, b2), w3, b3)
    assert ours.dtype == eager.dtype == dtype
    grad = torch.randn(ours.shape).to(dtype)
    pairs = [(ours, eager)]
    pairs += zip(
        torch.autograd.grad(ours, given, grad), torch.autograd.grad(eager, given, grad), strict=True
    )
    for found, wanted in pairs:
        assert found.dtype == wanted.dtype
        far = (found.double() - wanted.double()).abs().max() / wanted.double().abs().max()
        assert far < NEAR[dtype]
    assert all(found.dtype == torch.float32 for found, _ in pairs[1:])


def check_backward_under_autocast(
    way: str, recompute: bool, dtype: torch.dtype = torch.float32, width: int = 9
) -> None:
    """The forward ran without: then autocast changes nothing of the backward, not a bit."""
    given = leaves(width, dtype)
    x, *tensors = given
    y = torch.ops.torchweld.chain_way(x, tensors, SPEC, way, recompute)
    grad = torch.randn(y.shape).to(dtype)
    plain = torch.autograd.grad(y, given, grad, retain_graph=True)
    with torch.autocast(x.device.type, torch.bfloat16):
        found = torch.autograd.grad(y, given, grad)
    for ours, wanted in zip(found, plain, strict=True):
        assert ours.dtype == dtype
        assert torch.equal(ours, wanted)
