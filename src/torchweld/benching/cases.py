"""What is measured: an MLP, a number of rows, a dtype; and the MLP in eager, as people write it."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from torchweld.activations import ACTIVATIONS, parse_activation
from torchweld.blocks import LayerForm
from torchweld.errors import TorchweldError

DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
}


@dataclass(frozen=True, kw_only=True)
class Mlp:
    """An MLP without its weights; gated, it computes `down(activation(gate(x)) · up(x))`."""

    sizes: tuple[int, ...]
    activation: str = "gelu"
    gated: bool = False
    bias: bool = True

    def __post_init__(self) -> None:
        parse_activation(self.activation)
        if len(self.sizes) < 2 or min(self.sizes) < 1 or (self.gated and len(self.sizes) != 3):
            wanted = "exactly three" if self.gated else "two or more"
            raise TorchweldError(
                f"sizes are {','.join(map(str, self.sizes))}; expected {wanted} whole numbers of "
                "at least 1, such as 768,3072,768"
            )

    @property
    def shape_text(self) -> str:
        return "→".join(map(str, self.sizes))

    @property
    def kind_text(self) -> str:
        return self.activation + (" gated" if self.gated else "")

    @property
    def forms(self) -> tuple[LayerForm, ...]:
        name, parameters = parse_activation(self.activation)
        inner = LayerForm(
            activation=name,
            parameters=parameters,
            bias=self.bias,
            gate="separate" if self.gated else "none",
        )
        return (*[inner] * (len(self.sizes) - 2), LayerForm(bias=self.bias))


# From the sizes of reinforcement learning and tabular nets to those of language models.
BLOCKS = {
    "tiny": Mlp(sizes=(64, 256, 64)),
    "deep": Mlp(sizes=(128, 128, 128, 10), activation="relu"),
    "small": Mlp(sizes=(256, 1024, 256)),
    "base": Mlp(sizes=(768, 3072, 768)),
    "gated": Mlp(sizes=(1024, 2816, 1024), activation="silu", gated=True, bias=False),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """What one cell measures."""

    mlp: Mlp
    rows: int
    dtype: str

    def __str__(self) -> str:
        return f"{self.rows} × {self.mlp.shape_text} {self.mlp.kind_text} {self.dtype}"


def demo_cases() -> list[Case]:
    """What is shown when nothing is asked for: small to large, few rows, fp32 and some bf16."""
    wanted: dict[str, dict[str, tuple[int, ...]]] = {
        "tiny": {"fp32": (1, 8, 64)},
        "small": {"fp32": (1, 8, 64)},
        "base": {"fp32": (1, 8, 64), "bf16": (1, 8)},
        "gated": {"fp32": (1, 8, 64), "bf16": (1, 8)},
    }
    return [
        Case(mlp=BLOCKS[name], rows=rows, dtype=dtype)
        for name, dtypes in wanted.items()
        for dtype, all_rows in dtypes.items()
        for rows in all_rows
    ]


def parse_sizes(text: str) -> tuple[int, ...]:
    """`"768,3072,768"` (or with x, → or spaces between) as numbers."""
    parts = [part for part in re.split(r"[,x→\s]+", text.strip()) if part]
    if not parts or not all(part.isdecimal() for part in parts):
        raise TorchweldError(
            f"sizes are {text!r}; expected whole numbers with commas, such as 768,3072,768"
        )
    return tuple(int(part) for part in parts)


class _Activation(nn.Module):
    def __init__(self, text: str) -> None:
        super().__init__()
        name, self.parameters_ = parse_activation(text)
        self.apply_to = ACTIVATIONS[name].apply

    def forward(self, z: Tensor) -> Tensor:
        return self.apply_to(z, *self.parameters_)


class _Gated(nn.Module):
    def __init__(self, gate: nn.Linear, up: nn.Linear, down: nn.Linear, act: nn.Module) -> None:
        super().__init__()
        self.gate, self.up, self.down, self.act = gate, up, down, act

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.act(self.gate(x)) * self.up(x))
        return y


def eager_model(mlp: Mlp, dtype: torch.dtype, seed: int) -> tuple[nn.Module, list[nn.Linear]]:
    """The MLP as people write it, initialised by nn.Linear, and its Linears in order."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        pairs = list(zip(mlp.sizes, mlp.sizes[1:], strict=False))
        if mlp.gated:
            pairs.insert(0, pairs[0])
        linears = [nn.Linear(K, N, bias=mlp.bias, dtype=dtype) for K, N in pairs]
    act = _Activation(mlp.activation)
    if mlp.gated:
        gate, up, down = linears
        return _Gated(gate, up, down, act).eval(), linears
    parts = [part for linear in linears for part in (linear, act)][:-1]
    return nn.Sequential(*parts).eval(), linears
