"""Dropout inside the block: eager's own mask, seed by seed, in forward, backward and replays.

On the CPU the mask is that of `F.dropout`, bit for bit, and the generator ends where it would.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.helpers import DTYPES, ISAS, random_tensors
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
from torch.utils.checkpoint import checkpoint

import torchweld as tw
from torchweld.core.blocks import parse_spec
from torchweld.ops.backends import reference_backend

pytestmark = [
    pytest.mark.skipif(not ISAS, reason="no compiled kernels on this machine"),
    pytest.mark.usefixtures("one_thread"),
]

keeping = pytest.mark.parametrize("keep", KEEPING)
SHAPES: dict[str, dict[str, Any]] = {
    "two": {"sizes": (13, 21, 7)},
    "gated": {"sizes": (13, 21, 7), "activation": "silu", "gated": True, "bias": False},
    "deep": {"sizes": (13, 21, 8, 9, 7), "activation": "tanh"},
    "relu": {"sizes": (13, 21, 7), "activation": "relu"},
}
shapes = pytest.mark.parametrize("shape", ["two", "gated", "deep"])


def mlp_of(shape: str, keep: str = "save", dropout: float = 0.4, **how: Any) -> tw.FusedMLP:
    return tw.FusedMLP(**SHAPES[shape], dropout=dropout, recompute=KEEPING[keep], **how)


# ---- the mask ----


def bits_of(mask: Tensor, features: int) -> Tensor:
    bits = mask[..., None] >> torch.arange(8, dtype=torch.uint8) & 1
    return bits.flatten(-2)[..., :features].bool()


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("shape", [(1,), (9,), (5, 16), (3, 7, 21), (130, 385)], ids=str)
def test_the_mask_is_eagers(shape: tuple[int, ...], p: float) -> None:
    torch.manual_seed(3)
    expected = F.dropout(torch.ones(shape), p) > 0
    state = torch.get_rng_state()
    torch.manual_seed(3)
    like = torch.empty(*shape[:-1], 4)
    mask = torch.ops.torchweld.dropout_mask(like, shape[-1], p)
    assert mask.dtype == torch.uint8
    assert mask.shape == (*shape[:-1], (shape[-1] + 7) // 8)
    assert torch.equal(bits_of(mask, shape[-1]), expected)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("threads", [1, 2])
def test_the_mask_does_not_depend_on_threads(threads: int) -> None:
    torch.set_num_threads(threads)
    torch.manual_seed(3)
    mask = torch.ops.torchweld.dropout_mask(torch.empty(200, 4), 512, 0.5)
    torch.set_num_threads(1)
    torch.manual_seed(3)
    assert torch.equal(bits_of(mask, 512), F.dropout(torch.ones(200, 512), 0.5) > 0)


@keeping
def test_zeros_of_the_output_are_eagers(keep: str) -> None:
    """A layer without activation and dropout on its own output: what is dropped can be seen."""
    (w,) = random_tensors((13, 21), parse_spec("identity"))
    x = torch.randn(40, 13)
    torch.manual_seed(3)
    expected = F.dropout(F.linear(x, w), 0.3)
    torch.manual_seed(3)
    y = chain_training(x.requires_grad_(), [w], "identity/drop:0.3", KEEPING[keep])
    assert torch.equal(y == 0, expected == 0)
    torch.testing.assert_close(y, expected)
    y.sum().backward()
    factors = (expected != 0).float() / 0.7
    torch.testing.assert_close(x.grad, factors @ w)


# ---- outputs and gradients ----


@keeping
@shapes
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_outputs_and_gradients_are_eagers(shape: str, dtype: torch.dtype, keep: str) -> None:
    """In 16 bits nothing inside is rounded, so it is compared with eager in float32."""
    mlp = mlp_of(shape, keep, dtype=dtype)
    x = torch.randn(2, 17, 13).to(dtype)
    wide = torch.float32 if dtype.itemsize == 2 else dtype
    exact = copy.deepcopy(mlp).to(wide)
    results, states = [], []
    for run, module in ((mlp, mlp), (partial(by_hand, exact), exact)):
        own = x.clone().to(wide if module is exact else dtype).requires_grad_()
        torch.manual_seed(7)
        y = run(own)
        states.append(torch.get_rng_state())
        torch.manual_seed(8)
        y.backward(torch.randn(y.shape).to(y.dtype))
        results.append([y.detach(), own.grad, *grads_in(module)])
    assert torch.equal(*states), "the generator is elsewhere"
    for got, right in zip(*results, strict=True):
        assert got is not None
        assert right is not None
        error, size = ((t.double().square().mean()).sqrt() for t in (got.to(wide) - right, right))
        assert error <= 8 * torch.finfo(dtype).eps * size


@keeping
def test_layers_of_different_rates(keep: str) -> None:
    """By the op, whose spec names a rate for each layer, the last one's too."""
    spec = "gelu/b/drop:0.2;silu/separate/drop:0.6;identity/b;tanh/b/drop:0.05"
    forms = parse_spec("gelu/b;silu/separate;identity/b;tanh/b")
    tensors = [t.requires_grad_() for t in random_tensors((13, 21, 11, 8, 7), forms)]
    x = torch.randn(9, 13, requires_grad=True)
    torch.manual_seed(5)
    y = chain_training(x, tensors, spec, KEEPING[keep])
    torch.manual_seed(5)
    h = F.dropout(reference_backend.chain(x, tensors[:2], forms[:1]), 0.2)
    h = F.dropout(reference_backend.chain(h, tensors[2:4], forms[1:2]), 0.6)
    h = F.dropout(reference_backend.chain(h, tensors[4:], forms[2:]), 0.05)
    torch.testing.assert_close(y, h)
    inputs = [x, *tensors]
    with backward_runs():
        found = torch.autograd.grad(y.square().sum(), inputs)
    all_close(found, torch.autograd.grad(h.square().sum(), inputs))


