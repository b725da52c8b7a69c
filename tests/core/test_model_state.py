"""Whatever runs a model leaves it as it was."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchweld.core.model_state import attributes_put_back, forwards_replaced, in_mode, put_back


class Counting(nn.Module):
    """Has all that can be left changed: a buffer, a mode, dropout, attributes."""

    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.norm.eval()  # a mode of its own
        self.calls, self.seen = 0, [1, 2]
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(self.calls)
        self.steps += 1
        result: Tensor = nn.functional.dropout(self.norm(self.linear(x)), 0.5, self.training)
        return result


def state(model: nn.Module) -> dict[str, Any]:
    return {
        "modes": [module.training for module in model.modules()],
        "values": {name: tensor.clone() for name, tensor in model.state_dict().items()},
        "gradients": [parameter.grad for parameter in model.parameters()],
        "random": torch.get_rng_state(),
    }


def assert_same(before: dict[str, Any], after: dict[str, Any]) -> None:
    assert before["modes"] == after["modes"]
    for a, b in zip(before["gradients"], after["gradients"], strict=True):
        assert a is b
    for name, tensor in before["values"].items():
        assert torch.equal(tensor, after["values"][name]), name
    assert torch.equal(before["random"], after["random"])


def train(model: nn.Module) -> None:
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(module.training for module in model.modules())
    model(torch.randn(3, 4)).sum().backward()


def infer(model: Counting) -> None:
    assert not any(module.training for module in model.modules())
    model.steps -= 1  # a buffer is put back in training only
    model(torch.randn(3, 4))


def fail(model: nn.Module) -> None:
    model(torch.randn(3, 4))
    raise KeyboardInterrupt


@pytest.mark.parametrize(("training", "act"), [(True, train), (True, fail), (False, infer)])
def test_a_model_that_ran_is_as_it_was(training: bool, act: Callable[[nn.Module], None]) -> None:
    model = Counting()
    model.linear.weight.grad = torch.ones(4, 4)
    before = state(model)
    try:
        with put_back(model, training):
            act(model)
    except KeyboardInterrupt:
        assert act is fail
    assert_same(before, state(model))
    assert model.calls == 1


def test_an_optimizer_that_stepped_and_its_parameters_are_as_they_were() -> None:
    model, outside = Counting(), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([*model.parameters(), outside], lr=0.1)
    before, moments = state(model), copy.deepcopy(optimizer.state_dict())
    with put_back(model, True, optimizer):
        outside.grad = torch.ones(2)
        train(model)
        optimizer.step()
        assert not torch.equal(outside, torch.ones(2))
    assert_same(before, state(model))
    assert torch.equal(outside, torch.ones(2))
    assert optimizer.state_dict() == moments


def test_attributes_and_what_they_hold_are_as_they_were() -> None:
    model: Any = nn.Sequential(Counting())
    seen = model[0].seen
    hooks = model[0]._forward_hooks
    with attributes_put_back(model) as changed:
        assert changed() == []
        model[0].register_forward_hook(lambda *_: None)
        model(torch.randn(3, 4))
        model[0].new, model[0].linear.bias.new = 1, 2
        del model[0].calls
        assert sorted(changed()) == ["0._forward_hooks", "0.calls", "0.new", "0.seen"]
    assert model[0].seen is seen
    assert seen == [1, 2]
    assert model[0].calls == 0
    assert not hasattr(model[0], "new")
    assert hooks is model[0]._forward_hooks
    assert not hooks


def test_a_module_in_the_other_mode_is_switched_with_all_it_holds() -> None:
    model = Counting()
    modes = [module.training for module in model.modules()]
    with in_mode(model, True):  # it is: what it holds keeps its own
        assert [module.training for module in model.modules()] == modes
    with in_mode(model, False):
        assert not any(module.training for module in model.modules())
    assert [module.training for module in model.modules()] == modes


def test_a_forward_is_replaced_and_put_back_whatever_happens() -> None:
    plain, own = nn.Linear(2, 2), nn.ReLU()
    own.forward = lambda x: x + 1  # type: ignore[assignment, method-assign]
    before = own.__dict__["forward"]
    x = torch.ones(2)
    with forwards_replaced({plain: lambda x: x, own: lambda x: 2 * x}):
        assert plain(x) is x
        assert torch.equal(own(x), 2 * x)
    with pytest.raises(KeyError), forwards_replaced({plain: abs, own: abs}):
        raise KeyError
    assert "forward" not in plain.__dict__
    assert own.__dict__["forward"] is before
