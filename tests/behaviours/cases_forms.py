"""Cases with different forms of a block: gates, residuals, recursive calls."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from tests.behaviours.harness import (
    Around,
    H,
    K,
    Mlp,
    Steps,
    X,
    before_and_after,
    either,
    inside,
    on_other_inputs,
    refused,
    welded,
)
from torch import Tensor, nn


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(K, H), nn.Linear(K, H), nn.Linear(H, K)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return y


@welded
def a_gate() -> Steps:
    model = yield Gated()
    yield model(X)
    model.gate, model.up = model.up, model.gate
    yield model(X)


@welded
def a_gate_whose_factors_are_swapped() -> Steps:
    class Model(Gated):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(self.up(x) * F.silu(self.gate(x)))
            return y

    yield from on_other_inputs(Model())


@welded
def a_gate_in_one_weight() -> Steps:
    class Model(nn.Module):
        first = True

        def __init__(self) -> None:
            super().__init__()
            self.both, self.down = nn.Linear(K, 2 * H), nn.Linear(H, K)

        def forward(self, x: Tensor) -> Tensor:
            a, b = self.both(x).chunk(2, dim=-1)
            y: Tensor = self.down(F.silu(a) * b if self.first else a * F.silu(b))
            return y

    yield from before_and_after(Model(), lambda m: setattr(m, "first", False))


@refused(r"cases_forms\.py:\d+")
def a_gate_that_is_changed_through_the_whole() -> Steps:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.both, self.down = nn.Linear(K, 2 * H), nn.Linear(H, K)

        def forward(self, x: Tensor) -> Tensor:
            both = self.both(x)
            a, b = both.chunk(2, dim=-1)
            both.clamp_(-50, 50)
            y: Tensor = self.down(F.silu(a) * b)
            return y

    model = yield Model()
    yield model(X)
    yield model(300 * X)


@welded(path="mlp")
def a_residual_around_an_mlp() -> Steps:
    model = yield Around(Mlp())
    yield model(X)
    model.norm.weight.data.mul_(2.0)
    yield inside(model(X))
    model.mlp.up.weight.data.mul_(2.0)
    yield inside(model(X))
    model.mlp = nn.Identity()
    yield model(X)


@either
def a_residual_inside() -> Steps:
    class Model(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = x + self.down(F.gelu(self.up(x)))
            return y

    yield from on_other_inputs(Model())


@welded
def a_residual_that_is_switched_on() -> Steps:
    class Model(Mlp):
        residual = False

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(F.gelu(self.up(x)))
            return x + y if self.residual else y

    yield from before_and_after(Model(), lambda m: setattr(m, "residual", True))


@welded
def a_call_of_itself_on_other_rows() -> Steps:
    class Model(Mlp):
        def forward(self, x: Tensor) -> Any:
            y: Tensor = self.down(F.gelu(self.up(x)))
            return y if x.shape[0] < 100 else torch.cat([self(x[:50]), self(x[50:]).tanh()])

    model = yield Model()
    yield model(X)
    yield model(X.repeat(15, 1))