@keeping
@pytest.mark.parametrize("rows", [129, 600])
def test_rows_of_several_blocks_have_their_own_bits(rows: int, keep: str) -> None:
    """Neither rows nor columns come out even: 21 columns have bits to spare in their last byte."""
    mlp, x = mlp_of("gated", keep), torch.randn(rows, 13, requires_grad=True)
    inputs, g = [x, *mlp.parameters()], torch.randn(rows, 7)
    torch.set_num_threads(2)
    torch.manual_seed(7)
    with backward_runs():
        found = torch.autograd.grad(mlp(x), inputs, g)
    torch.manual_seed(7)
    all_close(found, torch.autograd.grad(by_hand(mlp, x), inputs, g), rtol=1e-4, atol=1e-4)


@keeping
@shapes
def test_gradients_of_gradients_use_the_same_mask(shape: str, keep: str) -> None:
    mlp = mlp_of(shape, keep, dtype=torch.float64)
    x = torch.randn(5, 13, dtype=torch.float64, requires_grad=True)
    found = []
    for run in (mlp, partial(by_hand, mlp)):
        torch.manual_seed(7)
        (grad,) = torch.autograd.grad(run(x).square().sum(), x, create_graph=True)
        found.append(torch.autograd.grad(grad.square().sum(), list(mlp.parameters())))
    all_close(*found)


@keeping
def test_two_backwards_use_the_same_mask(keep: str) -> None:
    mlp, x = mlp_of("two", keep), torch.randn(9, 13, requires_grad=True)
    y = mlp(x)
    inputs, g = [x, *mlp.parameters()], torch.randn(9, 7)
    first = torch.autograd.grad(y, inputs, g, retain_graph=True)
    torch.manual_seed(99)
    state = torch.get_rng_state()
    same_bits(torch.autograd.grad(y, inputs, g), first)
    assert torch.equal(torch.get_rng_state(), state), "backward draws nothing"


# ---- when it acts ----


def dropping(mlp: tw.FusedMLP, x: Tensor) -> bool:
    torch.manual_seed(1)
    first = mlp(x)
    torch.manual_seed(2)
    return not torch.equal(first, mlp(x))


@shapes
def test_training_mode_decides(shape: str) -> None:
    mlp, x = mlp_of(shape), torch.randn(9, 13)
    assert dropping(mlp, x)
    with torch.no_grad():
        assert dropping(mlp, x)
        torch.manual_seed(4)
        y = mlp(x)
        torch.manual_seed(4)
        torch.testing.assert_close(y, by_hand(mlp, x))
    mlp.eval()
    assert not dropping(mlp, x)
    with torch.no_grad():
        state = torch.get_rng_state()
        torch.testing.assert_close(mlp(x), by_hand(mlp, x))
        assert torch.equal(torch.get_rng_state(), state), "eval draws nothing"
    mlp.train().dropout = 0.0
    assert not dropping(mlp, x)
    mlp.dropout = 0.9
    assert dropping(mlp, x)


