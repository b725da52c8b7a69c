"""The training op as a citizen of autograd: higher orders, transforms, hooks, edits, empty batches.

`test_op_gradients.py` has what holds for `chain` whichever way hidden values are kept; here both
ways are asked for, and modules are trained.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
from tests.support.helpers import ISAS, tensors_for
from tests.support.mlps import by_hand
from tests.support.training_steps import (
    KEEPING,
    all_close,
    backward_runs,
    chain_training,
    grads_in,
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
        penalty = sum(grad.square().sum() for grad in first)
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
                lambda p, seen=seen: seen.append("accumulated")  # type: ignore[misc]
            ),
        ]
        x.register_hook(lambda grad, seen=seen: seen.append("x"))  # type: ignore[misc]
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
    mlp.register_full_backward_pre_hook(lambda module, out: (2 * out[0],))
    mlp.register_full_backward_hook(lambda module, into, out: seen.append((into[0], out[0])))
    x = torch.randn(3, 7, dtype=torch.float64, requires_grad=True)
    with backward_runs():
        mlp(x).sum().backward()
    (expected,) = torch.autograd.grad(2 * by_hand(mlp, x).sum(), x)
    torch.testing.assert_close(x.grad, expected)
    ((into, out),) = seen
    torch.testing.assert_close(into, expected)
    assert (out == 2).all()


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
        except RuntimeError as error:
            if "modified by an inplace operation" not in str(error):
                raise
            found.append(None)
        else:
            found.append([own.grad, *grads_in(module)])
    got, wanted = found
    if got is not None:
        assert wanted is not None, "eager notices the edit"
        all_close(got, wanted)


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
