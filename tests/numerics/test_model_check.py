"""`tw.verify`: one model against another, judged by the model in float64."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import torchweld as tw
from torchweld.models import MODELS
from torchweld.numerics import model_truth
from torchweld.numerics.model_check import EAGER, EXACT


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(31, 77), nn.GELU(), nn.LayerNorm(77), nn.Linear(77, 9)).eval()


def test_a_copy_is_the_same_and_exactly_as_far_from_the_truth() -> None:
    model = mlp()
    check = tw.verify(model, copy.deepcopy(model), torch.randn(5, 31))
    assert check
    assert check.against == EXACT
    assert check.error_ratio == 1.0
    assert "the same numbers" in str(check)


@pytest.mark.parametrize("training", [False, True])
def test_a_small_difference_is_found(training: bool) -> None:
    model = mlp()
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.get_parameter("3.weight")[2, 5] += 1e-4
    check = tw.verify(model, other, torch.randn(5, 31), training=training)
    assert not check
    assert "output 0" in check.reason


def test_a_wrong_gradient_is_found_where_the_output_is_right() -> None:
    class Detached(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.inner(x)
            return y.detach() + 0.5 * (y - y.detach())

    class Plain(Detached):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.inner(x)
            return y

    inner = mlp()
    x = torch.randn(5, 31)
    assert tw.verify(Plain(inner), Detached(copy.deepcopy(inner)), x)
    check = tw.verify(Plain(inner), Detached(copy.deepcopy(inner)), x, training=True)
    assert {one.name for one in check.compared if not one.ok} == {
        f"grad inner.{name}" for name, _ in inner.named_parameters()
    }


def test_a_welded_model_is_verified_against_a_copy() -> None:
    model, inputs = MODELS["gpt"].build()
    welded = tw.apply(copy.deepcopy(model), tw.plan(model, inputs, force=True))
    check = tw.verify(model, welded, inputs)
    assert check, check.reason
    assert 0 < check.error_ratio < 2


def test_the_same_object_is_refused() -> None:
    model = mlp()
    with pytest.raises(tw.TorchweldError, match="same object"):
        tw.verify(model, model, torch.randn(5, 31))


def test_both_models_are_left_as_they_were() -> None:
    model = mlp().train()
    weight = model.get_parameter("0.weight")
    weight.grad = torch.ones_like(weight)
    other = copy.deepcopy(model)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    tw.verify(model, other, torch.randn(5, 31), training=True)
    assert model.training
    assert other.training
    assert model[0].weight is weight
    assert weight.grad is not None
    assert bool((weight.grad == 1).all())
    assert model[3].weight.grad is None
    assert isinstance(model._modules["0"]._parameters["weight"], nn.Parameter)
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    assert not model[0]._forward_hooks
    assert not model[0]._forward_pre_hooks


class RefusesDoubles(nn.Module):
    """Refuses float64."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(31, 9)

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float64:
            raise TypeError("float32 alone")
        y: Tensor = self.inner(x)
        return y


def test_a_model_that_does_not_run_in_float64_is_judged_by_its_own_rounding() -> None:
    model = RefusesDoubles()
    check = tw.verify(model, copy.deepcopy(model), torch.randn(5, 31))
    assert check
    assert check.against == EAGER
    assert "float32 alone" in check.why_not_exact
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.inner.bias[0] += 1e-4
    assert not tw.verify(model, other, torch.randn(5, 31))


def test_nan_at_other_places_is_wrong() -> None:
    model = mlp()
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.get_parameter("3.bias")[0] = float("nan")
    assert "NaN" in tw.verify(model, other, torch.randn(5, 31)).reason


def test_a_model_without_floating_outputs_gives_nothing_to_compare() -> None:
    class Index(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.argmax(-1)

    check = tw.verify(Index(), Index(), torch.randn(5, 31))
    assert not check
    assert "nothing to compare" in check.reason


def test_several_inputs_are_named() -> None:
    model = mlp()
    check = tw.verify(model, copy.deepcopy(model), [torch.randn(1, 31), torch.randn(6, 31)])
    assert len(check.compared) == 2
    assert check.compared[0].name.startswith("1x31")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_jitter_is_one_unit_in_the_last_place_up_or_down(dtype: torch.dtype) -> None:
    ones = torch.ones(3, model_truth._PIECE // 2, dtype=dtype).t()
    found = model_truth._jittered(ones, run=0)
    assert found.shape == ones.shape
    eps = torch.finfo(dtype).eps
    assert set((found - 1).unique().tolist()) == {eps, -eps}
    assert 0.4 < float((found > 1).double().mean()) < 0.6
    assert not torch.equal(found, model_truth._jittered(ones, run=1))
    assert bool((ones == 1).all())
