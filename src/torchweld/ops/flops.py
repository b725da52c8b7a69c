"""The FLOPs of torchweld's ops, for torch.utils.flop_counter.

They are counted as torch counts its own products: a multiplication and an addition per weight
element and row, without biases and activations. The backward pass consists of torch's ops, which
torch counts as they run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, register_flop_formula

from torchweld.core.blocks import parse_spec

# The header of packed weights, in int64: PackedHeader and PackedEntry in packed_weights.h.
_HEADER, _ENTRY = 8, 3


def _natural(x: Sequence[int], params: Sequence[Sequence[int]], *_: Any, **__: Any) -> int:
    """From shapes: weights have two dimensions, biases one."""
    rows = math.prod(x[:-1])
    return sum(2 * rows * math.prod(shape) for shape in params if len(shape) == 2)


def _packed(x: Tensor, packed: Tensor, spec: str, *_: Any, **__: Any) -> int:
    """From the sizes in the header of packed weights; 0 if their contents cannot be read."""
    if type(packed) is not Tensor or packed.is_meta:
        return 0
    forms = parse_spec(spec)
    words = _HEADER + _ENTRY * len(forms)
    numbers = packed[: 8 * words].view(torch.int64).tolist()
    rows = math.prod(x.shape[:-1])
    flops = 0
    for i, form in enumerate(forms):
        inputs, outputs = numbers[_HEADER + _ENTRY * i :][:2]
        flops += 2 * rows * inputs * outputs * (1 if form.gate == "none" else 2)
    return flops


def _packed_apart(x: Tensor, packed: Sequence[Tensor], spec: str, *_: Any, **__: Any) -> int:
    """Of a group whose members were packed one by one."""
    return sum(_packed(x, one, own) for one, own in zip(packed, spec.split(";"), strict=True))


def register() -> None:
    """Registers the formulas once per process, however often the module is loaded."""
    ops = torch.ops.torchweld
    for op in (ops.chain, ops.group, ops.chain_kept):
        if op not in flop_registry:
            register_flop_formula(op)(_natural)
    for op in (ops.chain_packed, ops.group_packed):
        if op not in flop_registry:
            register_flop_formula(op, get_raw=True)(_packed)
    if ops.group_of_packed not in flop_registry:
        register_flop_formula(ops.group_of_packed, get_raw=True)(_packed_apart)
