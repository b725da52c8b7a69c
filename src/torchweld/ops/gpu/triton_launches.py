"""Launches of the Triton kernels: tensors in, tensors out. Nothing is allocated but by torch, and
nothing synchronises, so all of it can be captured into a CUDA graph. M rows, K in, N out.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from torchweld.core.errors import BlockError
from torchweld.ops.gpu import kernel_tiles, tile_tuning, triton_narrow, triton_pointwise
from torchweld.ops.gpu import triton_products as products
from torchweld.ops.gpu.gpu_launches import note, on_device_of
from torchweld.ops.gpu.gpu_layers import GpuLayer
from torchweld.ops.gpu.kernel_tiles import Tile


def launch(
    kernel: Any, grid: tuple[int, ...], tile: Tile, near: Tensor, *given: Any, **by: Any
) -> None:
    """On the device and stream of `near`."""
    note(kernel.__name__)
    with on_device_of(near):
        kernel[grid](*given, **by, **tile.launch)


def fp32_precision(near: Tensor) -> str:
    """How products of fp32 are computed near this tensor: in TF32 only if torch's flag for matmul
    says so, and if Triton has it there: of AMD's GPUs, on gfx942 alone."""
    if torch.backends.cuda.matmul.fp32_precision != "tf32":
        return "ieee"
    return "tf32" if torch.version.hip is None or _amd_arch(near) == "gfx942" else "ieee"


def _amd_arch(near: Tensor) -> str:
    """`gfx942`; torch also says which features are on, `gfx942:sramecc+:xnack-`."""
    found: str = torch.cuda.get_device_properties(near.device).gcnArchName
    return found.partition(":")[0]


def _pointwise_grid(tile: Tile, M: int, N: int) -> tuple[int, int]:
    return triton.cdiv(M, tile.rows), triton.cdiv(N, tile.columns)


def _product_grid(tile: Tile, M: int, N: int) -> tuple[int]:
    return (triton.cdiv(M, tile.rows) * triton.cdiv(N, tile.columns),)


def _mask_row(mask: Tensor | None) -> int:
    return 0 if mask is None else mask.stride(0)


def activate(
    layer: GpuLayer, gate: Tensor, up: Tensor, biased: bool, mask: Tensor | None, y: Tensor
) -> Tensor:
    """y = act(gate) * up, with the layer's biases added before if they are not in there yet."""
    (M, N), tile = y.shape, kernel_tiles.POINTWISE
    gate_bias, up_bias = layer.gate_and_up(layer.biases) if biased else (gate, up)
    launch(
        triton_pointwise.torchweld_pointwise, _pointwise_grid(tile, M, N), tile, y,
        gate, up, gate_bias, up_bias, y, y if mask is None else mask,
        M, N, *gate.stride(), *up.stride(), gate_bias.stride(0), up_bias.stride(0),
        _mask_row(mask), layer.scale, *layer.parameters,
        ACT=layer.form.activation, GATED=layer.gated, HAS_BIAS=biased, DROPS=mask is not None,
        BM=tile.rows, BN=tile.columns,
    )  # fmt: skip
    return y


class LayerGradients:
    """Where the gradients of a layer's pre-activations go, and what is made beside them.

    of_weights: one `[M, rows of the weight]` tensor per weight, laid out as the weight's rows are
    hidden: the layer's output again, if it is wanted
    """

    def __init__(self, layer: GpuLayer, like: Tensor, M: int, *, hidden: bool, sums: bool) -> None:
        self.of_weights = [like.new_empty((M, w.shape[0])) for w in layer.weights]
        self.gate, self.up = layer.gate_and_up(self.of_weights, 1)
        self.hidden = like.new_empty((M, layer.N)) if hidden else None
        self._layer, self._wants_sums = layer, sums
        self._sums: Tensor | None = None

    def sums_for(self, tiles: int) -> tuple[Tensor, Tensor]:
        """Partial sums of gate and up: a row for each row tile."""
        layer = self._layer
        if not self._wants_sums:
            return self.gate, self.up
        self._sums = self.gate.new_empty((2, tiles, layer.N), dtype=torch.float32)
        return self._sums[0], self._sums[1]

    def of_biases(self, dtype: torch.dtype) -> list[Tensor]:
        """One per bias, in the layout of the biases."""
        assert self._sums is not None
        sums = self._sums.sum(1)  # one order of adding: the same bits at every run
        layer = self._layer
        if not layer.gated:
            return [sums[0].to(dtype)]
        found = [torch.empty_like(b, dtype=dtype, memory_format=torch.contiguous_format)
                 for b in layer.biases]  # fmt: skip
        for to, part in zip(layer.gate_and_up(found), sums, strict=True):
            to.copy_(part)
        return found


