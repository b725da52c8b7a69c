"""Backward computes what is needed, from what was kept, and leaves that as it was."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.helpers import (
    ISAS,
    group,
    group_tensors,
    last_run,
    left_to_torch,
    random_tensors,
)
from tests.support.inside_ops import InsideOps
from tests.support.mlps import by_hand
from tests.support.training_steps import (
    KEEPING,
    backward_runs,
    chain_training,
    grads_in,
    products_needed,
    same_bits,
    saved_bytes,
)
from torch import Tensor, nn

import torchweld as tw
from torchweld.core.blocks import parse_spec

pytestmark = [
    pytest.mark.skipif(not ISAS, reason="no compiled kernels on this machine"),
    pytest.mark.usefixtures("one_thread"),
]

keeping = pytest.mark.parametrize("keep", KEEPING)
GELU = "gelu/b;identity/b"
QKV = "identity/b;identity;silu/first/b"


# ---- gradients only for what needs them ----


def ask(tensors: Sequence[Tensor], needed: Sequence[bool]) -> list[Tensor]:
    """Fresh leaves with the same values, of which some want gradients."""
    pairs = zip(tensors, needed, strict=True)
    return [t.detach().requires_grad_(need) for t, need in pairs]


@keeping
@pytest.mark.parametrize(
    "spec",
    [GELU, "silu/separate/b;identity/b", "silu/first/b;gelu", "relu/b;tanh;identity/b", "gelu/t/b"],
)
def test_every_combination_of_frozen_tensors(spec: str, keep: str) -> None:
    """As LoRA freezes: the gradients that are needed, in their own bits, and no product more."""
    forms = parse_spec(spec)
    tensors = random_tensors((13, 21, 9, 7)[: len(forms) + 1], forms)
    everything, g = [torch.randn(6, 13), *tensors], torch.randn(6, (13, 21, 9, 7)[len(forms)])
    inputs = ask(everything, [True] * len(everything))
    full = torch.autograd.grad(
        chain_training(inputs[0], inputs[1:], spec, KEEPING[keep]), inputs, g
    )
    for needed in itertools.product((False, True), repeat=len(everything)):
        inputs = ask(everything, needed)
        y = chain_training(inputs[0], inputs[1:], spec, KEEPING[keep])
        assert y.requires_grad == any(needed)
        if not any(needed):
            continue
        with backward_runs():
            y.backward(g)
        assert last_run()["products"] == products_needed(forms, needed), needed
        for t, need, expected in zip(inputs, needed, full, strict=True):
            assert (t.grad is not None) == need
            assert t.grad is None or torch.equal(t.grad, expected), needed


class Products(InsideOps):
    """Counts torch's own products."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def made(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
        self.count += func.name().split(".")[0] in ("aten::mm", "aten::addmm", "aten::linear")
        return result


@pytest.mark.parametrize("spec", [GELU, "silu/separate/b;identity/b", "silu/first/b;gelu/t"])
def test_every_combination_of_frozen_tensors_where_torch_multiplies(spec: str) -> None:
    """Of big bfloat16 calls, on CPUs that have products for them."""
    forms = parse_spec(spec)
    tensors = random_tensors((256, 512, 256), forms, torch.bfloat16)
    everything = [torch.randn(64, 256).bfloat16(), *tensors]
    if not left_to_torch(everything[0], tensors):
        pytest.skip("our own kernels multiply bfloat16 here")
    g = torch.randn(64, 256).bfloat16()
    inputs = ask(everything, [True] * len(everything))
    full = torch.autograd.grad(chain_training(inputs[0], inputs[1:], spec, False), inputs, g)
    plain = [dataclasses.replace(f, gate="none") if f.gate == "first" else f for f in forms]
    for needed in itertools.product((False, True), repeat=len(everything)):
        if not any(needed):
            continue
        inputs = ask(everything, needed)
        y = chain_training(inputs[0], inputs[1:], spec, False)
        with Products() as products, backward_runs(composed=True):
            y.backward(g)
        assert "torchweld::chain_backward" in products.ours
        # A weight that gate and up share is one product.
        assert products.count == products_needed(plain, needed), needed
        for t, need, expected in zip(inputs, needed, full, strict=True):
            assert (t.grad is not None) == need
            assert t.grad is None or torch.equal(t.grad, expected), needed


