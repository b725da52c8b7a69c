"""Training loops around FusedMLP: precision, checkpoints, optimizers, evaluation, torch.compile.

Each loop is run beside the same loop on the children, and ends where that ends.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.helpers import ISAS, group
from tests.support.mlps import by_hand
from tests.support.training_steps import (
    KEEPING,
    all_close,
    backward_runs,
    grads_in,
    same_bits,
)
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch.utils.checkpoint import checkpoint

import torchweld as tw

pytestmark = [
    pytest.mark.skipif(not ISAS, reason="no compiled kernels on this machine"),
    pytest.mark.usefixtures("one_thread"),
]

keeping = pytest.mark.parametrize("keep", KEEPING)


def mlp_of(keep: str, **how: Any) -> tw.FusedMLP:
    return tw.FusedMLP((13, 21, 7), recompute=KEEPING[keep], **how)


def twins(keep: str, **how: Any) -> list[tuple[nn.Module, Callable[[Tensor], Tensor]]]:
    """The same MLP twice: as one op, and as its children one by one."""
    mlp = mlp_of(keep, **how)
    plain = copy.deepcopy(mlp)
    return [(mlp, mlp), (plain, partial(by_hand, plain))]


# ---- precision ----


@keeping
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("gated", [False, True])
def test_autocast_gives_parameters_gradients_of_their_own_type(
    gated: bool, dtype: torch.dtype, keep: str
) -> None:
    """In float32, and as close to float64's as eager's."""
    x, g = torch.randn(33, 13), torch.randn(33, 7)
    found = []
    for module, run in twins(keep, gated=gated, activation="silu"):
        own = x.clone().requires_grad_()
        with torch.autocast("cpu", dtype=dtype):
            y = run(own)
        assert y.dtype == dtype
        with backward_runs() if run is module else torch.autocast("cpu", enabled=False):
            y.float().backward(g)
        found.append([own.grad, *grads_in(module)])
        exact = copy.deepcopy(module).double()
    assert isinstance(exact, tw.FusedMLP)
    wide = x.double().requires_grad_()
    reference = torch.autograd.grad(by_hand(exact, wide), [wide, *exact.parameters()], g.double())
    for ours, eagers, right in zip(*found, reference, strict=True):
        assert ours is not None
        assert eagers is not None
        assert ours.dtype == torch.float32
        error, allowed = ((t.double() - right).square().mean().sqrt() for t in (ours, eagers))
        assert error <= 1.5 * allowed + 1e-6
        assert allowed < 0.1 * right.square().mean().sqrt()


@keeping
def test_a_gradient_scaler_scales_and_skips(keep: str) -> None:
    ended = []
    for module, run in twins(keep):
        torch.manual_seed(1)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
        for step in range(4):
            optimizer.zero_grad()
            x, target = torch.randn(9, 13), torch.randn(9, 7)
            if step == 2:
                x[0, 0] = torch.inf  # this step is left out, and the scale is halved
            before = [p.detach().clone() for p in module.parameters()]
            with torch.autocast("cpu", dtype=torch.float16):
                loss = F.mse_loss(run(x).float(), target)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            moved = [not torch.equal(a, b) for a, b in zip(before, module.parameters())]  # noqa: B905
            assert moved == [step != 2] * len(before)
        assert scaler.get_scale() == 2.0**7
        ended.append([p.detach() for p in module.parameters()])
    all_close(*ended, rtol=1e-2, atol=1e-3)


@keeping
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_modules_of_every_dtype_train(dtype: torch.dtype, keep: str) -> None:
    mlp = mlp_of(keep, dtype=dtype)
    x = torch.randn(9, 13).to(dtype)
    with backward_runs():
        mlp(x).square().sum().backward()
    for parameter in mlp.parameters():
        assert parameter.grad is not None
        assert parameter.grad.dtype == dtype


# ---- checkpoints ----


@keeping
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_blocks(use_reentrant: bool, keep: str) -> None:
    """The same bits as without: the forward that runs again is the same forward."""
    mlp, x = mlp_of(keep), torch.randn(9, 13, requires_grad=True)
    inputs = [x, *mlp.parameters()]
    expected = torch.autograd.grad(mlp(x).square().sum(), inputs)
    y = checkpoint(mlp, x, use_reentrant=use_reentrant)
    with backward_runs():
        y.square().sum().backward()
    same_bits([t.grad for t in inputs], expected)


# ---- optimizers ----

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "sgd fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
}


@keeping
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name: str, to_none: bool, accumulate: int, keep: str) -> None:
    ended = []
    for module, run in twins(keep, dtype=torch.float64):
        torch.manual_seed(2)
        optimizer = OPTIMIZERS[name](list(module.parameters()))
        for _ in range(3):
            optimizer.zero_grad(set_to_none=to_none)
            for _ in range(accumulate):
                loss = (run(torch.randn(9, 13).double()) - 1).square().mean()
                loss.backward()
            nn.utils.clip_grad_norm_(module.parameters(), 0.5)
            optimizer.step()
        ended.append([p.detach() for p in module.parameters()])
    all_close(*ended)


@keeping
def test_training_and_evaluation_in_turn(keep: str) -> None:
    """Packed copies come with eval and go with train; none outlives the weights it is of."""
    mlp, x = mlp_of(keep), torch.randn(9, 13)
    optimizer = torch.optim.AdamW(mlp.parameters(), lr=0.05, fused=True)
    for _ in range(3):
        mlp.train()
        assert mlp.packed_bytes == 0
        optimizer.zero_grad()
        with backward_runs():
            (mlp(x) - 1).square().mean().backward()
        mlp.eval()
        with torch.no_grad():
            stale = mlp(x)
            assert mlp.packed_bytes > 0
        with backward_runs():  # gradients in eval come from the weights themselves
            mlp(x).sum().backward()
        optimizer.step()
        with torch.no_grad():
            expected = by_hand(mlp, x)
            torch.testing.assert_close(mlp(x), expected)
        assert not torch.allclose(stale, expected)


# ---- torch.compile ----


def recording() -> tuple[Callable[..., Any], list[list[str]]]:
    """A backend that runs graphs as they are, and the ops of each: forward's, then backward's."""
    graphs: list[list[str]] = []

    def note(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        graphs.append([str(n.target) for n in graph.graph.nodes if n.op == "call_function"])
        return make_boxed_func(graph)

    return aot_autograd(fw_compiler=note, bw_compiler=note), graphs


@pytest.mark.usefixtures("own_compilations")
@keeping
@pytest.mark.parametrize("gated", [False, True])
def test_the_compiled_step_has_our_backward(gated: bool, keep: str) -> None:
    (mlp, _), (plain, run) = twins(keep, gated=gated, activation="silu")
    x, target = torch.randn(9, 13), torch.randn(9, 7)
    backend, graphs = recording()

    def loss(x: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(mlp(x), target)

    compiled = torch.compile(loss, fullgraph=True, backend=backend)
    for _ in range(2):
        mlp.zero_grad()
        value = compiled(x, target)
        with backward_runs():
            value.backward()
    F.mse_loss(run(x), target).backward()
    all_close(grads_in(mlp), grads_in(plain))
    forward, backward = graphs
    assert [t for t in forward if "torchweld" in t] == ["torchweld.chain_saving.default"]
    assert [t for t in backward if "torchweld" in t] == ["torchweld.chain_backward.default"]
    assert not [t for t in forward + backward if "mm" in t.split(".")]


@pytest.mark.usefixtures("own_compilations")
def test_a_compiled_group_has_our_backward() -> None:
    tensors = [torch.randn(n, 13, requires_grad=True) for n in (7, 5)]
    x, spec = torch.randn(9, 13, requires_grad=True), "gelu;identity"
    backend, graphs = recording()

    def loss(x: Tensor, tensors: list[Tensor]) -> Tensor:
        first, second = group(x, tensors, spec)
        return first.square().sum() + second.sum()

    value = torch.compile(loss, fullgraph=True, backend=backend)(x, tensors)
    with backward_runs():
        found = torch.autograd.grad(value, [x, *tensors])
    all_close(found, torch.autograd.grad(loss(x, tensors), [x, *tensors]))
    assert [[t for t in graph if "torchweld" in t] for graph in graphs] == [
        ["torchweld.group_saving.default"],
        ["torchweld.group_backward.default"],
    ]


@pytest.mark.usefixtures("own_compilations")
@keeping
def test_a_compiled_step_with_its_optimizer(keep: str) -> None:
    ended = []
    for module, run in twins(keep):
        torch.manual_seed(4)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

        def step(
            x: Tensor,
            run: Callable[[Tensor], Tensor] = run,
            optimizer: torch.optim.Optimizer = optimizer,
        ) -> Tensor:
            optimizer.zero_grad()
            loss = (run(x) - 1).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        if run is module:
            stepping = torch.compile(step, backend="aot_eager")
            with backward_runs(calls=3):
                ended.append([stepping(torch.randn(9, 13)) for _ in range(3)])
        else:
            ended.append([step(torch.randn(9, 13)) for _ in range(3)])
    all_close(*ended)


@pytest.mark.usefixtures("own_compilations")
@pytest.mark.slow
@keeping
def test_inductor_trains(keep: str) -> None:
    (mlp, _), (plain, run) = twins(keep)
    model = torch.compile(nn.Sequential(nn.LayerNorm(13), mlp), fullgraph=True)
    x = torch.randn(9, 13)
    for _ in range(2):
        mlp.zero_grad()
        loss = model(x).square().sum()
        with backward_runs():
            loss.backward()
    run(F.layer_norm(x, (13,))).square().sum().backward()
    all_close(grads_in(mlp), grads_in(plain))
