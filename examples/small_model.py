"""The models of the walk-through: a gated MLP, and a small transformer that has it in each block.

torchweld profile examples/small_model.py:mlp
torchweld profile examples/small_model.py:transformer --training
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROWS, WIDTH, HIDDEN = 16, 256, 1024
HEADS, BLOCKS, WORDS = 4, 2, 512


class GeGLU(nn.Module):
    """Three Linears: `down(gelu(gate(x)) * up(x))`."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, HIDDEN)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.gelu(self.gate(x)) * self.up(x))
        return y


class Attention(nn.Module):
    """Every word looks at those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        z: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return z


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.norm2, self.mlp = nn.LayerNorm(WIDTH), GeGLU()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        y: Tensor = x + self.mlp(self.norm2(x))
        return y


class Transformer(nn.Module):
    """Words [batch, n] in; for each, scores [batch, n, WORDS] of the word after it."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        y: Tensor = self.head(self.norm(self.blocks(self.words(words))))
        return y


def mlp(device: str = "cpu") -> tuple[GeGLU, Tensor]:
    """A small MLP in eval mode, and what to call it with."""
    return GeGLU().to(device).eval(), torch.randn(ROWS, WIDTH, device=device)


def transformer(device: str = "cpu") -> tuple[Transformer, Tensor]:
    return Transformer().to(device).eval(), torch.randint(WORDS, (1, ROWS), device=device)
