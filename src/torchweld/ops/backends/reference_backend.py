"""Backend `reference`, the specification: a chain or group in plain PyTorch.

Run in float64, it is what the numerical rule compares with. In: x `[..., K]`, the op's tensors and
forms. Out: `[..., N]`, or one per member of a group. A caller may replace the primitives that it
consists of, to run the specification with others. Dropout, which forms for training may have,
is `F.dropout`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import linear

from torchweld.core.activations import ACTIVATIONS
from torchweld.core.blocks import LayerForm, split_tensors
from torchweld.ops.backends.abilities import Abilities, BackendMode
from torchweld.ops.backends.backend import (
    Backend,
    Form,
    Runner,
    check_build,
    mode_of,
    plain_reasons,
)


def activate(form: LayerForm, z: Tensor) -> Tensor:
    return ACTIVATIONS[form.activation].apply(z, *form.parameters)


def drop(form: LayerForm, y: Tensor) -> Tensor:
    return functional.dropout(y, form.dropout)


class Primitives(NamedTuple):
    linear: Callable[[Tensor, Tensor, Tensor | None], Tensor] = linear
    activate: Callable[[LayerForm, Tensor], Tensor] = activate
    drop: Callable[[LayerForm, Tensor], Tensor] = drop  # asked only where a form has dropout


PLAIN = Primitives()


def layer(x: Tensor, form: LayerForm, tensors: Sequence[Tensor], by: Primitives = PLAIN) -> Tensor:
    return layer_output(form, pre_activations(x, form, tensors, by), by)


def pre_activations(
    x: Tensor, form: LayerForm, tensors: Sequence[Tensor], by: Primitives = PLAIN
) -> tuple[Tensor, ...]:
    """What the activation is applied to, or gate and up."""
    step = 2 if form.bias else 1
    products = []
    for i in range(form.weights):
        weight = tensors[i * step]
        bias = tensors[i * step + 1] if form.bias else None
        products.append(by.linear(x, weight.t() if form.transposed else weight, bias))
    match form.gate:
        case "none" | "separate":
            return tuple(products)
        case "first":
            gate, up = products[0].chunk(2, -1)
        case "second":
            up, gate = products[0].chunk(2, -1)
        case "interleaved":
            gate, up = products[0][..., ::2], products[0][..., 1::2]
    return gate, up


def layer_output(form: LayerForm, before: Sequence[Tensor], by: Primitives = PLAIN) -> Tensor:
    """The layer's output, from its pre-activations."""
    y = by.activate(form, before[0])
    for up in before[1:]:
        y = y * up
    return by.drop(form, y) if form.dropout else y


def chain(
    x: Tensor, tensors: Sequence[Tensor], forms: Sequence[LayerForm], by: Primitives = PLAIN
) -> Tensor:
    for form, own in split_tensors(forms, tensors):
        x = layer(x, form, own, by)
    return x


def group(
    x: Tensor, tensors: Sequence[Tensor], forms: Sequence[LayerForm], by: Primitives = PLAIN
) -> list[Tensor]:
    return [layer(x, form, own, by) for form, own in split_tensors(forms, tensors)]


def run(block: Form, x: Tensor, tensors: Sequence[Tensor]) -> Tensor | list[Tensor]:
    """`block` on x, by the functions above."""
    function = chain if block.kind == "chain" else group
    return function(x, tensors, block.forms)


class ReferenceRunner:
    """`block` bound to `tensors`, read at every call."""

    copied_bytes = 0

    def __init__(self, block: Form, tensors: Sequence[Tensor]) -> None:
        self._block = block
        self._tensors = tuple(tensors)

    def __call__(self, x: Tensor) -> Tensor | list[Tensor]:
        return run(self._block, x, self._tensors)


class ReferenceBackend:
    """Plain PyTorch, as a model is written: as slow as eager, and always available."""

    name = "reference"
    abilities = Abilities(
        devices=None,
        modes=(BackendMode(name="eager"),),
        needs="nothing but torch",
        trains=True,
        drops_out=True,
        deterministic=True,
    )

    def unavailable(self) -> list[str]:
        return []

    def unsupported_reasons(
        self,
        block: Form,
        shapes: Sequence[Sequence[int]],
        dtype: torch.dtype,
        device: torch.device,
        mode: str | None = None,
    ) -> list[str]:
        mode_of(self, mode)
        return plain_reasons(self, block, dtype, device)

    def build(self, block: Form, tensors: Sequence[Tensor], mode: str | None = None) -> Runner:
        check_build(self, block, tensors, mode)
        return ReferenceRunner(block, tensors)


BACKEND: Backend = ReferenceBackend()
