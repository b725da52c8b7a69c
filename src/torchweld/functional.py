"""Chains and groups as functions of tensors.

Both run one op. Weights are read where they lie; nothing is kept between calls, so nothing can go
stale. `FusedMLP` keeps a packed copy for inference and is faster from about four rows on.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchweld import ops as _ops  # makes torch.ops.torchweld exist
from torchweld.blocks import Layer, format_spec
from torchweld.errors import BlockError

__all__ = ["linears", "mlp"]
assert _ops


def _flatten(layers: Sequence[Layer]) -> tuple[list[Tensor], str]:
    for i, layer in enumerate(layers):
        if not isinstance(layer, Layer):
            raise BlockError(
                f"layers[{i}] is a {type(layer).__name__}; expected torchweld.Layer(weight, bias, "
                "activation)"
            )
    spec = format_spec([layer.form for layer in layers])
    return [tensor for layer in layers for tensor in layer.tensors], spec


def mlp(x: Tensor, layers: Sequence[Layer]) -> Tensor:
    """`x [..., K]` through all layers, one after the other: `[..., N]` of the last."""
    tensors, spec = _flatten(layers)
    result: Tensor = torch.ops.torchweld.chain(x, tensors, spec)
    return result


def linears(x: Tensor, layers: Sequence[Layer]) -> list[Tensor]:
    """Every layer on the same `x [..., K]` (q, k and v, say): one `[..., N]` each."""
    tensors, spec = _flatten(layers)
    result: list[Tensor] = torch.ops.torchweld.group(x, tensors, spec)
    return result
