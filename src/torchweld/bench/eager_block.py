"""A block in eager, as users write it, on the weights that every process draws from the seed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchweld.bench.cases import SEED, MlpShape
from torchweld.core.activations import ACTIVATIONS, parse_activation
from torchweld.core.errors import TorchweldError

# What people call where the table of activations has a shorter way.
AS_WRITTEN: dict[str, Callable[..., Tensor]] = {"relu": F.relu}


class EagerBlock(nn.Module):
    """nn.Linear and the activation, nothing else."""

    def __init__(self, mlp: MlpShape, dtype: torch.dtype, seed: int = SEED) -> None:
        super().__init__()
        self.gated = mlp.gated
        self.activation = activation_of(mlp)
        self.linears = nn.ModuleList(linears_of(mlp, dtype, seed))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor
        if self.gated:
            gate, up, down = self.linears
            y = down(self.activation(gate(x)) * up(x))
            return y
        *hidden, last = self.linears
        for linear in hidden:
            x = self.activation(linear(x))
        y = last(x)
        return y


def activation_of(mlp: MlpShape) -> Callable[[Tensor], Tensor]:
    name, parameters = parse_activation(mlp.activation)
    function = AS_WRITTEN.get(name, ACTIVATIONS[name].apply)
    return (lambda z: function(z, *parameters)) if parameters else function


@functools.lru_cache(maxsize=1)
def _linears(mlp: MlpShape, dtype: torch.dtype, seed: int) -> tuple[nn.Linear, ...]:
    result = []
    for own in mlp.linears(seed):
        N, K = own.weight.shape
        linear = nn.Linear(K, N, bias=own.bias is not None, device="meta", dtype=dtype)
        linear.weight = nn.Parameter(torch.from_numpy(own.weight).to(dtype))
        if own.bias is not None:
            linear.bias = nn.Parameter(torch.from_numpy(own.bias).to(dtype))
        result.append(linear)
    return tuple(result)


def linears_of(mlp: MlpShape, dtype: torch.dtype, seed: int = SEED) -> list[nn.Linear]:
    """The same objects for everybody in this process who asks for the same block in turn."""
    if mlp.transposed:
        raise TorchweldError(
            f"{mlp.name} keeps its weights as [in, out], and is measured by bench --table alone"
        )
    return list(_linears(mlp, dtype, seed))


def tensors_of(mlp: MlpShape, dtype: torch.dtype, seed: int = SEED) -> list[Tensor]:
    """Weights and biases in the order in which the ops take them."""
    linears = _linears(replace(mlp, transposed=False), dtype, seed)
    return [
        tensor
        for linear in linears
        for tensor in (linear.weight.t() if mlp.transposed else linear.weight, linear.bias)
        if tensor is not None
    ]
