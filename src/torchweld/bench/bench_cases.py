"""What is measured: an MLP, the shape of what it is called with, a dtype.

An `MlpShape` draws its weights and inputs from a seed, as float32 arrays. So every process has the
same ones without passing them around; 16-bit cells round them. M rows, K in, N out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
from numpy.typing import NDArray

from torchweld.core.activations import parse_activation
from torchweld.core.blocks import LayerForm
from torchweld.core.errors import TorchweldError
from torchweld.core.record_fields import Length, Positive

Array = NDArray[np.floating[Any]]
SEED = 2024
# Of rows or features in a file.
MOST_ELEMENTS = 1 << 40

# Torch's names, and how they are shown and may be typed.
SHORT_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "fp64"}


@dataclass(frozen=True, kw_only=True)
class LinearShape:
    """One product of an MLP: weight_NK as nn.Linear keeps it, and its bias or None."""

    weight: Array
    bias: Array | None


@dataclass(frozen=True, kw_only=True)
class MlpShape:
    """An MLP without its weights; gated, it computes `down(activation(gate(x)) · up(x))`.

    With two sizes it is one Linear, and the activation has no say. `transposed` weights are kept as
    [in, out], as GPT-2's Conv1D does; such blocks are measured for tables of known speeds alone.
    """

    sizes: Annotated[tuple[Positive, ...], Length(2, 100)]
    activation: str = "gelu"
    gated: bool = False
    bias: bool = True
    transposed: bool = False

    def __post_init__(self) -> None:
        parse_activation(self.activation)
        if len(self.sizes) < 2 or min(self.sizes) < 1 or (self.gated and len(self.sizes) != 3):
            wanted = "exactly three" if self.gated else "two or more"
            raise TorchweldError(
                f"sizes are {'x'.join(map(str, self.sizes))}; expected {wanted} whole numbers of "
                "at least 1, such as 768x3072x768"
            )

    @property
    def shape_text(self) -> str:
        return "→".join(map(str, self.sizes))

    @property
    def kind_text(self) -> str:
        plain = "linear" if len(self.sizes) == 2 else self.activation + "-gated" * self.gated
        return plain + "-conv1d" * self.transposed

    @property
    def name(self) -> str:
        return f"{self.shape_text} {self.kind_text}"

    @property
    def forms(self) -> tuple[LayerForm, ...]:
        name, parameters = parse_activation(self.activation)
        inner = LayerForm(
            activation=name,
            parameters=parameters,
            bias=self.bias,
            transposed=self.transposed,
            gate="separate" if self.gated else "none",
        )
        last = LayerForm(bias=self.bias, transposed=self.transposed)
        return (*[inner] * (len(self.sizes) - 2), last)

    @property
    def products(self) -> list[tuple[int, int]]:
        """(K, N) of every Linear, the gate's before up's."""
        pairs = list(zip(self.sizes, self.sizes[1:], strict=False))
        return [pairs[0], *pairs] if self.gated else pairs

    def flops(self, rows: int) -> int:
        """Multiply-adds of the products, two operations each."""
        return 2 * rows * sum(K * N for K, N in self.products)

    def weight_bytes(self, dtype: str) -> int:
        """Of the matrices; `dtype` is torch's name."""
        return sum(K * N for K, N in self.products) * itemsize(dtype)

    def linears(self, seed: int = SEED) -> list[LinearShape]:
        """Weights and biases as nn.Linear would draw them: uniform within 1 / sqrt(K)."""
        rng = np.random.default_rng(seed)

        def uniform(shape: tuple[int, ...], bound: float) -> Array:
            values = rng.random(shape, dtype=np.float32)
            values *= 2.0 * bound
            values -= bound
            return values

        return [
            LinearShape(
                weight=uniform((N, K), 1.0 / math.sqrt(K)),
                bias=uniform((N,), 1.0 / math.sqrt(K)) if self.bias else None,
            )
            for K, N in self.products
        ]

    def inputs(self, rows: int, seed: int = SEED + 1) -> Array:
        """Normal inputs; fewer rows are the first of more."""
        rng = np.random.default_rng(seed)
        return rng.standard_normal((rows, self.sizes[0]), dtype=np.float32)


def itemsize(dtype: str) -> int:
    return int(getattr(torch, dtype).itemsize)


@dataclass(frozen=True, kw_only=True)
class Case:
    """What one cell measures.

    lead:  the dimensions of x before its features: rows, or batch and sequence
    dtype: torch's name
    label: what the row is called, where it has a name of its own
    cold:  whether the caches are emptied before every call, even if the bench does not ask for it
    """

    mlp: MlpShape
    lead: Annotated[tuple[Positive, ...], Length(1, 64)]
    dtype: str = "float32"
    label: str = ""
    cold: bool = False

    def problems(self) -> Iterator[str]:
        """What is wrong with a record that was read from a file."""
        if self.dtype not in SHORT_DTYPES:
            yield f"has dtype {self.dtype!r}; there are: {', '.join(SHORT_DTYPES)}"
        if max(math.prod(self.lead), *self.mlp.sizes) > MOST_ELEMENTS:
            yield f"has sizes of more than {MOST_ELEMENTS:,}"

    @property
    def rows(self) -> int:
        return math.prod(self.lead)

    @property
    def rows_text(self) -> str:
        return "×".join(map(str, self.lead))

    @property
    def dtype_text(self) -> str:
        """As it is shown; cells with emptied caches are told apart here."""
        return SHORT_DTYPES[self.dtype] + " cold" * self.cold

    @property
    def moved_bytes(self) -> int:
        """What has to move at least: weights, input and output, each once."""
        ends = self.mlp.sizes[0] + self.mlp.sizes[-1]
        return self.mlp.weight_bytes(self.dtype) + self.rows * ends * itemsize(self.dtype)

    def __str__(self) -> str:
        text = f"{self.rows_text} × {self.mlp.name} {self.dtype_text}"
        return f"{self.label}: {text}" if self.label else text
