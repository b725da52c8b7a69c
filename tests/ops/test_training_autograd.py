"""The training op as a citizen of autograd: higher orders, transforms, hooks, edits, empty batches.

`test_op_gradients.py` has what holds for `chain` whichever way hidden values are kept; here both
ways are asked for, and modules are trained.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from tests.support.helpers import ISAS, group, run_python, tensors_for
from tests.support.mlps import by_hand
from tests.support.training_steps import (
    KEEPING,
    all_close,
    backward_runs,
    chain_training,
    grads_in,
    same_bits,
)
from torch import Tensor, nn
from torch.func import functional_call

import torchweld as tw
from torchweld.core.blocks import parse_spec
from torchweld.ops.backends import reference_backend

pytestmark = [
    pytest.mark.skipif(not ISAS, reason="no compiled kernels on this machine"),
    pytest.mark.usefixtures("one_thread"),
]

keeping = pytest.mark.parametrize("keep", KEEPING)
SPECS = [
    "gelu/b;identity/b",
    "silu/separate/b;identity",
    "mish/interleaved/t/b;tanh/b;softplus/b",
    "quick_gelu/b",
]


def mlp_of(keep: str, **how: object) -> tw.FusedMLP:
    settings: dict[str, object] = {"dtype": torch.float64, **how}
    return tw.FusedMLP((7, 11, 5), recompute=KEEPING[keep], **settings)  # type: ignore[arg-type]


# ---- higher orders and transforms ----


@keeping
@pytest.mark.parametrize("spec", SPECS)
def test_gradcheck_to_the_second_order(spec: str, keep: str) -> None:
    inputs = (
        torch.randn(3, 5, dtype=torch.float64, requires_grad=True),
        *tensors_for(parse_spec(spec)),
    )

    def run(x: Tensor, *tensors: Tensor) -> Tensor:
        return chain_training(x, tensors, spec, KEEPING[keep])

    with backward_runs():
        run(*inputs).sum().backward()
    assert torch.autograd.gradcheck(run, inputs)
    assert torch.autograd.gradgradcheck(run, inputs)


@keeping
@pytest.mark.parametrize("spec", SPECS)
def test_a_gradient_penalty_is_eagers(spec: str, keep: str) -> None:
    """Backward through a backward: into x, all tensors and the gradient that came in."""
    forms, tensors = parse_spec(spec), tensors_for(parse_spec(spec))
    x = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    g = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    found = []
    for run in (
        partial(chain_training, spec=spec, recompute=KEEPING[keep]),
        partial(reference_backend.chain, forms=forms),
    ):
        first = torch.autograd.grad(run(x, tensors), [x, *tensors], g, create_graph=True)
        penalty = torch.stack([grad.square().sum() for grad in first]).sum()
        found.append(torch.autograd.grad(penalty, [x, g, *tensors], allow_unused=True))
    for got, expected in zip(*found, strict=True):
        # The gradient of a last bias does not depend on it: eager says None, a zero is as good.
        wanted = torch.zeros_like(got) if expected is None and got is not None else expected
        torch.testing.assert_close(got, wanted)


@keeping
def test_func_grad_and_vmap_of_it(keep: str) -> None:
    mlp = mlp_of(keep)
    parameters = dict(mlp.named_parameters())
    x, target = torch.randn(6, 7).double(), torch.randn(6, 5).double()

    def loss(run: Callable[..., Tensor], parameters: object, x: Tensor, target: Tensor) -> Tensor:
        return (run(parameters, x) - target).square().mean()

    ours = partial(loss, lambda p, x: functional_call(mlp, p, x))
    plain = partial(
        loss,
        lambda p, x: torch.nn.functional.linear(
            torch.nn.functional.gelu(torch.nn.functional.linear(x, p["up.weight"], p["up.bias"])),
            p["down.weight"],
            p["down.bias"],
        ),
    )
    whole = torch.func.grad(ours)(parameters, x, target)
    expected = torch.func.grad(plain)(parameters, x, target)
    each = torch.func.vmap(torch.func.grad(ours), in_dims=(None, 0, 0))(parameters, x, target)
    for name in parameters:
        torch.testing.assert_close(whole[name], expected[name])
        torch.testing.assert_close(each[name].mean(0), expected[name])


@keeping
def test_many_gradients_at_once(keep: str) -> None:
    """Batched gradients, as a vectorised jacobian asks for them."""
    mlp, g = mlp_of(keep), torch.randn(4, 3, 5).double()
    x = torch.randn(3, 7, dtype=torch.float64, requires_grad=True)
    inputs = [x, *mlp.parameters()]
    found = torch.autograd.grad(mlp(x), inputs, g, is_grads_batched=True)
    expected = [torch.autograd.grad(by_hand(mlp, x), inputs, one) for one in g]
    all_close(found, [torch.stack(each) for each in zip(*expected, strict=True)])
    jacobian = torch.autograd.functional.jacobian(mlp, x, vectorize=True)
    plain = torch.autograd.functional.jacobian(partial(by_hand, mlp), x)
    torch.testing.assert_close(jacobian, plain)


def test_many_gradients_of_a_group_at_once() -> None:
    w = [torch.randn(n, 7, dtype=torch.float64, requires_grad=True) for n in (4, 6)]
    x = torch.randn(3, 7, dtype=torch.float64, requires_grad=True)
    gs = [torch.randn(2, 3, n).double() for n in (4, 6)]
    found = torch.autograd.grad(group(x, w, "gelu;identity"), [x, *w], gs, is_grads_batched=True)
    plain = reference_backend.group(x, w, parse_spec("gelu;identity"))
    expected = torch.autograd.grad(plain, [x, *w], gs, is_grads_batched=True)
    all_close(found, expected)


# ---- how weights are held ----


def tie(mlp: tw.FusedMLP) -> None:
    mlp.down.weight = mlp.up.weight


def normalise(mlp: tw.FusedMLP) -> None:
    nn.utils.parametrizations.weight_norm(mlp.up)


def turn(mlp: tw.FusedMLP) -> None:
    mlp.up.weight = nn.Parameter(mlp.up.weight.detach().t().contiguous().t())


@keeping
@pytest.mark.parametrize("change", [tie, normalise, turn])
def test_weights_that_are_shared_computed_or_turned(
    change: Callable[[tw.FusedMLP], None], keep: str
) -> None:
    mlp = tw.FusedMLP((7, 7, 7), recompute=KEEPING[keep], dtype=torch.float64)
    change(mlp)
    plain = copy.deepcopy(mlp)
    x = torch.randn(3, 7).double()
    with backward_runs():
        mlp(x).square().sum().backward()
    by_hand(plain, x).square().sum().backward()
    all_close(grads_in(mlp), grads_in(plain))


# ---- hooks ----


@keeping
def test_hooks_on_tensors(keep: str) -> None:
    """On x, on parameters, after accumulation, and on the output: seen, and heeded."""
    mlp = mlp_of(keep)
    found = []
    for run in (mlp, partial(by_hand, mlp)):
        mlp.zero_grad()
        x = torch.randn(3, 7, generator=torch.Generator().manual_seed(1)).double().requires_grad_()
        seen: list[str] = []
        handles = [
            mlp.up.weight.register_hook(lambda grad: 2 * grad),
            mlp.down.bias.register_post_accumulate_grad_hook(
                lambda p, seen=seen: seen.append("accumulated")
            ),
        ]
        x.register_hook(lambda grad, seen=seen: seen.append("x"))
        y = run(x)
        y.register_hook(lambda grad: 3 * grad)
        y.square().sum().backward()
        for handle in handles:
            handle.remove()
        assert sorted(seen) == ["accumulated", "x"]
        found.append([x.grad, *grads_in(mlp)])
    all_close(*found)


@keeping
def test_full_backward_hooks_on_the_module(keep: str) -> None:
    """The kernel still runs: only hooks of the children would send it to them."""
    mlp = mlp_of(keep)
    seen: list[tuple[Tensor, Tensor]] = []

    def twice(module: nn.Module, out: Any) -> Any:
        return (2 * out[0],)

    def note(module: nn.Module, into: Any, out: Any) -> None:
        seen.append((into[0], out[0]))

    mlp.register_full_backward_pre_hook(twice)
    mlp.register_full_backward_hook(note)
    x = torch.randn(3, 7, dtype=torch.float64, requires_grad=True)
    with backward_runs():
        mlp(x).sum().backward()
    (expected,) = torch.autograd.grad(2 * by_hand(mlp, x).sum(), x)
    torch.testing.assert_close(x.grad, expected)
    ((into, out),) = seen
    torch.testing.assert_close(into, expected)
    assert (out == 2).all()


@keeping
def test_a_step_inside_the_backward(keep: str) -> None:
    """Each parameter is stepped, and its gradient dropped, as soon as that is there."""

    def step(parameter: Tensor) -> None:
        assert parameter.grad is not None
        with torch.no_grad():
            parameter.add_(parameter.grad, alpha=-0.1)
        parameter.grad = None

    mlp = mlp_of(keep)
    plain = copy.deepcopy(mlp)
    x = torch.randn(4, 7).double()
    for module, run in ((mlp, mlp), (plain, partial(by_hand, plain))):
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(step)
        for _ in range(3):
            run(x).square().sum().backward()
    all_close(list(mlp.parameters()), list(plain.parameters()))


@keeping
def test_hooks_on_saved_tensors(keep: str) -> None:
    """What is kept may be moved elsewhere and brought back."""
    mlp = mlp_of(keep)
    x = torch.randn(4, 7, dtype=torch.float64, requires_grad=True)
    inputs = [x, *mlp.parameters()]
    expected = torch.autograd.grad(mlp(x).sum(), inputs)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: t.numpy(force=True).copy(), torch.tensor
    ):
        y = mlp(x)
    with backward_runs():
        same_bits(torch.autograd.grad(y.sum(), inputs), expected)


@keeping
def test_anomaly_mode_says_where_the_nan_was_made(keep: str) -> None:
    mlp = mlp_of(keep)
    x = torch.randn(3, 7, dtype=torch.float64, requires_grad=True)
    with torch.autograd.set_detect_anomaly(True):
        y = mlp(x)
        with backward_runs():
            y.sum().backward(retain_graph=True)
        said = pytest.warns(UserWarning, match="Traceback of forward call")
        with said, pytest.raises(RuntimeError, match="returned nan values"):
            y.backward(torch.full_like(y, torch.nan))


def test_nodes_have_names() -> None:
    x = torch.randn(3, 7, requires_grad=True)
    weights = [torch.randn(7, 7), torch.randn(7, 7)]
    y = torch.ops.torchweld.chain(x, weights, "gelu;identity")
    assert y.grad_fn is not None
    assert y.grad_fn.name() == "ChainBackward"
    for y in group(x, weights, "gelu;identity"):
        assert y.grad_fn is not None
        assert y.grad_fn.name() == "GroupBackward"


def test_a_long_chain_of_blocks_is_freed_without_a_backward() -> None:
    """Freeing one node frees the next: 100,000 of them must not take a stack frame each."""
    printed = run_python("""
