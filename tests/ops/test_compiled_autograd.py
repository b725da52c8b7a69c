"""Backwards that torch compiles: compiled autograd traces the graph of a backward as it is."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
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
from torch import Tensor, fx
from torch._dynamo import compiled_autograd
from torch.autograd.graph import saved_tensors_hooks

import torchweld as tw

pytestmark = [
    pytest.mark.skipif(not ISAS, reason="no compiled kernels on this machine"),
    pytest.mark.usefixtures("one_thread", "own_compilations"),
]
keeping = pytest.mark.parametrize("keep", KEEPING)


class Compiling:
    """Compiles backwards and counts them; the graphs run as they are."""

    def __init__(self) -> None:
        self.count = 0

    def backend(self, graph: fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        self.count += 1
        return graph.forward

    def __call__(self, dynamic: bool = False) -> AbstractContextManager[None]:
        how = torch.compile(backend=self.backend, fullgraph=True, dynamic=dynamic)
        context: AbstractContextManager[None] = compiled_autograd._enable(how, dynamic=dynamic)
        return context


@keeping
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_steps_of_a_chain(dropout: float, keep: str) -> None:
    """The second step runs the graph of the first; another batch size makes another."""
    mlp = tw.FusedMLP((7, 11, 5), gated=True, dropout=dropout, recompute=KEEPING[keep]).double()
    plain, compiling = copy.deepcopy(mlp), Compiling()
    for rows, graphs in ((4, 1), (4, 1), (9, 2)):
        x = torch.randn(rows, 7).double()
        found = []
        for module, run in ((mlp, mlp), (plain, lambda x: by_hand(plain, x))):
            torch.manual_seed(rows)
            module.zero_grad()
            own = x.clone().requires_grad_()
            y = run(own)
            if module is mlp:
                with compiling(), backward_runs():
                    y.square().sum().backward()
            else:
                y.square().sum().backward()
            found.append([own.grad, *grads_in(module)])
        all_close(*found)
        assert compiling.count == graphs


@keeping
def test_blocks_that_differ_do_not_share_a_graph(keep: str) -> None:
    compiling = Compiling()
    x = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    weights = [torch.randn(6, 6, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    for spec in ("relu;identity", "tanh;identity", "relu;identity"):
        y = chain_training(x, weights, spec, KEEPING[keep])
        expected = torch.autograd.grad(y.sum(), [x, *weights], retain_graph=True)
        with compiling(), backward_runs():
            all_close(torch.autograd.grad(y.sum(), [x, *weights]), expected)
    assert compiling.count == 2


def test_only_what_is_needed() -> None:
    mlp, compiling = tw.FusedMLP((7, 11, 5)), Compiling()
    x = torch.randn(4, 7)
    for frozen in ("up.weight", "down.bias"):
        for name, parameter in mlp.named_parameters():
            parameter.requires_grad_(name != frozen)
        params = [p for p in mlp.parameters() if p.requires_grad]
        expected = torch.autograd.grad(by_hand(mlp, x).sum(), params)
        y = mlp(x)
        with compiling(), backward_runs():
            all_close(torch.autograd.grad(y.sum(), params), expected)


@pytest.mark.parametrize("used", [(0, 1), (0,), (1,)], ids=str)
def test_a_group_of_which_some_is_used(used: tuple[int, ...]) -> None:
    x = torch.randn(3, 7, requires_grad=True)
    weights = [torch.randn(n, 7, requires_grad=True) for n in (5, 4)]
    ys = group(x, weights, "gelu;tanh")
    loss = torch.stack([ys[i].square().sum() for i in used]).sum()
    expected = torch.autograd.grad(loss, [x, *weights], retain_graph=True)
    with Compiling()(), backward_runs():
        all_close(torch.autograd.grad(loss, [x, *weights]), expected)


def test_batches_of_any_size_share_a_dynamic_graph() -> None:
    mlp, compiling = tw.FusedMLP((7, 11, 5)), Compiling()
    for rows in (4, 5, 9):
        x = torch.randn(rows, 7)
        expected = torch.autograd.grad(by_hand(mlp, x).square().sum(), list(mlp.parameters()))
        mlp.zero_grad()
        y = mlp(x)
        with compiling(dynamic=True), backward_runs():
            y.square().sum().backward()
        all_close(grads_in(mlp), expected)
    assert compiling.count < 3


def test_hooks_on_saved_tensors() -> None:
    mlp = tw.FusedMLP((7, 11, 5))
    x = torch.randn(4, 7)
    expected = torch.autograd.grad(by_hand(mlp, x).sum(), list(mlp.parameters()))
    with saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t):
        y = mlp(x)
    with Compiling()(), backward_runs():
        all_close(torch.autograd.grad(y.sum(), list(mlp.parameters())), expected)


@pytest.mark.parametrize("hooks", [False, True])
def test_parameters_of_other_memory_are_refused(hooks: bool) -> None:
    """A compiled backward is given the parameters, not the memory that they had."""
    mlp = tw.FusedMLP((7, 11, 5))
    packing = saved_tensors_hooks(lambda t: t, lambda t: t) if hooks else nullcontext()
    with packing:
        y = mlp(torch.randn(4, 7))
    mlp.down.weight.data = mlp.down.weight.data * 2
    with Compiling()(), pytest.raises(ValueError, match="run the forward again"):
        y.sum().backward()


def test_a_compiled_module_with_a_compiled_backward() -> None:
    mlp = tw.FusedMLP((7, 11, 5))
    x = torch.randn(4, 7)
    expected = torch.autograd.grad(by_hand(mlp, x).sum(), list(mlp.parameters()))
    with torch._dynamo.config.patch(compiled_autograd=True):

        @torch.compile(backend="aot_eager")
        def step(x: Tensor) -> None:
            mlp(x).sum().backward()

        with backward_runs():
            step(x)
    all_close(grads_in(mlp), expected)
