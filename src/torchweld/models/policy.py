"""A policy as reinforcement learning uses them: one observation in, one action out, at once.

`Policy(config)(observation [B, observation]) -> the action's mean [B, actions]`.
"""

# nn.Module calls return Any; forward says what it is.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from torchweld.core.model_inputs import Inputs


@dataclass(frozen=True, kw_only=True)
class PolicyConfig:
    observation: int = 64
    hidden: tuple[int, ...] = (64, 64)
    actions: int = 8
    batch: int = 1


class Policy(nn.Module):
    def __init__(self, config: PolicyConfig) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inner, outer in pairwise((config.observation, *config.hidden)):
            layers += [nn.Linear(inner, outer), nn.Tanh()]
        self.body = nn.Sequential(*layers)
        self.action = nn.Linear((config.observation, *config.hidden)[-1], config.actions)

    def forward(self, observation: Tensor) -> Tensor:
        return self.action(self.body(observation))


def example_inputs(config: PolicyConfig, generator: torch.Generator) -> Inputs:
    return Inputs(torch.randn(config.batch, config.observation, generator=generator))
