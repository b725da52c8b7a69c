"""The ways in which a GPU runs a chain, forward and backward.

pointwise  products by torch (cuBLAS, hipBLAS), and one kernel for bias, activation and gate. It
           launches no more than eager, and is what `torchweld::chain` does without a plan
epilogue   each layer in one Triton kernel: product, bias, activation, gate. In the backward the
           gradient of an activation is part of the product that feeds it
narrow     a whole chain of widths up to 256 in one Triton kernel; backward as in `epilogue`

Each way is two ops, <way>_saving and <way>_backward, below one autograd function
(csrc/torch_glue/autograd.cpp); `gpu_ops.py` registers them. Weight gradients are plain products,
which torch's are best at. M rows, K in, N out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from torchweld.core.errors import BlockError
from torchweld.ops.gpu.gpu_layers import GpuLayer, layers_of, saved_counts

MOST_NARROW = 256  # the widest layer that the way `narrow` takes


def kernels() -> Any:
    """Imported late: Triton takes a second."""
    from torchweld.ops.gpu import triton_launches

    return triton_launches


class Way(Protocol):
    """How a way runs layers on x `[M, K]`. `saved`: a list for each layer, empty if none is due."""

    def forward(
        self, layers: Sequence[GpuLayer], x: Tensor, saved: Sequence[list[Tensor]],
        masks: Sequence[Tensor | None],
    ) -> Tensor: ...  # fmt: skip

    def hidden_gradients(
        self, upper: GpuLayer, gradients: Sequence[Tensor], layer: GpuLayer,
        saved: Sequence[Tensor], mask: Tensor | None, *, hidden: bool, sums: bool,
    ) -> MadeGradients: ...  # fmt: skip


class MadeGradients(Protocol):
    of_weights: list[Tensor]
    hidden: Tensor | None

    def of_biases(self, dtype: torch.dtype) -> list[Tensor]: ...


class Pointwise:
    """Products by torch, the rest in one kernel."""

    def forward(
        self, layers: Sequence[GpuLayer], x: Tensor, saved: Sequence[list[Tensor]],
        masks: Sequence[Tensor | None],
    ) -> Tensor:  # fmt: skip
        for layer, own, mask in zip(layers, saved, masks, strict=True):
            x = self._layer(layer, x, own, mask)
        return x

    def _layer(
        self, layer: GpuLayer, x: Tensor, saved: list[Tensor], mask: Tensor | None
    ) -> Tensor:
        if not layer.gated and layer.form.activation == "identity" and mask is None:
            y = _product(x, layer.weights[0], layer.biases[0] if layer.biases else None)
            if saved:
                saved[0].copy_(y)
            return y
        y = x.new_empty((x.shape[0], layer.N))
        if saved:  # biases are part of what is kept
            biases = layer.gate_and_up(layer.biases) if layer.biases else (None, None)
            for to, weight, bias in zip(
                saved, layer.gate_and_up(layer.weights), biases, strict=False
            ):
                _product(x, weight, bias, out=to)
            kernels().activate(layer, saved[0], saved[-1], False, mask, y)
            return y
        made = [_product(x, weight) for weight in layer.weights]
        gate, up = layer.gate_and_up(made, 1)
        kernels().activate(layer, gate, up, bool(layer.biases), mask, y)
        return y

    def hidden_gradients(
        self, upper: GpuLayer, gradients: Sequence[Tensor], layer: GpuLayer,
        saved: Sequence[Tensor], mask: Tensor | None, *, hidden: bool, sums: bool,
    ) -> MadeGradients:  # fmt: skip
        d = _input_gradient(upper, gradients)
        return output_gradients(layer, d, saved, mask, hidden=hidden, sums=sums)


class Epilogue:
    """Every layer one kernel."""

    def forward(
        self, layers: Sequence[GpuLayer], x: Tensor, saved: Sequence[list[Tensor]],
        masks: Sequence[Tensor | None],
    ) -> Tensor:  # fmt: skip
        for layer, own, mask in zip(layers, saved, masks, strict=True):
            x = kernels().linear(layer, x, own, mask, x.new_empty((x.shape[0], layer.N)))
        return x

    def hidden_gradients(
        self, upper: GpuLayer, gradients: Sequence[Tensor], layer: GpuLayer,
        saved: Sequence[Tensor], mask: Tensor | None, *, hidden: bool, sums: bool,
    ) -> MadeGradients:  # fmt: skip
        M = gradients[0].shape[0]
        made: MadeGradients = kernels().LayerGradients(
            layer, gradients[0], M, hidden=hidden, sums=sums
        )
        kernels().linear_backward(upper, gradients, layer, saved, mask, made)
        return made


class Narrow(Epilogue):
    """All layers one kernel."""

    def forward(
        self, layers: Sequence[GpuLayer], x: Tensor, saved: Sequence[list[Tensor]],
        masks: Sequence[Tensor | None],
    ) -> Tensor:  # fmt: skip
        widest = max(layers[0].K, *(one.N for one in layers))
        if widest > MOST_NARROW:
            raise BlockError(
                f"torchweld: a layer is {widest} wide; the way narrow takes up to {MOST_NARROW}"
            )
        if any(mask is not None for mask in masks):
            raise BlockError("torchweld: the way narrow applies no dropout")
        y = x.new_empty((x.shape[0], layers[-1].N))
        kernels().narrow(layers, x, saved, y)
        return y


# ---- parts of every way ----


def _product(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """x · weightᵀ + bias by torch."""
    if bias is None:
        return torch.mm(x, weight.t(), out=out)
    return torch.addmm(bias, x, weight.t(), out=out)


def _input_gradient(layer: GpuLayer, gradients: Sequence[Tensor]) -> Tensor:
    """The gradient of a layer's input, from those of its pre-activations."""
    d = torch.mm(gradients[0], layer.weights[0])
    for g, weight in zip(gradients[1:], layer.weights[1:], strict=True):
        d = torch.addmm(d, g, weight)
    return d


