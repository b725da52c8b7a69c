"""Dropout in the ways of a GPU, through the op and its autograd.

In Triton's interpreter, on CPU tensors; with `make gpu-test` on a GPU.
"""

from __future__ import annotations

import pytest
import torch
from tests.support.helpers import random_tensors
from torch import Tensor

from torchweld.core.activations import ACTIVATIONS
from torchweld.core.blocks import LayerForm, parse_spec
from torchweld.ops.gpu.gpu_launches import forget, launched
from torchweld.ops.gpu.kernel_tiles import Tile
from torchweld.ops.gpu.tile_tuning import forcing

pytestmark = pytest.mark.usefixtures("gpu")
WAYS = ("pointwise", "epilogue")  # `narrow` applies none
SMALL = Tile(rows=16, columns=16, depth=16)
SPECS = (
    "gelu/b/drop:0.4;silu/b/separate/drop:0.25;identity/b/drop:0.5",
    "silu/first/drop:0.3;identity/drop:0.2",
    "tanh/t/interleaved/b/drop:0.5;identity/b/t",
    "identity/b/drop:0.5",
)


def factors(mask: Tensor, features: int, p: float) -> Tensor:
    bits = (mask.unsqueeze(-1).int() >> torch.arange(8)) & 1
    return bits.flatten(-2)[..., :features] / (1 - p)


def by_hand(x: Tensor, tensors: list[Tensor], forms: tuple[LayerForm, ...], seed: int) -> Tensor:
    """Eager, with the masks that the op of the device draws from this seed."""
    left = iter(tensors)
    torch.manual_seed(seed)
    drawn = []
    widths = output_widths(tensors, forms)
    for form, width in zip(forms, widths, strict=True):
        if form.dropout:
            drawn.append(torch.ops.torchweld.dropout_mask(x, width, form.dropout))
    masks = iter(drawn)
    for form, width in zip(forms, widths, strict=True):
        made = []
        for _ in range(form.weights):
            weight = next(left)
            product = x @ (weight if form.transposed else weight.t())
            made.append(product + next(left) if form.bias else product)
        act = ACTIVATIONS[form.activation]
        if form.gate == "separate":
            gate, up = made
        elif form.gate == "interleaved":
            gate, up = made[0][..., ::2], made[0][..., 1::2]
        elif form.gate == "first":
            gate, up = made[0].chunk(2, -1)
        else:
            gate, up = made[0], torch.ones(())
        x = act.apply(gate, *act.defaults) * up
        if form.dropout:
            x = x * factors(next(masks), width, form.dropout)
    return x


def output_widths(tensors: list[Tensor], forms: tuple[LayerForm, ...]) -> list[int]:
    found, at = [], 0
    for form in forms:
        rows = tensors[at].shape[1 if form.transposed else 0]
        found.append(rows if form.gate in ("none", "separate") else rows // 2)
        at += form.tensors
    return found


def given(spec: str, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    forms = parse_spec(spec)
    tensors = random_tensors((9, 21, 18, 5)[: len(forms) + 1], forms, dtype)
    return [t.requires_grad_() for t in (torch.randn(2, 17, 9).to(dtype), *tensors)]


def check(way: str, spec: str, wish: bool | None) -> None:
    leaves = given(spec)
    ops = torch.ops.torchweld
    torch.manual_seed(3)
    with forcing(SMALL):
        y = (
            ops.chain_training(leaves[0], leaves[1:], spec, wish)
            if way == "chain"
            else ops.chain_way(leaves[0], leaves[1:], spec, way, wish)
        )
        wanted = by_hand(leaves[0], leaves[1:], parse_spec(spec), 3)
        torch.testing.assert_close(y, wanted)
        grad = torch.randn(y.shape)
        found = torch.autograd.grad(y, leaves, grad)
    for ours, eager in zip(found, torch.autograd.grad(wanted, leaves, grad), strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_a_step_drops_what_the_masks_say(way: str, recompute: bool, spec: str) -> None:
    """Output and gradients are eager's with these masks, kept for the backward."""
    check(way, spec, recompute)
    assert {"pointwise": "torchweld_pointwise", "epilogue": "torchweld_linear"}[way] in launched()


@pytest.mark.usefixtures("default_way")
@pytest.mark.parametrize("spec", SPECS)
def test_so_does_training_without_a_plan(spec: str) -> None:
    """There the masks are Triton's too."""
    check("chain", spec, None)
    assert {"torchweld_dropout_mask", "torchweld_pointwise"} <= set(launched())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_what_is_kept_is_scaled_and_the_rest_is_zero(way: str, dtype: torch.dtype) -> None:
    spec = "gelu/b/drop:0.5"
    x, *tensors = (t.detach() for t in given(spec, dtype))
    torch.manual_seed(3)
    with forcing(SMALL):
        y = torch.ops.torchweld.chain_way(x, tensors, spec, way)
        whole = torch.ops.torchweld.chain_way(x, tensors, "gelu/b", way)
    torch.manual_seed(3)
    mask = torch.ops.torchweld.dropout_mask(x, 21, 0.5)
    kept = factors(mask, 21, 0.5).bool()
    assert not y[~kept].any()
    torch.testing.assert_close(y[kept], 2 * whole[kept])
    assert 0.3 < kept.double().mean() < 0.7


@pytest.mark.parametrize("way", WAYS)
def test_two_steps_drop_other_values(way: str) -> None:
    spec = "identity/b/drop:0.5"
    x, *tensors = given(spec)
    with forcing(SMALL):
        first = torch.ops.torchweld.chain_way(x, tensors, spec, way)
        second = torch.ops.torchweld.chain_way(x, tensors, spec, way)
    assert not torch.equal(first, second)


def test_the_narrow_way_says_that_it_applies_none() -> None:
    spec = SPECS[0]
    x, *tensors = given(spec)
    forget()
    with pytest.raises(ValueError, match="the way narrow applies no dropout"):
        torch.ops.torchweld.chain_way(x, tensors, spec, "narrow")
    assert launched() == []
