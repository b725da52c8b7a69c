"""The FLOPs of torchweld's ops, for torch.utils.flop_counter.

They are counted as torch counts its own products: a multiplication and an addition per weight
element and row, without biases and activations. A backward counts the gradients that are needed,
and the products of the forward that it computes again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, register_flop_formula

from torchweld.core.blocks import parse_spec

# The header of packed weights, in int64: PackedHeader and PackedEntry in packed_weights.h.
_HEADER, _ENTRY = 8, 3


def _natural(x: Sequence[int], params: Sequence[Sequence[int]], *_: Any, **__: Any) -> int:
    """FLOPs from shapes: weights have two dimensions, biases one."""
    rows = math.prod(x[:-1])
    return sum(2 * rows * math.prod(shape) for shape in params if len(shape) == 2)


def _chain_backward(
    grad: Sequence[int],
    x: Sequence[int],
    params: Sequence[Sequence[int]],
    saved: Sequence[Sequence[int]],
    masks: Sequence[Sequence[int]],
    spec: str,
    needed: Sequence[bool],
    *_: Any,
    **__: Any,
) -> int:
    return _backward(
        math.prod(x[:-1]), _layers(params, spec, needed), needed[0], _has_values(saved)
    )


def _group_backward(
    grads: Sequence[Sequence[int]],
    x: Sequence[int],
    params: Sequence[Sequence[int]],
    saved: Sequence[Sequence[int]],
    spec: str,
    needed: Sequence[bool],
    *_: Any,
    **__: Any,
) -> int:
    """Every member is a chain of one."""
    rows = math.prod(x[:-1])
    members = _layers(params, spec, needed)
    return sum(_backward(rows, [member], needed[0], _has_values(saved)) for member in members)


class _LayerFlops(NamedTuple):
    weights: int  # elements of all
    needed_weights: int  # elements of those that need a gradient
    any_needed: bool  # whether any tensor of the layer does
    linear: bool  # its gradient does not depend on its value


def _layers(
    params: Sequence[Sequence[int]], spec: str, needed: Sequence[bool]
) -> list[_LayerFlops]:
    found, first = [], 0
    for form in parse_spec(spec):
        own = range(first, first + form.tensors)
        sizes = {i: math.prod(params[i]) for i in own if len(params[i]) == 2}
        found.append(
            _LayerFlops(
                weights=sum(sizes.values()),
                needed_weights=sum(size for i, size in sizes.items() if needed[1 + i]),
                any_needed=any(needed[1 + i] for i in own),
                linear=form.activation == "identity" and form.gate == "none",
            )
        )
        first += form.tensors
    return found


def _has_values(saved: Sequence[Sequence[int]]) -> bool:
    """Whether hidden values were saved. A checksum of them, one number, is not enough."""
    return bool(saved) and [list(shape) for shape in saved] != [[1]]


def _backward(rows: int, layers: Sequence[_LayerFlops], x_needed: bool, saved: bool) -> int:
    """Products for gradients of weights, of inputs, and for values that were not saved."""
    products, again, below = 0, 0, x_needed
    values = 0  # how many layers' products have to be computed again
    for i, layer in enumerate(layers):
        if below:  # the gradient of its input goes on
            products += layer.weights
        if layer.needed_weights:  # which takes its input: the output of the layer before
            products += layer.needed_weights
            values = max(values, i)
        below = below or layer.any_needed
        if below and not layer.linear:
            values = max(values, i + 1)
    if not saved:
        again = sum(layer.weights for layer in layers[:values])
    return 2 * rows * (products + again)


def _packed(x: Tensor, packed: Tensor, spec: str, *_: Any, **__: Any) -> int:
    """FLOPs from the header of packed weights; 0 if their contents cannot be read."""
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
    """The FLOPs of a group whose members were packed one by one."""
    return sum(_packed(x, one, own) for one, own in zip(packed, spec.split(";"), strict=True))


def register() -> None:
    """Registers the formulas once per process, however often the module is loaded."""
    ops = torch.ops.torchweld
    natural = (ops.chain, ops.group, ops.chain_kept)
    for op in (*natural, ops.chain_training, ops.chain_saving, ops.group_saving):
        if op not in flop_registry:
            register_flop_formula(op)(_natural)
    for op, formula in (
        (ops.chain_backward, _chain_backward),
        (ops.group_backward, _group_backward),
    ):
        if op not in flop_registry:
            register_flop_formula(op)(formula)
    for op in (ops.chain_packed, ops.group_packed):
        if op not in flop_registry:
            register_flop_formula(op, get_raw=True)(_packed)
    if ops.group_of_packed not in flop_registry:
        register_flop_formula(ops.group_of_packed, get_raw=True)(_packed_apart)
