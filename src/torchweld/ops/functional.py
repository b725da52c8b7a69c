"""Chains and groups as functions of tensors.

Both run one op on the original weights. Nothing is kept between calls, so nothing can become stale.
`FusedMLP` keeps a packed copy for inference, and is faster from about four rows on.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchweld import ops as _ops  # makes torch.ops.torchweld exist
from torchweld.core.argument_checks import check_optional_flags
from torchweld.core.blocks import Layer, format_spec
from torchweld.core.errors import BlockError

__all__ = ["linears", "mlp"]
assert _ops


def _flatten(x: Tensor, layers: Sequence[Layer]) -> tuple[list[Tensor], str]:
    if not isinstance(x, Tensor):
        raise BlockError(f"x is a {type(x).__name__}; expected a tensor [..., K]")
    if not isinstance(layers, (list, tuple)):
        raise BlockError(
            f"layers is a {type(layers).__name__}; expected a list of torchweld.Layer(weight, "
            "bias, activation)"
        )
    for i, layer in enumerate(layers):
        if not isinstance(layer, Layer):
            raise BlockError(
                f"layers[{i}] is a {type(layer).__name__}; expected torchweld.Layer(weight, bias, "
                "activation)"
            )
    spec = format_spec([layer.form for layer in layers])
    return [tensor for layer in layers for tensor in layer.tensors], spec


def mlp(x: Tensor, layers: Sequence[Layer], recompute: bool | None = None) -> Tensor:
    """`x [..., K]` through all layers, one after the other: `[..., N]` of the last.

    `recompute` says what is kept for the backward: True, x alone; False, a hidden-sized tensor per
    layer too (gated: two), which is faster; None leaves that to torchweld.
    """
    tensors, spec = _flatten(x, layers)
    check_optional_flags("mlp", recompute=recompute)
    ops = torch.ops.torchweld
    result: Tensor
    if recompute is None:
        result = ops.chain(x, tensors, spec)
    else:
        result = ops.chain_training(x, tensors, spec, recompute)
    return result


def linears(x: Tensor, layers: Sequence[Layer]) -> list[Tensor]:
    """Every layer on the same `x [..., K]` (for instance q, k and v): one `[..., N]` per layer."""
    tensors, spec = _flatten(x, layers)
    result: list[Tensor] = torch.ops.torchweld.group(x, tensors, spec)
    return result
