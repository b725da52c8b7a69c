"""Gradients of the op: first and second order, every combination, and functorch's transforms."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import pytest
import torch
from tests.support.helpers import (
    ACTIVATION_TEXTS,
    CHAIN_IDS,
    CHAINS,
    ISAS,
    NOT_PACKED,
    all_ok,
    chain,
    group,
    group_tensors,
    kernel_runs,
    random_tensors,
    tensors_for,
)
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from torchweld.core.blocks import LayerForm, format_spec, parse_spec
from torchweld.numerics.numerical_rule import check_block
from torchweld.ops.backends import reference_backend

pytestmark = [
    pytest.mark.skipif(not ISAS, reason="no compiled kernels on this machine"),
    pytest.mark.usefixtures("one_thread"),
]


GELU = "gelu/b;identity/b"
QKV = "identity/b;identity;silu/first/b"


def counted(
    op: Callable[..., Tensor | list[Tensor]], spec: str
) -> Callable[..., Tensor | tuple[Tensor, ...]]:
    """The op as a function of tensors alone, seen to run our kernel at every call."""

    def function(x: Tensor, *tensors: Tensor) -> Tensor | tuple[Tensor, ...]:
        with kernel_runs(*NOT_PACKED):
            ys = op(x, tensors, spec)
        return tuple(ys) if isinstance(ys, list) else ys

    return function


@pytest.mark.parametrize("activation", ACTIVATION_TEXTS)
@pytest.mark.parametrize("gate", ["none", "separate", "first", "second", "interleaved"])
def test_gradients_of_every_activation_and_gate(activation: str, gate: str) -> None:
    flag = "" if gate == "none" else f"/{gate}"
    forms = parse_spec(f"{activation}/b{flag};{activation}/b")
    inputs = (torch.randn(3, 5, dtype=torch.float64, requires_grad=True), *tensors_for(forms))
    assert torch.autograd.gradcheck(counted(chain, format_spec(forms)), inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(counted(chain, format_spec(forms)), inputs, fast_mode=True)


@pytest.mark.parametrize("rows", [(), (4,), (20,), (2, 3)])
@pytest.mark.parametrize("forms", CHAINS, ids=CHAIN_IDS)
def test_gradients_to_the_second_order(forms: tuple[LayerForm, ...], rows: tuple[int, ...]) -> None:
    """Element by element, a dozen rows and more too, where weights are repacked on the way."""
    x = torch.randn(*rows, 5, dtype=torch.float64, requires_grad=True)
    inputs = (x, *tensors_for(forms))
    f = counted(chain, format_spec(forms))
    assert torch.autograd.gradcheck(f, inputs, fast_mode=x.numel() > 50)
    assert torch.autograd.gradgradcheck(f, inputs, fast_mode=True)


def test_gradients_of_a_group() -> None:
    forms = parse_spec(QKV)
    x = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    inputs = (x, *group_tensors(forms, 5, torch.float64))
    assert torch.autograd.gradcheck(counted(group, QKV), inputs)
    assert torch.autograd.gradgradcheck(counted(group, QKV), inputs, fast_mode=True)


def test_a_group_whose_outputs_are_not_all_used() -> None:
    forms = parse_spec(QKV)
    tensors = group_tensors(forms, 5, torch.float64)
    x = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    with kernel_runs("natural"):
        ys = group(x, tensors, QKV)
    (ys[1].sum() + ys[2].square().sum()).backward()
    expected = reference_backend.group(x, tensors, forms)
    used = [x, *tensors[2:]]
    wanted = torch.autograd.grad(expected[1].sum() + expected[2].square().sum(), used)
    for t, grad in zip(used, wanted, strict=True):
        torch.testing.assert_close(t.grad, grad)
    assert all(t.grad is None or not t.grad.any() for t in tensors[:2])


@pytest.mark.parametrize("spec", [GELU, "silu/separate;identity/b", "silu/second/b/t;identity"])
def test_every_combination_of_frozen_parameters(spec: str) -> None:
    forms = parse_spec(spec)
    tensors = tensors_for(forms)
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    g = torch.randn(3, 3, dtype=torch.float64)
    everything = [x, *tensors]
    full = torch.autograd.grad(reference_backend.chain(x, tensors, forms), everything, g)
    for needed in itertools.product((False, True), repeat=len(everything)):
        for t, need in zip(everything, needed, strict=True):
            t.requires_grad_(need)
            t.grad = None
        with kernel_runs(*NOT_PACKED):
            y = chain(x, tensors, spec)
        assert y.requires_grad == any(needed)
        if not any(needed):
            continue
        y.backward(g)
        for t, need, expected in zip(everything, needed, full, strict=True):
            assert (t.grad is not None) == need
            if need:
                torch.testing.assert_close(t.grad, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("forms", CHAINS, ids=CHAIN_IDS)
def test_gradients_obey_the_rule(forms: tuple[LayerForm, ...], dtype: torch.dtype) -> None:
    sizes = (123, *([100, 31][: len(forms) - 1]), 64)
    tensors = random_tensors(sizes, forms, dtype)
    x, grads = torch.randn(2, 21, 123).to(dtype), [torch.randn(2, 21, 64).to(dtype)]
    with kernel_runs(*NOT_PACKED):
        found = check_block(partial(chain, spec=format_spec(forms)), x, tensors, forms, grads=grads)
    all_ok(found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_a_group_obey_the_rule(dtype: torch.dtype) -> None:
    forms = parse_spec(QKV)
    tensors = [
        t
        for form, n in zip(forms, (64, 16, 16), strict=True)
        for t in random_tensors((100, n), [form], dtype)
    ]
    x = torch.randn(21, 100).to(dtype)
    grads = [torch.randn(21, n).to(dtype) for n in (64, 16, 16)]
    with kernel_runs(*NOT_PACKED):
        found = check_block(partial(group, spec=QKV), x, tensors, forms, group=True, grads=grads)
    all_ok(found)


@pytest.mark.parametrize(
    "reduce",
    [Tensor.sum, Tensor.mean, lambda y: y[..., 0].sum(), lambda y: y.t().sum(0).max()],
    ids=["sum", "mean", "one column", "turned"],
)
def test_gradients_of_any_strides(reduce: Callable[[Tensor], Tensor]) -> None:
    """`sum` hands back a gradient with stride 0."""
    forms = parse_spec(GELU)
    tensors = tensors_for(forms)
    for x in (
        torch.randn(3, 5, dtype=torch.float64),
        torch.randn(5, 3, dtype=torch.float64).t(),
        torch.randn(6, 10, dtype=torch.float64)[::2, ::2],
        torch.randn(1, 5, dtype=torch.float64).expand(3, 5),
    ):
        x = x.detach().requires_grad_()
        inputs = [x, *tensors]
        with kernel_runs("natural"):
            y = chain(x, tensors, GELU)
        expected = torch.autograd.grad(reduce(reference_backend.chain(x, tensors, forms)), inputs)
        for got, wanted in zip(torch.autograd.grad(reduce(y), inputs), expected, strict=True):
            torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing(use_reentrant: bool) -> None:
    forms = parse_spec(GELU)
    tensors = tensors_for(forms)
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    with kernel_runs("natural", calls=2):  # once forward, once again in backward
        y = checkpoint(chain, x, tensors, GELU, use_reentrant=use_reentrant)
        y.square().sum().backward()
    expected = torch.autograd.grad(reference_backend.chain(x, tensors, forms).square().sum(), x)
    torch.testing.assert_close(x.grad, expected[0])


def test_changed_inputs_are_noticed_by_backward() -> None:
    tensors = tensors_for(parse_spec(GELU))
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    with kernel_runs("natural"):
        y = chain(x, tensors, GELU)
    with torch.no_grad():
        tensors[0].add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


# ---- transforms: the composition runs there, and is right ----


def function_and_inputs() -> tuple[Callable[..., Tensor], tuple[LayerForm, ...], list[Tensor]]:
    forms = parse_spec("gelu/b;silu/first/b;identity")
    tensors = [t.detach() for t in tensors_for(forms)]
    return partial(chain, spec=format_spec(forms)), forms, tensors


@pytest.mark.parametrize("over", ["x", "parameters", "both"])
def test_vmap(over: str) -> None:
    f, forms, tensors = function_and_inputs()
    x = (
        torch.randn(4, 3, 5, dtype=torch.float64)
        if over != "parameters"
        else torch.randn(3, 5).double()
    )
    if over != "x":
        tensors = [torch.stack([t, 2 * t, 3 * t, t / 2]) for t in tensors]
    dims = (0 if over != "parameters" else None, [0 if over != "x" else None] * len(tensors))
    y = torch.func.vmap(f, in_dims=dims)(x, tensors)
    for i in range(4):
        own = [t if over == "x" else t[i] for t in tensors]
        torch.testing.assert_close(
            y[i], reference_backend.chain(x if over == "parameters" else x[i], own, forms)
        )


def test_vmap_of_a_group() -> None:
    forms = parse_spec(QKV)
    tensors = [t.detach() for t in group_tensors(forms, 5, torch.float64)]
    x = torch.randn(4, 3, 5, dtype=torch.float64)
    ys = torch.func.vmap(lambda x: tuple(group(x, tensors, QKV)))(x)
    for y, expected in zip(ys, reference_backend.group(x, tensors, forms), strict=True):
        torch.testing.assert_close(y, expected)


def test_func_grad_and_per_sample_gradients() -> None:
    f, forms, tensors = function_and_inputs()
    x = torch.randn(4, 5, dtype=torch.float64)

    def loss(run: Callable[..., Tensor], tensors: list[Tensor], x: Tensor) -> Tensor:
        return run(x, tensors).square().sum()

    eager = partial(loss, partial(reference_backend.chain, forms=forms))
    ours = partial(loss, f)
    for got, expected in zip(
        torch.func.grad(ours)(tensors, x), torch.func.grad(eager)(tensors, x), strict=True
    ):
        torch.testing.assert_close(got, expected)
    per_sample = torch.func.vmap(torch.func.grad(ours), in_dims=(None, 0))(tensors, x)
    for i in range(4):
        for got, expected in zip(per_sample, torch.func.grad(eager)(tensors, x[i]), strict=True):
            torch.testing.assert_close(got[i], expected)


def test_jvp_jacobian_and_hessian() -> None:
    f, forms, tensors = function_and_inputs()
    eager = partial(reference_backend.chain, forms=forms)
    x, direction = (torch.randn(5, dtype=torch.float64) for _ in range(2))
    got = torch.func.jvp(lambda x: f(x, tensors), (x,), (direction,))
    expected = torch.func.jvp(lambda x: eager(x, tensors), (x,), (direction,))
    torch.testing.assert_close(got, expected)
    assert expected[1].abs().max() > 1e-3
    for transform in (torch.func.jacrev, torch.func.jacfwd):
        torch.testing.assert_close(
            transform(lambda x: f(x, tensors))(x), transform(lambda x: eager(x, tensors))(x)
        )
    torch.testing.assert_close(
        torch.func.hessian(lambda x: f(x, tensors).sum())(x),
        torch.func.hessian(lambda x: eager(x, tensors).sum())(x),
    )


@pytest.mark.parametrize("grad_mode", [False, True])
@pytest.mark.parametrize("which", ["x", "parameter"])
def test_forward_mode_differentiation(which: str, grad_mode: bool) -> None:
    """A tangent is neither dropped nor zero, whether or not gradients are on."""
    f, forms, tensors = function_and_inputs()
    x = torch.randn(3, 5, dtype=torch.float64)
    tangent = torch.randn_like(x if which == "x" else tensors[0])
    with torch.set_grad_enabled(grad_mode), forward_ad.dual_level():
        if which == "x":
            x = forward_ad.make_dual(x, tangent)
        else:
            tensors[0] = forward_ad.make_dual(tensors[0], tangent)
        got = forward_ad.unpack_dual(f(x, tensors))
        expected = forward_ad.unpack_dual(reference_backend.chain(x, tensors, forms))
    assert got.tangent is not None
    torch.testing.assert_close(got.primal, expected.primal)
    torch.testing.assert_close(got.tangent, expected.tangent)


def test_double_backward_by_hand() -> None:
    """A gradient penalty, as those who train with one write it."""
    forms = parse_spec(GELU)
    tensors = tensors_for(forms)
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    penalties = []
    for run in (partial(chain, spec=GELU), partial(reference_backend.chain, forms=forms)):
        (grad,) = torch.autograd.grad(run(x, tensors).sum(), x, create_graph=True)
        penalties.append(torch.autograd.grad(grad.square().sum(), tensors[:3]))
    for got, expected in zip(*penalties, strict=True):
        torch.testing.assert_close(got, expected)
