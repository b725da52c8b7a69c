"""Activations by name: what each computes in plain PyTorch, and its parameters.

C++ has the same names in one list (`csrc/kernels/activations.inc`). A test compares the two.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from torchweld.core.errors import BlockError


@dataclass(frozen=True, kw_only=True)
class Activation:
    """`apply(z, *parameters)` is the definition; `apply_` overwrites z, if torch can do that."""

    apply: Callable[..., Tensor]
    apply_: Callable[..., Tensor] | None = None
    defaults: tuple[float, ...] = ()


def _relu2_(z: Tensor) -> Tensor:
    return torch.relu_(z).square_()


ACTIVATIONS: dict[str, Activation] = {
    "identity": Activation(apply=lambda z: z, apply_=lambda z: z),
    "relu": Activation(apply=torch.relu, apply_=torch.relu_),
    "relu2": Activation(apply=lambda z: torch.relu(z).square(), apply_=_relu2_),
    "leaky_relu": Activation(apply=F.leaky_relu, apply_=F.leaky_relu_, defaults=(0.01,)),
    "silu": Activation(apply=F.silu, apply_=torch.ops.aten.silu_.default),
    "gelu": Activation(apply=F.gelu, apply_=torch.ops.aten.gelu_.default),
    "gelu_tanh": Activation(
        apply=lambda z: F.gelu(z, approximate="tanh"),
        apply_=lambda z: torch.ops.aten.gelu_.default(z, approximate="tanh"),
    ),
    "quick_gelu": Activation(apply=lambda z: z * torch.sigmoid(1.702 * z)),
    "tanh": Activation(apply=torch.tanh, apply_=torch.tanh_),
    "sigmoid": Activation(apply=torch.sigmoid, apply_=torch.sigmoid_),
    "elu": Activation(apply=F.elu, apply_=F.elu_, defaults=(1.0,)),
    "mish": Activation(apply=F.mish, apply_=torch.ops.aten.mish_.default),
    "hardswish": Activation(apply=F.hardswish, apply_=torch.ops.aten.hardswish_.default),
    "softplus": Activation(apply=F.softplus, defaults=(1.0, 20.0)),
}


def parse_activation(text: str) -> tuple[str, tuple[float, ...]]:
    """`"elu"` or `"softplus:2,20"` as a name and its parameters, eager's defaults filled in."""
    if not isinstance(text, str):
        kind = getattr(text, "__name__", None) or type(text).__name__
        raise BlockError(
            f"activation is {kind}; it must be a name, as in 'gelu' or "
            f"'leaky_relu:0.2'; there are: {' '.join(ACTIVATIONS)}"
        )
    name, _, rest = text.partition(":")
    known = ACTIVATIONS.get(name)
    if known is None:
        raise BlockError(f"unknown activation {name!r}; there are: {' '.join(ACTIVATIONS)}")
    if not rest:
        return name, known.defaults
    try:
        given = tuple(float(number) for number in rest.split(","))
    except ValueError:
        given = ()
    if not given or len(given) > len(known.defaults):
        raise BlockError(
            f"activation {text!r}: {name} takes {len(known.defaults)} number(s), as in "
            f"{format_activation(name, known.defaults)!r}"
        )
    return name, given + known.defaults[len(given) :]


def format_activation(name: str, parameters: tuple[float, ...]) -> str:
    """The inverse of `parse_activation`; parameters that are eager's defaults are left out."""
    if name not in ACTIVATIONS:
        raise BlockError(f"unknown activation {name!r}; there are: {' '.join(ACTIVATIONS)}")
    if tuple(parameters) == ACTIVATIONS[name].defaults:
        return name
    return name + ":" + ",".join(repr(float(p)) for p in parameters)
