"""The specification: a chain or group in plain PyTorch, and the oracle when run in fp64.

In: x `[..., K]`, the op's tensors and forms. Out: `[..., N]`, or one such for each member of a group.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from torchweld.activations import ACTIVATIONS
from torchweld.blocks import LayerForm, split_tensors


def layer(x: Tensor, form: LayerForm, tensors: Sequence[Tensor]) -> Tensor:
    step = 2 if form.bias else 1
    products = []
    for i in range(form.weights):
        weight = tensors[i * step]
        bias = tensors[i * step + 1] if form.bias else None
        products.append(F.linear(x, weight.t() if form.transposed else weight, bias))
    act = ACTIVATIONS[form.activation].apply
    match form.gate:
        case "none":
            return act(products[0], *form.parameters)
        case "separate":
            gate, up = products
        case "first":
            gate, up = products[0].chunk(2, -1)
        case "second":
            up, gate = products[0].chunk(2, -1)
        case "interleaved":
            gate, up = products[0][..., ::2], products[0][..., 1::2]
    return act(gate, *form.parameters) * up


def chain(x: Tensor, tensors: Sequence[Tensor], forms: Sequence[LayerForm]) -> Tensor:
    for form, own in split_tensors(forms, tensors):
        x = layer(x, form, own)
    return x


def group(x: Tensor, tensors: Sequence[Tensor], forms: Sequence[LayerForm]) -> list[Tensor]:
    return [layer(x, form, own) for form, own in split_tensors(forms, tensors)]
