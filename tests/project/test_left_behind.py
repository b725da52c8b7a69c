"""Finding and planning hold on to nothing of the model: no collection of garbage is needed."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import torchweld as tw


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(self.up(self.norm(x)).relu())
        return y


@pytest.fixture
def _no_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_no_garbage_collection")
@pytest.mark.parametrize(
    "act",
    [
        lambda m, x: tw.find(m, x),
        lambda m, x: tw.find(m, x, training=True),
        lambda m, x: tw.plan(m, x, force=True),
        lambda m, x: tw.apply(m, tw.plan(m, x, force=True)),
    ],
    ids=["find", "find in training", "plan", "apply"],
)
def test_parameters_can_be_swapped_right_afterwards(
    act: Callable[[nn.Module, Tensor], object],
) -> None:
    model, x = Residual().eval(), torch.randn(4, 8)
    kept = act(model, x)
    for tensor in [*model.parameters(), *model.buffers(), x]:
        other = tensor.detach().clone()
        if isinstance(tensor, nn.Parameter):
            other = nn.Parameter(other + 1)
        values = other.detach().clone()
        torch.utils.swap_tensors(tensor, other)
        assert torch.equal(tensor, values)
    assert kept is not None
    other_model = Residual().eval()
    other_model.load_state_dict(model.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(model(x), other_model(x))


@pytest.mark.usefixtures("_no_garbage_collection")
def test_a_module_moves_by_swapping_right_afterwards() -> None:
    model, x = Residual().eval(), torch.randn(4, 8)
    tw.find(model, x)
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
    assert model.up.weight.dtype == torch.float64
