"""What several of the built-in models are made of, in plain PyTorch.

Shapes: B batch, T tokens, C channels (the model's width).
"""

# nn.Module calls return Any; forward says what it is.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from torchweld.core.errors import TorchweldError


def check_divides(part: int, whole: int, what: str) -> None:
    """A TorchweldError unless `whole` can be cut into pieces of `part`."""
    if part < 1 or whole % part:
        raise TorchweldError(f"{what}: {whole} is not a multiple of {part}; choose sizes that fit")


def to_patches(images: Tensor, size: int) -> Tensor:
    """Images [B, channels, height, width] -> one row per square patch, [B, patches, pixels]."""
    batch, channels, height, width = images.shape
    rows, columns = height // size, width // size
    patches = images.reshape(batch, channels, rows, size, columns, size)
    patches = patches.permute(0, 2, 4, 1, 3, 5)
    return patches.reshape(batch, rows * columns, channels * size * size)


class Attention(nn.Module):
    """Self-attention with one Linear for queries, keys and values: [B, T, C] -> [B, T, C]."""

    def __init__(self, width: int, heads: int, *, causal: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads = heads
        self.causal = causal
        self.dropout = dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        qkv = self.qkv(x).view(batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [B, heads, T, C / heads]
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=self.causal)
        return self.out(y.transpose(1, 2).reshape(batch, tokens, width))


class Mlp(nn.Module):
    """Linear, gelu, Linear; `approximate="tanh"` is the gelu of GPT-2."""

    def __init__(self, width: int, hidden: int, *, approximate: str = "none") -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.act = nn.GELU(approximate=approximate)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


class TransformerLayer(nn.Module):
    """A transformer layer that normalises first: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, attention: nn.Module, mlp: nn.Module, width: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = attention
        self.norm2 = nn.LayerNorm(width)
        self.mlp = mlp
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))