import torch
import torchweld
weight = torch.eye(2, requires_grad=True)
y = torch.ones(1, 2)
for _ in range(100_000):
    y = torch.ops.torchweld.chain(y, [weight], "identity")
del y
print("freed")
""")
    assert printed == "freed\n"


@keeping
def test_two_threads_go_back_through_one_graph(keep: str) -> None:
    mlp = mlp_of(keep)
    x = torch.randn(4, 7, dtype=torch.float64, requires_grad=True)
    inputs = [x, *mlp.parameters()]
    hidden = mlp(x)
    losses = [hidden.square().sum(), hidden.sum()]
    expected = [torch.autograd.grad(loss, inputs, retain_graph=True) for loss in losses]

    def back(loss: Tensor) -> list[tuple[Tensor, ...]]:
        return [torch.autograd.grad(loss, inputs, retain_graph=True) for _ in range(200)]

    with ThreadPoolExecutor(2) as both:
        for found, wanted in zip(both.map(back, losses), expected, strict=True):
            for gradients in found:
                same_bits(gradients, wanted)


@keeping
@pytest.mark.parametrize("create_graph", [False, True])
def test_autocast_around_a_backward_alone(create_graph: bool, keep: str) -> None:
    """Gradients have the types of the forward, and are as exact."""
    mlp = mlp_of(keep).float()
    x = torch.randn(4, 7, requires_grad=True)
    inputs = [x, *mlp.parameters()]
    back = partial(
        torch.autograd.grad,
        mlp(x).square().sum(),
        inputs,
        retain_graph=True,
        create_graph=create_graph,
    )
    expected = back()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        same_bits(back(), expected)