def test_the_ops_of_inference_refuse_dropout() -> None:
    (w,) = random_tensors((13, 21), parse_spec("identity"))
    ops, spec = torch.ops.torchweld, "identity/drop:0.3"
    for refused in (
        lambda: ops.chain(torch.randn(2, 13), [w], spec),
        lambda: ops.chain(torch.randn(2, 13).requires_grad_(), [w], spec),
        lambda: ops.group(torch.randn(2, 13), [w], spec),
        lambda: ops.pack([w], spec),
    ):
        with pytest.raises((ValueError, RuntimeError), match="drop"):
            refused()


@pytest.mark.parametrize("rate", ["0", "1", "1.5", "-0.1", "nan", "", "half"])
def test_rates_that_are_none_are_named(rate: str) -> None:
    (w,) = random_tensors((13, 21), parse_spec("identity"))
    with pytest.raises((ValueError, RuntimeError), match="drop"):
        chain_training(torch.randn(2, 13), [w], f"identity/drop:{rate}")


# ---- replays ----


@keeping
@shapes
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_replays_the_mask(use_reentrant: bool, shape: str, keep: str) -> None:
    mlp, x = mlp_of(shape, keep), torch.randn(9, 13, requires_grad=True)
    inputs = [x, *mlp.parameters()]
    torch.manual_seed(6)
    y = mlp(x)
    expected = torch.autograd.grad(y.sum(), inputs)
    torch.manual_seed(6)
    again = checkpoint(mlp, x, use_reentrant=use_reentrant)
    torch.testing.assert_close(again, y)
    torch.manual_seed(1234)  # the replay must not see this
    again.sum().backward()
    same_bits([t.grad for t in inputs], expected)


def test_func_grad_draws_eagers_mask() -> None:
    mlp, x = mlp_of("two", dtype=torch.float64), torch.randn(9, 13).double()
    found = []
    for run in (mlp, partial(by_hand, mlp)):
        torch.manual_seed(6)
        found.append(torch.func.grad(lambda x, run=run: run(x).square().sum())(x))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("randomness", ["same", "different"])
def test_vmap_drops_as_it_is_told(randomness: str) -> None:
    mlp, x = mlp_of("two"), torch.randn(1, 9, 13).expand(3, 9, 13)
    ys = torch.func.vmap(mlp, randomness=randomness)(x)
    assert torch.allclose(ys[0], ys[1], atol=1e-5) == (randomness == "same")


# ---- torch.compile ----


def check_compiled(compile_it: Callable[[nn.Module], Any], mlp: tw.FusedMLP) -> None:
    """Drops, by a seed, the same in forward and backward; the random numbers may be its own."""
    run, x = compile_it(mlp), torch.randn(33, 13)
    results = []
    for seed in (1, 2, 1):
        mlp.zero_grad()
        torch.manual_seed(seed)
        y = run(x)
        with backward_runs():
            y.sum().backward()
        results.append([y.detach(), *(p.grad for p in mlp.parameters())])
    first, other, again = results
    same_bits(again, first)
    assert not torch.equal(other[0], first[0])
    # Twice the values of a layer are twice the sum of y, but for down's bias: by Euler's theorem
    # weights times gradients give that sum back, if forward and backward dropped the same.
    right = (y - mlp.down.bias).sum().detach()
    for tensors in (mlp.up.parameters(), [mlp.down.weight]):
        found = sum((t * t.grad).sum().detach() for t in tensors if t.grad is not None)
        torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("own_compilations")
@keeping
def test_compiled_dropout_trains_by_a_seed(keep: str) -> None:
    mlp = mlp_of("relu", keep)
    check_compiled(lambda mlp: torch.compile(mlp, fullgraph=True, backend="aot_eager"), mlp)


@pytest.mark.usefixtures("own_compilations")
@pytest.mark.slow
@keeping
def test_dropout_by_inductor_trains_by_a_seed(keep: str) -> None:
    check_compiled(lambda mlp: torch.compile(mlp, fullgraph=True), mlp_of("relu", keep))
