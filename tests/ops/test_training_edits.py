"""What is edited between forward and backward, frozen between steps, or not there at all."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from tests.support.helpers import ISAS, group
from tests.support.mlps import by_hand
from tests.support.training_steps import (
    KEEPING,
    all_close,
    backward_runs,
    chain_training,
    grads_in,
)
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

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
    "data of other strides": lambda p: setattr(
        p, "data", torch.stack([p.data * 1.5] * 2, -1)[..., 0]
    ),
}
# What a graph may do with what it keeps; each gives what can change a memory, or no memory at all.
HOOKS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "none": nullcontext,
    "the tensor itself": lambda: saved_tensors_hooks(lambda t: t, lambda t: t),
    "an alias": lambda: saved_tensors_hooks(lambda t: t.detach(), lambda t: t),
    "a copy": lambda: saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t),
    "numpy": lambda: saved_tensors_hooks(lambda t: t.numpy(force=True).copy(), torch.tensor),
    "save_on_cpu": save_on_cpu,
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


class Edited:
    """A chain of two layers, and the same by hand; a parameter is edited after the forward."""

    def __init__(self, transposed: bool, recompute: bool) -> None:
        self.spec = "tanh/b/t;tanh/b/t" if transposed else "tanh/b;tanh/b"
        self.recompute = recompute
        self.layer = (
            (lambda x, w, b: torch.addmm(b, x, w)) if transposed else torch.nn.functional.linear
        )
        shapes = [(11, 7), (11,), (5, 11), (5,)]
        self.values = [torch.randn(s[::-1] if transposed else s).double() for s in shapes]
        self.x = torch.randn(6, 7).double()

    def chain(self, x: Tensor, params: list[nn.Parameter]) -> Tensor:
        return chain_training(x, params, self.spec, self.recompute)

    def by_hand(self, x: Tensor, params: list[nn.Parameter]) -> Tensor:
        hidden = self.layer(x, *params[:2]).tanh()
        return self.layer(hidden, *params[2:]).tanh()

    def gradients(
        self,
        run: Callable[[Tensor, list[nn.Parameter]], Tensor],
        number: int,
        edit: Callable[[nn.Parameter], object],
        during: AbstractContextManager[Any],
        create_graph: bool = False,
    ) -> list[Tensor] | str:
        """What is found if parameter `number` is edited, or what the error says."""
        params = [nn.Parameter(value.clone()) for value in self.values]
        x = self.x.clone().requires_grad_()
        with during:
            y = run(x, params)
        with torch.no_grad():
            edit(params[number])
        try:
            found = torch.autograd.grad(y.square().sum(), [x, *params], create_graph=create_graph)
        except (RuntimeError, ValueError) as error:
            return str(error)
        return [grad.detach() for grad in found]


@keeping
@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("hooks", HOOKS)
@pytest.mark.parametrize("edit", EDITS)
def test_edits_under_hooks_on_saved_tensors(
    edit: str, hooks: str, transposed: bool, create_graph: bool, keep: str
) -> None:
    """Eager's gradients, or an error; a hook that copies what it is given needs no error."""
    edited = Edited(transposed, KEEPING[keep])
    for number in range(4):
        how = (number, EDITS[edit])
        wanted = edited.gradients(edited.by_hand, *how, HOOKS[hooks](), create_graph)
        got = edited.gradients(edited.chain, *how, HOOKS[hooks](), create_graph)
        if not isinstance(got, str):
            assert not isinstance(wanted, str), "eager notices the edit"
            all_close(got, wanted)
            continue
        assert any(words in got for words in ("changed between", "modified by", ".data")), got
        assert hooks not in ("a copy", "numpy"), "what was kept has not changed"
        counted = "modified by" in got  # torch counts edits in place, of a bias too
        assert counted or create_graph or keep == "recompute", "saved values serve as eager's do"


@keeping
@pytest.mark.parametrize("transposed", [False, True])
def test_saved_tensors_may_be_mutated_where_torch_allows_it(transposed: bool, keep: str) -> None:
    edited = Edited(transposed, KEEPING[keep])
    for number in range(4):
        found: list[list[Tensor]] = []
        for run in (edited.chain, edited.by_hand):
            params = [nn.Parameter(value.clone()) for value in edited.values]
            x = edited.x.clone().requires_grad_()
            with torch.autograd.graph.allow_mutation_on_saved_tensors():
                y = run(x, params)
                with torch.no_grad():
                    params[number].mul_(2.0)
                found.append(list(torch.autograd.grad(y.square().sum(), [x, *params])))
        all_close(*found)


def test_a_group_s_edits_before_a_second_derivative() -> None:
    weights = [torch.randn(n, 7, dtype=torch.float64, requires_grad=True) for n in (5, 4)]
    x = torch.randn(3, 7, dtype=torch.float64, requires_grad=True)
    for edit in (False, True):
        first, second = group(x, weights, "gelu;tanh")
        with torch.no_grad():
            weights[0].data.mul_(1.0 + edit)
        loss = first.sum() + second.sum()
        said = pytest.raises(ValueError, match="create_graph=True") if edit else nullcontext()
        with said:
            torch.autograd.grad(loss, weights, create_graph=True)


@pytest.mark.parametrize("gate", ["first", "interleaved", "separate"])
def test_edits_before_recomputing_where_torch_multiplies(gate: str) -> None:
    """Big bfloat16 calls may be left to torch; their hidden values are checked as well."""
    count = 2 if gate == "separate" else 1
    weights = [torch.randn(512 // count, 256).bfloat16() for _ in range(count)]
    params = [nn.Parameter(w) for w in (*weights, torch.randn(256, 256).bfloat16())]
    x = torch.randn(256, 256).bfloat16()
    y = chain_training(x, params, f"silu/{gate};identity", True)
    y.sum().backward(retain_graph=True)
    params[0].data.mul_(2.0)
    with pytest.raises(ValueError, match="changed between forward and"):
        y.sum().backward()


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
