"""A block as its users write it in eager, on the weights that every process draws from the seed.

`BlockSource` makes it for whichever runtime asks. K in, N out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchweld.bench.bench_cases import SEED, MlpShape
from torchweld.core.activations import ACTIVATIONS, parse_activation
from torchweld.core.blocks import LayerForm
from torchweld.core.errors import TorchweldError
from torchweld.core.model_inputs import Inputs, Workload
from torchweld.models.targets import Target

# Functions that people call, for activations whose row in the table has a faster one.
AS_WRITTEN: dict[str, Callable[..., Tensor]] = {"relu": F.relu}


class Conv1D(nn.Module):
    """A Linear whose weight is [in, out], as transformers has it."""

    def __init__(self, weight_KN: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.nf = weight_KN.shape[1]
        self.weight, self.bias = nn.Parameter(weight_KN), nn.Parameter(bias)

    def forward(self, x: Tensor) -> Tensor:
        size_out = (*x.size()[:-1], self.nf)
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(size_out)


class FunctionModule(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class TwoLayers(nn.Module):
    def __init__(self, up: nn.Module, down: nn.Module, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.act = up, down, act

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.act(self.up(x)))
        return y


class GatedLayers(TwoLayers):
    def __init__(self, gate: nn.Module, *others: Any) -> None:
        super().__init__(*others)
        self.gate = gate

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.act(self.gate(x)) * self.up(x))
        return y


def eager_block(
    mlp: MlpShape, dtype: torch.dtype, seed: int = SEED, blocks: int = 1, device: str = "cpu"
) -> nn.Module:
    """The block as plain PyTorch modules; several of them follow each other."""
    stacked = _stacked_layers(mlp, dtype, seed, blocks, device)
    made = [_eager_block(mlp, layers) for layers in stacked]
    return made[0] if blocks == 1 else nn.Sequential(*made)


def _eager_block(mlp: MlpShape, layers: Sequence[nn.Linear | Conv1D]) -> nn.Module:
    act = activation_of(mlp)
    if mlp.gated:
        gate, up, down = layers
        return GatedLayers(gate, up, down, act)
    if len(layers) == 1:
        return layers[0]
    if len(layers) == 2:
        return TwoLayers(layers[0], layers[1], act)
    *hidden, last = layers
    return nn.Sequential(*chain.from_iterable((one, FunctionModule(act)) for one in hidden), last)


def activation_of(mlp: MlpShape) -> Callable[[Tensor], Tensor]:
    name, parameters = parse_activation(mlp.activation)
    function = AS_WRITTEN.get(name, ACTIVATIONS[name].apply)
    return (lambda z: function(z, *parameters)) if parameters else function


# All sides in this process get the same objects if they ask for the same blocks in turn.
@functools.lru_cache(maxsize=1)
def _stacked_layers(
    mlp: MlpShape, dtype: torch.dtype, seed: int, blocks: int, device: str
) -> tuple[tuple[nn.Linear | Conv1D, ...], ...]:
    """The layers of each block. Seeds of blocks are even numbers apart; inputs have odd ones."""
    stacked = (_layers(mlp, dtype, seed + 2 * i) for i in range(blocks))
    return tuple(tuple(layer.to(device) for layer in layers) for layers in stacked)


def _layers(mlp: MlpShape, dtype: torch.dtype, seed: int) -> tuple[nn.Linear | Conv1D, ...]:
    found: list[nn.Linear | Conv1D] = []
    for own in mlp.linears(seed):
        N, K = own.weight.shape
        weight = torch.from_numpy(own.weight).to(dtype)
        bias = None if own.bias is None else torch.from_numpy(own.bias).to(dtype)
        if mlp.transposed:
            assert bias is not None, mlp
            found.append(Conv1D(weight.t().contiguous(), bias))
            continue
        linear = nn.Linear(K, N, bias=bias is not None, device="meta", dtype=dtype)
        linear.weight = nn.Parameter(weight)
        if bias is not None:
            linear.bias = nn.Parameter(bias)
        found.append(linear)
    return tuple(found)


def linears_of(
    mlp: MlpShape, dtype: torch.dtype, seed: int = SEED, blocks: int = 1, device: str = "cpu"
) -> list[list[nn.Linear]]:
    """The Linears of each block of `eager_block`, which is made of the same objects."""
    found = [
        [layer for layer in layers if isinstance(layer, nn.Linear)]
        for layers in _stacked_layers(mlp, dtype, seed, blocks, device)
    ]
    if not all(found):
        raise TorchweldError(
            f"{mlp.name} keeps its weights as [in, out], and is measured by bench --table alone"
        )
    return found


def tensors_of(
    mlp: MlpShape, dtype: torch.dtype, seed: int = SEED, blocks: int = 1, device: str = "cpu"
) -> list[Tensor]:
    """Weights and biases in the order in which the ops take them, block after block."""
    layers = chain.from_iterable(_stacked_layers(mlp, dtype, seed, blocks, device))
    both = chain.from_iterable((one.weight, one.bias) for one in layers)
    return [tensor for tensor in both if tensor is not None]


@dataclass(frozen=True, kw_only=True)
class BlockSource:
    """Blocks by their shape; `make` gives the same weights in any process, on any device."""

    mlp: MlpShape
    dtype: str = "float32"
    seed: int = SEED
    blocks: int = 1
    training: bool = False
    device: str = "cpu"

    @property
    def torch_dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.dtype)
        return found

    @property
    def linears(self) -> list[list[nn.Linear]]:
        return linears_of(self.mlp, self.torch_dtype, self.seed, self.blocks, self.device)

    @property
    def tensors(self) -> list[Tensor]:
        return tensors_of(self.mlp, self.torch_dtype, self.seed, self.blocks, self.device)

    @property
    def forms(self) -> tuple[LayerForm, ...]:
        """The layers of all blocks, as one chain."""
        return self.mlp.forms * self.blocks

    def make(self) -> Target:
        model = eager_block(self.mlp, self.torch_dtype, self.seed, self.blocks, self.device)
        return Target(name=self.mlp.name, model=model.train(self.training), workloads=())

    def workload(self, made: Target, *lead: int) -> Workload:
        """x of the shape [*lead, K]; without rows, there is nothing to compute."""
        x = self.inputs(*lead).requires_grad_(self.training)
        inputs = Inputs(x)
        return Workload(name="×".join(map(str, lead)), run=inputs.call, inputs=inputs)

    def inputs(self, *lead: int) -> Tensor:
        values = torch.from_numpy(self.mlp.inputs(prod(lead), self.seed + 1))
        return values.to(self.torch_dtype).view(*lead, self.mlp.sizes[0]).to(self.device)

    def gradient(self, *lead: int) -> Tensor:
        """A gradient of the output, drawn as inputs are."""
        drawn = np.random.default_rng(self.seed + 3).standard_normal(
            (*lead, self.mlp.sizes[-1]), dtype=np.float32
        )
        return torch.from_numpy(drawn).to(self.torch_dtype).to(self.device)
