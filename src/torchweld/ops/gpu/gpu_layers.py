"""A chain's layers as kernels see them: every weight as `[out, in]` views, gate and up apart.

Layouts of gates and transposed weights are nothing but strides here. M rows, K in, N out.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from torchweld.core.blocks import LayerForm, parse_spec, split_tensors

parsed = functools.lru_cache(maxsize=1024)(parse_spec)


@dataclass(frozen=True)
class GpuLayer:
    """A layer and its tensors. `weights` are `[out, in]`; each has a bias, or none has."""

    form: LayerForm
    weights: tuple[Tensor, ...]
    biases: tuple[Tensor, ...]

    @property
    def gated(self) -> bool:
        return self.form.gate != "none"

    @property
    def K(self) -> int:  # noqa: N802
        return self.weights[0].shape[1]

    @property
    def N(self) -> int:  # noqa: N802
        """Features that come out; a gated layer's one weight has twice as many rows."""
        halves = self.form.gate in ("first", "second", "interleaved")
        return self.weights[0].shape[0] // (2 if halves else 1)

    def gate_and_up(self, tensors: Sequence[Tensor], dim: int = 0) -> tuple[Tensor, Tensor]:
        """Views of what belongs to gate and up along `dim`: of weights, biases, or products.

        An ungated layer has one tensor, which is both.
        """
        gate = self.form.gate
        if gate == "none":
            return tensors[0], tensors[0]
        if gate == "separate":
            return tensors[0], tensors[1]
        both = tensors[0].movedim(dim, 0)
        if gate == "interleaved":
            pair = both[0::2], both[1::2]
        else:
            halves = both[: self.N], both[self.N :]
            pair = halves if gate == "first" else halves[::-1]
        return pair[0].movedim(0, dim), pair[1].movedim(0, dim)

    @property
    def parameters(self) -> tuple[float, float]:
        """Of the activation; two, as kernels take them."""
        given = (*self.form.parameters, 0.0, 0.0)
        return given[0], given[1]

    @property
    def scale(self) -> float:
        """What dropout multiplies kept values by."""
        return 1.0 / (1.0 - self.form.dropout)


def layers_of(spec: str, params: Sequence[Tensor]) -> list[GpuLayer]:
    layers = []
    for form, own in split_tensors(parsed(spec), params):
        step = 2 if form.bias else 1
        weights = tuple(w.t() if form.transposed else w for w in own[::step])
        layers.append(GpuLayer(form, weights, tuple(own[1::2]) if form.bias else ()))
    return layers


def saved_counts(layers: Sequence[GpuLayer]) -> list[int]:
    """How many pre-activations each layer keeps for its backward: contract of `chain_saving`."""
    return [
        2 if one.gated else int(one.form.activation != "identity" or i + 1 < len(layers))
        for i, one in enumerate(layers)
    ]