def output_gradients(
    layer: GpuLayer, d: Tensor, saved: Sequence[Tensor], mask: Tensor | None,
    *, hidden: bool, sums: bool,
) -> MadeGradients:  # fmt: skip
    """Gradients of a layer's pre-activations from d, that of its output."""
    made: MadeGradients = kernels().LayerGradients(layer, d, d.shape[0], hidden=hidden, sums=sums)
    kernels().activate_backward(layer, d, saved, mask, made)
    return made


@dataclass
class PlainGradients:
    """Of a last layer without activation, gate and dropout: what was given is the gradient."""

    of_weights: list[Tensor]
    hidden: Tensor | None = None

    def of_biases(self, dtype: torch.dtype) -> list[Tensor]:
        return [self.of_weights[0].sum(0)]


def _masks_of(layers: Sequence[GpuLayer], masks: Sequence[Tensor]) -> list[Tensor | None]:
    """The mask of each layer, as rows."""
    left = iter(masks)
    return [_rows(next(left).contiguous()) if one.form.dropout > 0 else None for one in layers]


def _rows(x: Tensor) -> Tensor:
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def _empties(layers: Sequence[GpuLayer], x: Tensor) -> list[list[Tensor]]:
    """Memory for what each layer saves."""
    return [
        [x.new_empty((x.shape[0], layer.N)) for _ in range(count)]
        for layer, count in zip(layers, saved_counts(layers), strict=True)
    ]


def saving(
    way: Way, x: Tensor, params: Sequence[Tensor], masks: Sequence[Tensor], spec: str, save: bool
) -> list[Tensor]:
    """The contract of `torchweld::chain_saving`: y, then pre-activations, or else an int64."""
    layers = layers_of(spec, params)
    rows, lead = _rows(x), x.shape[:-1]
    saved = _empties(layers, rows) if save else [[] for _ in layers]
    if rows.shape[0]:
        y = way.forward(layers, rows, saved, _masks_of(layers, masks))
    else:
        y = rows.new_empty((0, layers[-1].N))
    results = [y.view(*lead, y.shape[1])]
    results += [one.view(*lead, one.shape[1]) for own in saved for one in own]
    if not save and any(saved_counts(layers)):
        # In place of a checksum, which would take a synchronisation. Nobody reads it.
        results.append(torch.empty((1,), dtype=torch.int64, device=x.device))
    return results


def backward(
    way: Way, grad: Tensor, x: Tensor, params: Sequence[Tensor], saved: Sequence[Tensor],
    masks: Sequence[Tensor], spec: str, needed: Sequence[bool],
) -> list[Tensor]:  # fmt: skip
    """The contract of `torchweld::chain_backward`: the gradients that are needed, in order."""
    layers = layers_of(spec, params)
    rows, given = _rows(x), _rows(grad)
    of_layers = _masks_of(layers, masks)
    if not rows.shape[0]:
        wanted = [t for t, asked in zip((x, *params), needed, strict=True) if asked]
        return [torch.zeros(t.shape, dtype=t.dtype, device=t.device) for t in wanted]
    before = _before(way, layers, rows, saved, of_layers)
    found = _backward(way, layers, rows, given, before, of_layers, needed)
    if found[0] is not None:
        found[0] = found[0].view(x.shape)
    return [one for one in found if one is not None]