def test_every_combination_of_frozen_tensors_of_a_group() -> None:
    forms = parse_spec(QKV)
    everything = [torch.randn(6, 13), *group_tensors(forms, 13, torch.float32)]
    gs = [torch.randn(6, 3 + i) for i in range(3)]
    inputs = ask(everything, [True] * len(everything))
    full = torch.autograd.grad(group(inputs[0], inputs[1:], QKV), inputs, gs)
    for needed in itertools.product((False, True), repeat=len(everything)):
        if not any(needed):
            continue
        inputs = ask(everything, needed)
        with backward_runs():
            torch.autograd.backward(group(inputs[0], inputs[1:], QKV), gs)
        assert last_run()["products"] == products_needed(forms, needed, group=True), needed
        for t, need, expected in zip(inputs, needed, full, strict=True):
            assert (t.grad is not None) == need
            assert t.grad is None or torch.equal(t.grad, expected), needed


@pytest.mark.parametrize("save", [True, False])
@pytest.mark.parametrize("needed", [[True, False, True, False, False], [False] * 4 + [True]])
def test_the_op_returns_the_needed_gradients_alone(needed: list[bool], save: bool) -> None:
    tensors, x = random_tensors((13, 21, 7), parse_spec(GELU)), torch.randn(6, 13)
    ops, g = torch.ops.torchweld, torch.randn(6, 7)
    y, *saved = ops.chain_saving(x, tensors, [], GELU, save)
    assert torch.equal(y, ops.chain(x, tensors, GELU))
    assert [t.dtype for t in saved] == [torch.float32 if save else torch.int64]  # or a checksum
    full = ops.chain_backward(g, x, tensors, saved, [], GELU, [True] * 5)
    found = ops.chain_backward(g, x, tensors, saved, [], GELU, needed)
    assert len(full) == 5
    same_bits(found, [grad for grad, need in zip(full, needed, strict=True) if need])


@keeping
def test_adapters_around_a_frozen_block(keep: str) -> None:
    """Only the path down to the trained adapter is computed: one product per weight."""
    block = tw.FusedMLP((13, 21, 13), "silu", gated=True, recompute=KEEPING[keep])
    block.requires_grad_(False)
    adapter = nn.Linear(13, 13)
    x = torch.randn(6, 13)
    with backward_runs():
        (x + block(adapter(x))).square().sum().backward()
    assert last_run()["products"] == 3
    assert grads_in(block) == [None] * 6
    assert all(grad is not None for grad in grads_in(adapter))


def test_nothing_is_kept_where_nothing_is_needed() -> None:
    mlp = tw.FusedMLP((13, 21, 7)).requires_grad_(False)
    y = mlp(torch.randn(6, 13))
    assert not y.requires_grad
    with torch.no_grad():
        assert not mlp.requires_grad_()(torch.randn(6, 13)).requires_grad


# ---- how much is kept ----


def plain_gelu(x: Tensor, tensors: list[Tensor]) -> Tensor:
    return F.linear(F.gelu(F.linear(x, *tensors[:2])), *tensors[2:])


def plain_gated(x: Tensor, tensors: list[Tensor]) -> Tensor:
    return F.linear(F.silu(F.linear(x, tensors[0])) * F.linear(x, tensors[1]), tensors[2])


@pytest.mark.parametrize(
    ("mlp", "plain", "save_limit"),
    [
        (lambda **how: tw.FusedMLP((768, 3072, 768), **how), plain_gelu, 0.57),
        (
            lambda **how: tw.FusedMLP((1024, 2816, 1024), "silu", gated=True, bias=False, **how),
            plain_gated,
            0.55,
        ),
    ],
    ids=["768→3072 gelu", "1024→2816 gated silu"],
)
def test_saved_bytes(
    mlp: Callable[..., tw.FusedMLP],
    plain: Callable[[Tensor, list[Tensor]], Tensor],
    save_limit: float,
) -> None:
    """The rows cancel out of the ratio."""
    save, recompute = mlp(recompute=False), mlp(recompute=True)
    x = torch.randn(4, save.up.in_features, requires_grad=True)
    tensors: list[Tensor] = list(save.parameters())
    eager = saved_bytes(lambda: plain(x, tensors), save)
    assert eager >= 4 * 4 * (x.shape[1] + 2 * save.up.out_features)
    assert saved_bytes(lambda: save(x), save) <= save_limit * eager
    assert saved_bytes(lambda: recompute(x), recompute) <= 0.12 * eager


@keeping
def test_saved_bytes_of_a_dropped_value_are_a_bit(keep: str) -> None:
    def kept(dropout: float) -> int:
        mlp = tw.FusedMLP((64, 256, 64), dropout=dropout, recompute=KEEPING[keep])
        return saved_bytes(lambda: mlp(x), mlp)

    x = torch.randn(4, 64, requires_grad=True)
    assert 0 <= kept(0.1) - kept(0.0) <= 4 * 256 // 8


