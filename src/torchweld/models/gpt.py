"""A small GPT-2: learned positions, layers that normalise first, the head tied to the embedding.

`Gpt(config)(input_ids [B, T]) -> logits [B, T, vocab]`.
"""

# nn.Module calls return Any; forward says what it is.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from torchweld.core.model_inputs import Inputs
from torchweld.models.model_layers import Attention, Mlp, TransformerLayer, check_divides


@dataclass(frozen=True, kw_only=True)
class GptConfig:
    vocab: int = 8192
    context: int = 256
    width: int = 384
    layers: int = 6
    heads: int = 6
    dropout: float = 0.0
    batch: int = 1  # of the example inputs, as are the tokens
    tokens: int = 64

    def __post_init__(self) -> None:
        check_divides(self.heads, self.width, "heads of equal width")


class Gpt(nn.Module):
    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        width = config.width
        self.tokens = nn.Embedding(config.vocab, width)
        self.positions = nn.Embedding(config.context, width)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(
            TransformerLayer(
                Attention(width, config.heads, causal=True, dropout=config.dropout),
                Mlp(width, 4 * width, approximate="tanh"),
                width,
                config.dropout,
            )
            for _ in range(config.layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, config.vocab, bias=False)
        self.head.weight = self.tokens.weight
        self.apply(_init)
        # Every layer adds to x twice; smaller last products keep the sum's variance at one.
        for name, parameter in self.named_parameters():
            if name.endswith(("out.weight", "down.weight")):
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * config.layers))

    def forward(self, input_ids: Tensor) -> Tensor:
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.dropout(self.tokens(input_ids) + self.positions(places))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def _init(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def example_inputs(config: GptConfig, generator: torch.Generator) -> Inputs:
    shape = (config.batch, config.tokens)
    return Inputs(torch.randint(config.vocab, shape, generator=generator))
