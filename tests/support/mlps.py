"""MLPs that several tests go through, and what they mean, written with their children."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from tests.support.helpers import fixed, kernel_runs
from torch import Tensor, nn

import torchweld as tw
from torchweld.core.activations import ACTIVATIONS, parse_activation

MLP_SHAPES: list[dict[str, Any]] = [
    {"sizes": (31, 64)},
    {"sizes": (31, 64, 16)},
    {"sizes": (31, 64, 16), "bias": False, "activation": "relu2"},
    {"sizes": (31, 64, 16), "gated": True, "activation": "silu", "bias": False},
    {"sizes": (31, 64, 16), "gated": True, "activation": "gelu_tanh", "output_activation": "tanh"},
    {"sizes": (31, 9, 9, 9, 5), "activation": "leaky_relu:0.2", "output_activation": "sigmoid"},
]
MLP_IDS = [str(shape["sizes"]) + ("g" if shape.get("gated") else "") for shape in MLP_SHAPES]


def by_hand(mlp: tw.FusedMLP, x: Tensor) -> Tensor:
    """What the module means, written with its children."""
    children = list(mlp.layers) if "layers" in mlp._modules else list(mlp.children())
    gate = children.pop(0) if mlp.gated else None
    for i, child in enumerate(children):
        last = i + 1 == len(children)
        name, parameters = parse_activation(mlp.output_activation if last else mlp.activation)
        act = ACTIVATIONS[name].apply
        if i > 0:
            x = F.dropout(x, mlp.dropout, mlp.training)
        if i == 0 and gate is not None:
            x = act(gate(x), *parameters) * child(x)
        else:
            x = act(child(x), *parameters)
    return x


def same_as_by_hand(mlp: tw.FusedMLP, x: Tensor, *weights: str) -> None:
    with kernel_runs(*weights):
        y = mlp(x)
    if x.dtype.itemsize == 2:  # nothing inside is rounded to 16 bits
        expected = by_hand(copy.deepcopy(mlp).float(), x.float()).to(x.dtype)
    else:
        expected = by_hand(mlp, x)
    torch.testing.assert_close(y, expected)


# ---- with a packed copy in use ----

INPUT = fixed(5, 31)
KINDS: dict[str, Callable[[], tw.FusedMLP]] = {
    "one layer": lambda: tw.FusedMLP((31, 16)),
    "two": lambda: tw.FusedMLP((31, 64, 16)),
    "gated": lambda: tw.FusedMLP((31, 64, 16), activation="silu", gated=True, bias=False),
    "deep": lambda: tw.FusedMLP((31, 20, 20, 20, 16), activation="tanh"),
}


def packed_mlp(kind: str) -> tw.FusedMLP:
    """An MLP in eval mode that was called once in inference, so that it has packed copies."""
    torch.manual_seed(1)
    mlp = KINDS[kind]().eval()
    result(mlp)
    assert mlp.packed_bytes > 0
    return mlp


def packs(mlp: tw.FusedMLP) -> int:
    assert mlp._pack is not None
    times: int = mlp._pack.times
    return times


def uses_the_new_weights(mlp: tw.FusedMLP, before: Tensor, x: Tensor = INPUT) -> None:
    with torch.no_grad():
        expected = by_hand(mlp, x)
        assert (expected - before).abs().max() > 1e-3, "the change is too small to be seen"
        with kernel_runs("packed"):
            y = mlp(x)
        # The order of the sums is another on each instruction set.
        scale = float(expected.abs().max())
        torch.testing.assert_close(y, expected, rtol=0, atol=1e-5 * max(scale, 1.0))
        # and the copy made for it serves the next call
        made = packs(mlp)
        with kernel_runs("packed"):
            assert torch.equal(mlp(x), y)
        assert packs(mlp) == made


def result(mlp: tw.FusedMLP) -> Tensor:
    with torch.no_grad(), kernel_runs("packed"):
        y: Tensor = mlp(INPUT)
    return y


def in_place(mlp: tw.FusedMLP) -> None:
    with torch.no_grad():
        for parameter in mlp.parameters():
            parameter.add_(0.1)


class LowRank(nn.Module):
    """A Linear with a branch beside it, as adapters are added."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.a, self.b = nn.Linear(base.in_features, 2), nn.Linear(2, base.out_features)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x) + self.b(self.a(x))
        return y