def activate_backward(
    layer: GpuLayer, d: Tensor, saved: Sequence[Tensor], mask: Tensor | None, made: LayerGradients
) -> None:
    """`made` from d, the gradient of the layer's output."""
    (M, N), tile = d.shape, kernel_tiles.POINTWISE_BACKWARD
    gate_sums, up_sums = made.sums_for(triton.cdiv(M, tile.rows))
    hidden = made.hidden
    # A last layer with dropout alone saves nothing, and its gradient does not depend on its value:
    # any memory of the size will do.
    z, v = (saved[0], saved[-1]) if saved else (made.gate, made.up)
    launch(
        triton_pointwise.torchweld_pointwise_backward, _pointwise_grid(tile, M, N), tile, d,
        d, z, v, d if hidden is None else hidden, made.gate, made.up,
        gate_sums, up_sums, d if mask is None else mask,
        M, N, *d.stride(), *made.gate.stride(), _mask_row(mask), layer.scale, *layer.parameters,
        ACT=layer.form.activation, GATED=layer.gated, DROPS=mask is not None,
        HIDDEN=hidden is not None, SUMS=gate_sums is not made.gate,
        BM=tile.rows, BN=tile.columns,
    )  # fmt: skip


def linear(
    layer: GpuLayer, x: Tensor, saved: Sequence[Tensor], mask: Tensor | None, y: Tensor
) -> Tensor:
    """A layer in one kernel: product, biases, activation, gate, dropout; fills `saved` if any."""
    (M, K), N = x.shape, layer.N
    gate, up = layer.gate_and_up(layer.weights)
    biased = bool(layer.biases)
    gate_bias, up_bias = layer.gate_and_up(layer.biases) if biased else (gate, up)
    z, v = (saved[0], saved[-1]) if saved else (y, y)

    def run(tile: Tile) -> None:
        launch(
            products.torchweld_linear, _product_grid(tile, M, N), tile, x,
            x, gate, up, gate_bias, up_bias, y, z, v, y if mask is None else mask,
            M, N, K, *x.stride(), gate.stride(1), gate.stride(0), up.stride(1), up.stride(0),
            gate_bias.stride(0), up_bias.stride(0), _mask_row(mask), layer.scale,
            *layer.parameters,
            ACT=layer.form.activation, GATED=layer.gated, HAS_BIAS=biased,
            DROPS=mask is not None, SAVES=bool(saved), PRECISION=fp32_precision(x),
            BM=tile.rows, BN=tile.columns, BK=tile.depth, GROUP=tile.group,
        )  # fmt: skip

    about = (N, K, layer.form.activation, bool(saved), fp32_precision(x))
    tile_tuning.run_best("linear", layer.gated, x, M, about, run)
    return y


