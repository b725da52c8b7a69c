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

from torchweld.bench.training_step import AUTOCAST, TrainingStep
from torchweld.core.activations import parse_activation
from torchweld.core.blocks import LayerForm
from torchweld.core.errors import TorchweldError
from torchweld.core.record_fields import Bounds, Length, Positive

Array = NDArray[np.floating[Any]]
SEED = 2024
# The most rows or features in a file.
MOST_ELEMENTS = 1 << 40
MOST_BLOCKS = 1000

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
        """Bytes of the matrices; `dtype` is torch's name."""
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

    lead:     the dimensions of x before its features: rows, or batch and sequence
    dtype:    torch's name
    label:    what the row is called, where it has a name of its own
    cold:     the caches are emptied before every call, even if the bench does not ask for it
    blocks:   so many such MLPs, each with its own weights, one after the other
    training: the step of training that is measured; None: a call without gradients
    """

    mlp: MlpShape
    lead: Annotated[tuple[Positive, ...], Length(1, 64)]
    dtype: str = "float32"
    label: str = ""
    cold: bool = False
    blocks: Annotated[int, Bounds(1, MOST_BLOCKS)] = 1
    training: TrainingStep | None = None

    def __post_init__(self) -> None:
        sizes = self.mlp.sizes
        if self.blocks < 1 or self.blocks > MOST_BLOCKS:
            raise TorchweldError(f"blocks are {self.blocks}; expected 1 to {MOST_BLOCKS}")
        if self.blocks > 1 and sizes[0] != sizes[-1]:
            raise TorchweldError(
                f"{self.blocks} blocks of {self.mlp.shape_text} cannot follow each other: the "
                "output has to be as wide as the input, as in 768x3072x768"
            )

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
        """The dtype as it is shown, with marks for emptied caches and kinds of training steps."""
        return " ".join(
            part for part in (self._plain_dtype, "cold" * self.cold, self._marks) if part
        )

    @property
    def _plain_dtype(self) -> str:
        return step_dtype_text(self.dtype, self.training)

    @property
    def _marks(self) -> str:
        return self.training.marks if self.training is not None else ""

    @property
    def kind_text(self) -> str:
        return f"{self.mlp.kind_text} × {self.blocks}" if self.blocks > 1 else self.mlp.kind_text

    @property
    def computed_dtype(self) -> str:
        """The dtype it is computed in: autocast's, or its own."""
        cast = self.training.autocast if self.training is not None else ""
        return cast or self.dtype

    @property
    def place(self) -> str:
        """The place in a grid, in words."""
        return f"{self.rows_text} × {self.mlp.shape_text} {self.kind_text}"

    @property
    def flops(self) -> int:
        """FLOPs of the products. In training the backward has two for each of the forward."""
        passes = 1 if self.training is None else 3
        return passes * self.blocks * self.mlp.flops(self.rows)

    @property
    def weight_bytes(self) -> int:
        return self.blocks * self.mlp.weight_bytes(self.dtype)

    @property
    def moved_bytes(self) -> int:
        """What has to move at least: weights, input and output, each once.

        In training weights are read twice and their gradients written once; the same holds for the
        ends.
        """
        ends = self.mlp.sizes[0] + self.mlp.sizes[-1]
        once = self.weight_bytes + self.rows * ends * itemsize(self.dtype)
        return once if self.training is None else 3 * once

    def __str__(self) -> str:
        text = f"{self.place} {self.dtype_text}{' training' * (self.training is not None)}"
        return f"{self.label}: {text}" if self.label else text


def step_dtype_text(dtype: str, step: TrainingStep | None) -> str:
    """`fp32`, or under autocast `amp bf16`."""
    if step is not None and step.autocast:
        return f"amp {AUTOCAST[step.autocast]}"
    return SHORT_DTYPES.get(dtype, dtype)


@dataclass(frozen=True, kw_only=True)
class ModelCase:
    """What a cell of a whole model in training measures.

    target: as it was typed
    inputs: what the model is called with, in words
    """

    target: str
    inputs: str
    step: TrainingStep

    @property
    def place(self) -> str:
        return str(self)

    def __str__(self) -> str:
        what = f"with {self.step.optimizer}" if self.step.optimizer else "forward and backward"
        others = [f"autocast {AUTOCAST[self.step.autocast]}"] if self.step.autocast else []
        others += ["accumulating"] if self.step.accumulate else []
        others += ["malloc tuned"] if self.step.malloc == "tuned" else []
        return ", ".join([f"{self.target} {self.inputs}, {what}", *others])