# ---- what is kept stays as it is ----

SHAPES: dict[str, Callable[[bool], tw.FusedMLP]] = {
    "two": lambda r: tw.FusedMLP((13, 21, 13), recompute=r),
    "gated": lambda r: tw.FusedMLP((13, 21, 13), "silu", gated=True, bias=False, recompute=r),
    "deep": lambda r: tw.FusedMLP((13, 20, 20, 13), "tanh", output_activation="gelu", recompute=r),
    "dropout": lambda r: tw.FusedMLP((13, 21, 13), dropout=0.3, recompute=r),
}
shapes = pytest.mark.parametrize("shape", SHAPES)


@shapes
@keeping
def test_saved_tensors_and_inputs_are_not_written_to(shape: str, keep: str) -> None:
    mlp = SHAPES[shape](KEEPING[keep])
    kept: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        kept.append(t)
        return t

    x, g = torch.randn(6, 13, requires_grad=True), torch.randn(6, 13)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = mlp(x)
    watched = [*kept, x, y, g, *mlp.parameters()]
    before = [(t.detach().clone(), t._version) for t in watched]
    with backward_runs():
        y.backward(g)
    for t, (value, version) in zip(watched, before, strict=True):
        assert torch.equal(t.detach(), value)
        assert t._version == version


@shapes
@keeping
def test_two_backwards_through_one_graph(shape: str, keep: str) -> None:
    mlp = SHAPES[shape](KEEPING[keep])
    x, g = torch.randn(40, 13, requires_grad=True), torch.randn(40, 13)
    y, inputs = mlp(x), [x, *mlp.parameters()]
    first = [t.clone() for t in torch.autograd.grad(y, inputs, g, retain_graph=True)]
    torch.autograd.grad(y, inputs, 3 * g, retain_graph=True)
    with backward_runs():
        same_bits(torch.autograd.grad(y, inputs, g), first)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(y, inputs, g)


@keeping
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_backwards_in_any_order(order: Sequence[int], keep: str) -> None:
    """Three calls of one block, then their backwards; each as if it were alone."""
    mlp = SHAPES["two"](KEEPING[keep])
    xs = [torch.randn(rows, 13, requires_grad=True) for rows in (6, 40, 6)]
    gs = [torch.randn_like(x) for x in xs]
    alone = [torch.autograd.grad(mlp(x), [x, *mlp.parameters()], g) for x, g in zip(xs, gs)]  # noqa: B905
    ys = [mlp(x) for x in xs]
    for i in order:
        with backward_runs():
            found = torch.autograd.grad(ys[i], [xs[i], *mlp.parameters()], gs[i])
        same_bits(found, alone[i])


@shapes
@keeping
def test_a_block_used_twice_in_one_graph(shape: str, keep: str) -> None:
    """One after the other and side by side; the gradients of both uses are added up."""
    mlp = SHAPES[shape](KEEPING[keep]).double()
    x = torch.randn(6, 13, dtype=torch.float64, requires_grad=True)
    inputs = [x, *mlp.parameters()]
    torch.manual_seed(3)
    loss = mlp(mlp(x)).square().sum() + mlp(x.flip(0)).sum()
    with backward_runs(calls=3):
        found = torch.autograd.grad(loss, inputs)
    torch.manual_seed(3)
    loss = by_hand(mlp, by_hand(mlp, x)).square().sum() + by_hand(mlp, x.flip(0)).sum()
    for got, expected in zip(found, torch.autograd.grad(loss, inputs), strict=True):
        torch.testing.assert_close(got, expected)


def test_gradients_are_memory_of_their_own() -> None:
    """A gradient that lives on is not written to by the next backward, nor by another one's."""
    mlp = SHAPES["two"](False)
    x, g = torch.randn(6, 13), torch.randn(6, 13)
    parameters = list(mlp.parameters())
    first = torch.autograd.grad(mlp(x), parameters, g)
    copies = [t.clone() for t in first]
    second = torch.autograd.grad(mlp(x), parameters, 2 * g)
    same_bits(first, copies)
    ends = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in (*first, *second))
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ends))
    views = [t[:1] for t in torch.autograd.grad(mlp(x), parameters, g)]  # outlive their tensors
    values = [t.clone() for t in views]
    torch.autograd.grad(mlp(x), parameters, 5 * g)
    same_bits(views, values)
