"""What is edited between forward and backward, frozen between steps, or not there at all."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
from tests.support.helpers import ISAS
from tests.support.mlps import by_hand
from tests.support.training_steps import KEEPING, all_close, backward_runs, grads_in
from torch import Tensor, nn

import torchweld as tw

pytestmark = [
    pytest.mark.skipif(not ISAS, reason="no compiled kernels on this machine"),
    pytest.mark.usefixtures("one_thread"),
]

keeping = pytest.mark.parametrize("keep", KEEPING)


def mlp_of(keep: str, **how: object) -> tw.FusedMLP:
    settings: dict[str, object] = {"dtype": torch.float64, **how}
    return tw.FusedMLP((7, 11, 5), recompute=KEEPING[keep], **settings)  # type: ignore[arg-type]


# ---- accumulation and freezing ----


@keeping
def test_accumulation_over_several_batches(keep: str) -> None:
    mlp = mlp_of(keep)
    plain = copy.deepcopy(mlp)
    for rows in (3, 1, 20):
        x = torch.randn(rows, 7).double()
        with backward_runs():
            mlp(x).square().mean().backward()
        by_hand(plain, x).square().mean().backward()
    all_close(grads_in(mlp), grads_in(plain))


@keeping
def test_requires_grad_toggled_between_steps(keep: str) -> None:
    mlp = mlp_of(keep)
    plain = copy.deepcopy(mlp)
    names = [name for name, _ in mlp.named_parameters()]
    for frozen in ([], ["up.weight"], names[:2], names[1:], ["down.bias"], []):
        for module, run in ((mlp, mlp), (plain, partial(by_hand, plain))):
            for name, parameter in module.named_parameters():
                parameter.requires_grad_(name not in frozen)
                parameter.grad = None
            torch.manual_seed(5)
            run(torch.randn(4, 7).double()).square().sum().backward()
        all_close(grads_in(mlp), grads_in(plain))
        assert [p.grad is None for p in mlp.parameters()] == [name in frozen for name in names]


# ---- edits between forward and backward ----

EDITS: dict[str, Callable[[nn.Parameter], object]] = {
    "in place": lambda p: p.mul_(1.5),
    "one element": lambda p: p.view(-1)[0].add_(1.0),
    "data": lambda p: p.data.mul_(1.5),
    "data replaced": lambda p: setattr(p, "data", p.data * 1.5),
}


@keeping
@pytest.mark.parametrize("name", ["up.weight", "up.bias", "down.weight", "down.bias"])
@pytest.mark.parametrize("edit", EDITS)
def test_weights_edited_before_backward(edit: str, name: str, keep: str) -> None:
    """An error as torch's, or eager's gradients; never others."""
    mlp = mlp_of(keep, output_activation="tanh")
    plain = copy.deepcopy(mlp)
    x = torch.randn(6, 7).double()
    found: list[list[Tensor | None] | None] = []
    for module, run in ((mlp, mlp), (plain, partial(by_hand, plain))):
        own = x.clone().requires_grad_()
        y = run(own)
        with torch.no_grad():
            EDITS[edit](module.get_parameter(name))
        try:
            y.sum().backward()
        except (RuntimeError, tw.TorchweldError, ValueError) as error:
            noticed = "changed between forward and backward" in str(error) and module is mlp
            if "modified by an inplace operation" not in str(error) and not noticed:
                raise
            found.append(None)
        else:
            found.append([own.grad, *grads_in(module)])
    got, wanted = found
    if got is not None:
        assert wanted is not None, "eager notices the edit"
        all_close(got, wanted)
    elif keep == "save" and edit.startswith("data"):
        assert wanted is None, "saved values serve as eager's do"


@keeping
def test_an_input_edited_before_backward(keep: str) -> None:
    mlp = mlp_of(keep)
    x = torch.randn(6, 7).double()
    y = mlp(x)
    x.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@keeping
def test_an_output_may_be_edited(keep: str) -> None:
    """What the layers give is nobody's input: an activation in place behind the block works."""
    mlp = mlp_of(keep)
    x = torch.randn(6, 7, dtype=torch.float64, requires_grad=True)
    with backward_runs():
        found = torch.autograd.grad(mlp(x).relu_().sum(), [x, *mlp.parameters()])
    expected = torch.autograd.grad(by_hand(mlp, x).relu_().sum(), [x, *mlp.parameters()])
    all_close(found, expected)


# ---- no rows ----


@keeping
@pytest.mark.parametrize("shape", [(0, 7), (2, 0, 7)], ids=str)
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_an_empty_batch(shape: tuple[int, ...], dropout: float, keep: str) -> None:
    mlp = mlp_of(keep, dropout=dropout)
    x = torch.randn(shape).double().requires_grad_()
    state = torch.get_rng_state()
    y = mlp(x)
    assert torch.equal(torch.get_rng_state(), state)
    assert y.shape == (*shape[:-1], 5)
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.shape == shape
    for parameter in mlp.parameters():
        assert parameter.grad is not None
        assert parameter.grad.shape == parameter.shape
        assert not parameter.grad.any()
