"""A small vision transformer: patches through a Linear, a class token, layers as in `gpt`.

`Vit(config)(images [B, 3, size, size]) -> logits [B, classes]`.
"""

# nn.Module calls return Any; forward says what it is.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from torchweld.core.model_inputs import Inputs
from torchweld.models.model_layers import (
    Attention,
    Mlp,
    TransformerLayer,
    check_divides,
    to_patches,
)


@dataclass(frozen=True, kw_only=True)
class VitConfig:
    size: int = 224
    patch: int = 16
    channels: int = 3
    width: int = 192
    layers: int = 6
    heads: int = 3
    classes: int = 1000
    dropout: float = 0.0
    batch: int = 1

    def __post_init__(self) -> None:
        check_divides(self.heads, self.width, "heads of equal width")
        check_divides(self.patch, self.size, "patches in an image")


class Vit(nn.Module):
    def __init__(self, config: VitConfig) -> None:
        super().__init__()
        width = config.width
        self.patch = config.patch
        patches = (config.size // config.patch) ** 2
        self.embedding = nn.Linear(config.channels * config.patch**2, width)
        self.class_token = nn.Parameter(torch.randn(1, 1, width) * 0.02)
        self.positions = nn.Parameter(torch.randn(1, 1 + patches, width) * 0.02)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(
            TransformerLayer(
                Attention(width, config.heads, causal=False, dropout=config.dropout),
                Mlp(width, 4 * width),
                width,
                config.dropout,
            )
            for _ in range(config.layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, config.classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.embedding(to_patches(images, self.patch))
        x = torch.cat((self.class_token.expand(x.shape[0], -1, -1), x), dim=1)
        x = self.dropout(x + self.positions)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)[:, 0])


def example_inputs(config: VitConfig, generator: torch.Generator) -> Inputs:
    shape = (config.batch, config.channels, config.size, config.size)
    return Inputs(torch.randn(shape, generator=generator))