def _before(
    way: Way, layers: Sequence[GpuLayer], x: Tensor, saved: Sequence[Tensor],
    masks: Sequence[Tensor | None],
) -> list[list[Tensor]]:  # fmt: skip
    """The pre-activations of each layer: what was saved, or the same computed again."""
    if saved and saved[0].dtype != torch.int64:
        left = iter(saved)
        return [
            [_rows(next(left)).contiguous() for _ in range(count)] for count in saved_counts(layers)
        ]
    again = _empties(layers, x)
    # The last layer runs only if its own are needed.
    last = len(layers) if again[-1] else len(layers) - 1
    if last:
        way.forward(layers[:last], x, again[:last], masks[:last])
    return again


def _backward(
    way: Way, layers: Sequence[GpuLayer], x: Tensor, grad: Tensor, before: Sequence[list[Tensor]],
    masks: Sequence[Tensor | None], needed: Sequence[bool],
) -> list[Tensor | None]:  # fmt: skip
    """Gradients of x and of every tensor; None for those that are not needed."""
    flags, at = [], 1
    for layer in layers:
        flags.append(needed[at : at + layer.form.tensors])
        at += layer.form.tensors
    lowest = 0 if needed[0] else next((i for i, own in enumerate(flags) if any(own)), len(layers))
    found: list[list[Tensor | None]] = [[None] * len(own) for own in flags]
    of_x: Tensor | None = None
    if lowest == len(layers):
        return [None] * len(needed)

    def wants(i: int) -> dict[str, bool]:
        """Of layer i: its output, for the weights above it, and the sums for its biases."""
        step = 2 if layers[i].form.bias else 1
        above = i + 1 < len(layers) and any(flags[i + 1][:: 2 if layers[i + 1].form.bias else 1])
        return {"hidden": above, "sums": step == 2 and any(flags[i][1::2])}

    last = len(layers) - 1
    own = layers[last]
    made: MadeGradients = (
        output_gradients(own, grad, before[last], masks[last], **wants(last))
        if before[last] or masks[last] is not None
        else PlainGradients([grad])
    )
    for i in range(last, lowest - 1, -1):
        layer, gradients = layers[i], made.of_weights
        _keep_biases(layer, made, flags[i], found[i])
        upper = made
        if i > lowest:
            made = way.hidden_gradients(
                layer, gradients, layers[i - 1], before[i - 1], masks[i - 1], **wants(i - 1)
            )
        elif needed[0]:
            of_x = _input_gradient(layer, gradients)
        step = 2 if layer.form.bias else 1
        if any(flags[i][::step]):
            h = x if i == 0 else made.hidden if made is not upper else None
            if h is None:  # nothing below is needed, so its output was not computed on the way
                h = x.new_empty((x.shape[0], layers[i - 1].N))
                z = before[i - 1]
                kernels().activate(layers[i - 1], z[0], z[-1], False, masks[i - 1], h)
            _keep_weights(layer, gradients, h, flags[i], found[i])
    return [of_x, *(one for own in found for one in own)]


def _keep_biases(
    layer: GpuLayer, made: MadeGradients, needed: Sequence[bool], found: list[Tensor | None]
) -> None:
    if not layer.biases or not any(needed[1::2]):
        return
    for w, gradient in enumerate(made.of_biases(layer.biases[0].dtype)):
        if needed[2 * w + 1]:
            found[2 * w + 1] = gradient


def _keep_weights(
    layer: GpuLayer, gradients: Sequence[Tensor], h: Tensor, needed: Sequence[bool],
    found: list[Tensor | None],
) -> None:  # fmt: skip
    step = 2 if layer.form.bias else 1
    for w, g in enumerate(gradients):
        if needed[w * step]:
            found[w * step] = h.t().mm(g) if layer.form.transposed else g.t().mm(h)


WAYS: dict[str, Way] = {"pointwise": Pointwise(), "epilogue": Epilogue(), "narrow": Narrow()}
DEFAULT_WAY = "pointwise"
