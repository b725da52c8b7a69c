"""A DLRM-like recommender: dense features through an MLP, categories through tables, every pair of
the resulting vectors multiplied, and an MLP over the products.

`Dlrm(config)(dense [B, features], categories [B, tables, bag]) -> logits [B]`.
"""

# nn.Module calls return Any; forward says what it is.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from torchweld.core.model_inputs import Inputs


@dataclass(frozen=True, kw_only=True)
class DlrmConfig:
    features: int = 13
    bottom: tuple[int, ...] = (512, 256)  # hidden sizes; the last one is the width
    top: tuple[int, ...] = (512, 256)
    tables: int = 26
    rows: int = 1000  # of each table
    bag: int = 2  # categories that are summed, of each table
    width: int = 64
    batch: int = 128


def relu_stack(sizes: Sequence[int], *, last: bool) -> nn.Sequential:
    """Linears with a relu between them, and after the last one too if asked for."""
    layers: list[nn.Module] = []
    for inner, outer in pairwise(sizes):
        layers += [nn.Linear(inner, outer), nn.ReLU()]
    return nn.Sequential(*layers if last else layers[:-1])


class Dlrm(nn.Module):
    pairs: Tensor

    def __init__(self, config: DlrmConfig) -> None:
        super().__init__()
        self.bottom = relu_stack((config.features, *config.bottom, config.width), last=True)
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(config.rows, config.width, mode="sum") for _ in range(config.tables)
        )
        vectors = 1 + config.tables
        self.register_buffer("pairs", torch.tril_indices(vectors, vectors, -1), persistent=False)
        products = vectors * (vectors - 1) // 2
        self.top = relu_stack((config.width + products, *config.top, 1), last=False)

    def forward(self, dense: Tensor, categories: Tensor) -> Tensor:
        x = self.bottom(dense)
        vectors = [x, *(table(categories[:, i]) for i, table in enumerate(self.tables))]
        stacked = torch.stack(vectors, dim=1)
        products = torch.bmm(stacked, stacked.transpose(1, 2))
        chosen = products[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat((x, chosen), dim=1)).squeeze(-1)


def example_inputs(config: DlrmConfig, generator: torch.Generator) -> Inputs:
    dense = torch.randn(config.batch, config.features, generator=generator)
    shape = (config.batch, config.tables, config.bag)
    return Inputs(dense, torch.randint(config.rows, shape, generator=generator))
