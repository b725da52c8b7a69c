"""Models that can be called again, and those that cannot."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from torchweld.core.errors import TorchweldError
from torchweld.core.model_inputs import as_workloads
from torchweld.numerics.repeat_check import check_repeatable


class Model(nn.Module):
    def __init__(self, run: Callable[[Model, Tensor], Tensor]) -> None:
        super().__init__()
        self.run = run
        self.linear = nn.Linear(4, 4)
        self.drop = nn.Dropout(0.5)
        self.norm = nn.BatchNorm1d(4)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.run(self, x)


def check(run: Callable[[Model, Tensor], Tensor], training: bool = False) -> Model:
    model = Model(run)
    check_repeatable(model, as_workloads(torch.randn(3, 4)), training)
    return model


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    "run",
    [
        lambda m, x: m.linear(x),
        lambda m, x: m.drop(m.linear(x)),  # the same seed, the same elements
        lambda m, x: m.norm(m.linear(x)),  # running statistics do not enter the result
        lambda m, x: m.linear(x) * float("nan"),
    ],
)
def test_what_does_the_same_again_passes(
    run: Callable[[Model, Tensor], Tensor], training: bool
) -> None:
    model = check(run, training)
    assert int(model.norm.num_batches_tracked or 0) == 0
    assert all(p.grad is None for p in model.parameters())


def test_a_changed_input_is_named() -> None:
    with pytest.raises(TorchweldError, match=r"Model changes its input '3x4 float32'.*x\.clone"):
        check(lambda m, x: m.linear(x.add_(1)))


@pytest.mark.parametrize(
    "run",
    [
        lambda m, x: m.linear(x) * m.calls,
        lambda m, x: m.linear(x).repeat(m.calls, 1),
        lambda m, x: m.linear(x) * (float("nan") if m.calls == 2 else 1.0),
    ],
)
def test_another_output_is_named(run: Callable[[Model, Tensor], Tensor]) -> None:
    with pytest.raises(TorchweldError, match="gives another output 0 when it is called again"):
        check(run)


def test_what_raises_is_said() -> None:
    with pytest.raises(TorchweldError, match="does not run on '3x4 float32'"):
        check(lambda m, x: m.linear(x[:, :2]))
