"""Blocks with random tensors, for tests of backends."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tests.support.helpers import random_tensors
from torch import Tensor

from torchweld.core.blocks import parse_spec
from torchweld.ops.backends import Form

CPU = torch.device("cpu")


def chain_of(
    spec: str, sizes: Sequence[int], dtype: torch.dtype = torch.float32
) -> tuple[Form, list[Tensor]]:
    """A chain K → … → N with contiguous random tensors."""
    forms = parse_spec(spec)
    tensors = random_tensors(sizes, forms, dtype)
    return Form.of("chain", forms, tensors), tensors


def packed_projection(
    spec: str, K: int, widths: Sequence[int], *, transposed: bool = False, bias: bool = True
) -> tuple[Form, list[Tensor]]:
    """A group whose weights, and biases, are parts of one tensor, as those of q, k and v can be."""
    N = sum(widths)
    weight = torch.randn(K, N) if transposed else torch.randn(N, K)
    weights = torch.split(weight / K**0.5, list(widths), 1 if transposed else 0)
    biases = torch.split(torch.randn(N), list(widths))
    tensors = []
    for w, b in zip(weights, biases, strict=True):
        tensors += [w, b] if bias else [w]
    return Form.of("group", parse_spec(spec), tensors), tensors
