"""A Llama-like decoder: RMS norms, rotary positions, grouped keys and values, a gated MLP.

`Llama(config)(input_ids [B, T]) -> logits [B, T, vocab]`.
"""

# nn.Module calls return Any; forward says what it is.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchweld.core.model_inputs import Inputs
from torchweld.models.model_layers import check_divides


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    vocab: int = 8192
    context: int = 512
    width: int = 512
    hidden: int = 1408
    layers: int = 6
    heads: int = 8
    kv_heads: int = 4  # as many as heads: every query head has keys and values of its own
    rope_base: float = 10_000.0
    eps: float = 1e-5
    batch: int = 1
    tokens: int = 32

    def __post_init__(self) -> None:
        check_divides(2 * self.heads, self.width, "heads of equal and even width")
        check_divides(self.kv_heads, self.heads, "query heads to a key head")


class RmsNorm(nn.Module):
    """x over the root of its mean square, times a weight; in float32, as everybody computes it."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * (wide * scale).to(x.dtype)


def rotary_tables(context: int, width: int, base: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines, [context, width]: position p turns pair i by p · base^(-2i / width)."""
    speeds = base ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angles = torch.outer(torch.arange(context, dtype=torch.float64), speeds)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().float(), angles.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns the pairs (i, i + half) of the last dimension of x, [B, heads, T, width]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class LlamaAttention(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_width = config.width // config.heads
        self.groups = config.heads // config.kv_heads
        kv_width = config.kv_heads * self.head_width
        self.q_proj = nn.Linear(config.width, config.width, bias=False)
        self.k_proj = nn.Linear(config.width, kv_width, bias=False)
        self.v_proj = nn.Linear(config.width, kv_width, bias=False)
        self.o_proj = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        heads = (batch, tokens, -1, self.head_width)
        q = rotate(self.q_proj(x).view(heads).transpose(1, 2), cos, sin)
        k = rotate(self.k_proj(x).view(heads).transpose(1, 2), cos, sin)
        v = self.v_proj(x).view(heads).transpose(1, 2)
        k = k.repeat_interleave(self.groups, dim=1)
        v = v.repeat_interleave(self.groups, dim=1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).reshape(batch, tokens, width))


class LlamaMlp(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.width, config.hidden, bias=False)
        self.up_proj = nn.Linear(config.width, config.hidden, bias=False)
        self.down_proj = nn.Linear(config.hidden, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class LlamaLayer(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.norm1 = RmsNorm(config.width, config.eps)
        self.attention = LlamaAttention(config)
        self.norm2 = RmsNorm(config.width, config.eps)
        self.mlp = LlamaMlp(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), cos, sin)
        return x + self.mlp(self.norm2(x))


class Llama(nn.Module):
    cos: Tensor
    sin: Tensor

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab, config.width)
        self.layers = nn.ModuleList(LlamaLayer(config) for _ in range(config.layers))
        self.norm = RmsNorm(config.width, config.eps)
        self.head = nn.Linear(config.width, config.vocab, bias=False)
        cos, sin = rotary_tables(config.context, config.width // config.heads, config.rope_base)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.tokens(input_ids)
        tokens = input_ids.shape[1]
        cos, sin = self.cos[:tokens], self.sin[:tokens]
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.head(self.norm(x))


def example_inputs(config: LlamaConfig, generator: torch.Generator) -> Inputs:
    shape = (config.batch, config.tokens)
    return Inputs(torch.randint(config.vocab, shape, generator=generator))