def linear_backward(
    upper: GpuLayer, gradients: Sequence[Tensor], layer: GpuLayer,
    saved: Sequence[Tensor], mask: Tensor | None, made: LayerGradients,
) -> None:  # fmt: skip
    """`made` for `layer`, from the gradients of the next layer's pre-activations, in one kernel."""
    g, w = gradients[0], upper.weights[0]
    g2, w2 = gradients[-1], upper.weights[-1]
    (M, J), N = g.shape, layer.N
    hidden = made.hidden

    def run(tile: Tile) -> None:
        gate_sums, up_sums = made.sums_for(triton.cdiv(M, tile.rows))
        launch(
            products.torchweld_linear_backward, _product_grid(tile, M, N), tile, g,
            g, w, g2, w2, saved[0], saved[-1], g if hidden is None else hidden,
            made.gate, made.up, gate_sums, up_sums, g if mask is None else mask,
            M, N, J, *g.stride(), *w.stride(), *w2.stride(), *made.gate.stride(),
            _mask_row(mask), layer.scale, *layer.parameters,
            PAIRS=len(gradients), ACT=layer.form.activation, GATED=layer.gated,
            DROPS=mask is not None, HIDDEN=hidden is not None, SUMS=gate_sums is not made.gate,
            PRECISION=fp32_precision(g),
            BM=tile.rows, BN=tile.columns, BK=tile.depth, GROUP=tile.group,
        )  # fmt: skip

    about = (N, J, layer.form.activation, hidden is not None, fp32_precision(g))
    tile_tuning.run_best("linear_backward", layer.gated, g, M, about, run)


def narrow(
    layers: Sequence[GpuLayer], x: Tensor, saved: Sequence[Sequence[Tensor]], y: Tensor
) -> Tensor:
    """All layers in one kernel; fills what is in `saved`, a list for each layer."""
    M, sizes = x.shape[0], (layers[0].K, *(one.N for one in layers))
    padded = tuple(max(16, triton.next_power_of_2(size)) for size in sizes)
    chunks = tuple(
        kernel_tiles.narrow_chunk(K, N, x.element_size()) for K, N in itertools.pairwise(padded)
    )
    tile = tile_tuning.forced() or kernel_tiles.narrow_tile(M)
    views = [one.gate_and_up(one.weights) for one in layers]
    biases = [one.gate_and_up(one.biases) if one.biases else pair
              for one, pair in zip(layers, views, strict=True)]  # fmt: skip
    strides = tuple(
        (gate.stride(1), gate.stride(0), up.stride(1), up.stride(0), a.stride(0), b.stride(0))
        for (gate, up), (a, b) in zip(views, biases, strict=True)
    )
    launch(
        triton_narrow.torchweld_narrow, (triton.cdiv(M, tile.rows),), tile, x,
        x, y, tuple(gate for gate, _ in views), tuple(up for _, up in views),
        tuple(a for a, _ in biases), tuple(b for _, b in biases),
        tuple(own[0] if own else y for own in saved), tuple(own[-1] if own else y for own in saved),
        M, *x.stride(), strides,
        SIZES=sizes, PADDED=padded, CHUNKS=chunks,
        ACTS=tuple(one.form.activation for one in layers),
        P0=tuple(one.parameters[0] for one in layers),
        P1=tuple(one.parameters[1] for one in layers),
        GATED=tuple(one.gated for one in layers), BIASED=tuple(bool(one.biases) for one in layers),
        SAVED=tuple(bool(own) for own in saved), LAYERS=len(layers),
        PRECISION=fp32_precision(x), BM=tile.rows,
    )  # fmt: skip
    return y


def dropout_mask(like: Tensor, features: int, p: float) -> Tensor:
    """One bit per value, kept with probability 1 - p, in `[..., (features + 7) // 8]` bytes.

    The seed comes from torch's generator of the device, by an op that graphs can capture. From it
    and the place of a value follows the bit: whatever the tile sizes, and again in a replay.
    """
    if not (like.dim() >= 1 and features >= 1 and 0 < p < 1):
        raise BlockError(
            "torchweld: dropout_mask takes a tensor with a dimension of features, at least one "
            f"feature, and 0 < p < 1; p is {p}, features {features}"
        )
    sizes = (*like.shape[:-1], (features + 7) // 8)
    mask = torch.empty(sizes, dtype=torch.uint8, device=like.device)
    rows = mask.view(-1, sizes[-1])
    seed = torch.randint(1 << 62, (1,), device=like.device)
    (M, BYTES), tile = rows.shape, kernel_tiles.DROPOUT
    if M:
        launch(
            triton_pointwise.torchweld_dropout_mask, _pointwise_grid(tile, M, BYTES), tile, like,
            seed, rows, M, features, BYTES, p, BM=tile.rows, BN=tile.columns,
        )  # fmt: skip
    return mask
