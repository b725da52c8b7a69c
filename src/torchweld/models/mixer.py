"""An MLP-Mixer: every layer mixes the patches of each channel, then the channels of each patch.

The first MLP of a layer runs on a transposed view, so its input is not contiguous.

`Mixer(config)(images [B, 3, size, size]) -> logits [B, classes]`.
"""

# nn.Module calls return Any; forward says what it is.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from torchweld.core.model_inputs import Inputs
from torchweld.models.model_layers import Mlp, check_divides, to_patches


@dataclass(frozen=True, kw_only=True)
class MixerConfig:
    size: int = 224
    patch: int = 16
    channels: int = 3
    width: int = 256
    token_hidden: int = 128
    channel_hidden: int = 1024
    layers: int = 6
    classes: int = 1000
    batch: int = 1

    def __post_init__(self) -> None:
        check_divides(self.patch, self.size, "patches in an image")


class MixerLayer(nn.Module):
    def __init__(self, config: MixerConfig, patches: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width)
        self.token_mlp = Mlp(patches, config.token_hidden)
        self.norm2 = nn.LayerNorm(config.width)
        self.channel_mlp = Mlp(config.width, config.channel_hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.token_mlp(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channel_mlp(self.norm2(x))


class Mixer(nn.Module):
    def __init__(self, config: MixerConfig) -> None:
        super().__init__()
        self.patch = config.patch
        patches = (config.size // config.patch) ** 2
        self.embedding = nn.Linear(config.channels * config.patch**2, config.width)
        self.layers = nn.ModuleList(MixerLayer(config, patches) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.embedding(to_patches(images, self.patch))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x).mean(dim=1))


def example_inputs(config: MixerConfig, generator: torch.Generator) -> Inputs:
    shape = (config.batch, config.channels, config.size, config.size)
    return Inputs(torch.randn(shape, generator=generator))
