"""What the ops of a GPU's ways refuse, and what they do with float64.

In Triton's interpreter, on CPU tensors; with `make gpu-test` on a GPU. No kernel may see what does
not fit: it would read and write memory that is not its own.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.support.gpu_device import on_real_gpu
from tests.support.helpers import all_within, random_tensors
from torch import Tensor

from torchweld.core.blocks import parse_spec
from torchweld.numerics.numerical_rule import check_block
from torchweld.ops.gpu.gpu_launches import launched
from torchweld.ops.gpu.gpu_ways import WAYS

pytestmark = pytest.mark.usefixtures("gpu")
SPEC = "gelu/b;identity/b"
SIZES = (7, 9, 5)
OPS = ("chain", "chain_training", *WAYS)


def given() -> tuple[Tensor, list[Tensor]]:
    return torch.randn(4, 7), random_tensors(SIZES, parse_spec(SPEC))


def call(op: str, x: Tensor, tensors: list[Tensor], spec: str = SPEC) -> Tensor:
    ops = torch.ops.torchweld
    y: Tensor = (
        ops.chain_way(x, tensors, spec, op) if op in WAYS else getattr(ops, op)(x, tensors, spec)
    )
    return y


def refused(message: str, op: str, x: Tensor, tensors: list[Tensor], spec: str = SPEC) -> None:
    """With and without gradients; nothing is launched."""
    for wants in (False, True):
        leaf = x.detach().requires_grad_(wants and x.is_floating_point())
        with pytest.raises(ValueError, match=message):
            call(op, leaf, tensors, spec)
    assert launched() == []


@pytest.mark.usefixtures("default_way")
@pytest.mark.parametrize("op", OPS)
def test_what_does_not_fit_is_named(op: str) -> None:
    x, (w1, b1, w2, b2) = given()
    for tensors, message in (
        ([w1, b1, w2], "the spec asks for 4 tensors, 3 were given"),
        ([w1[:, :6], b1, w2, b2], "layer 0's weight takes 6 features, but x has 7"),
        ([w1, b1, w2[:, :8], b2], "layer 1's weight takes 8 features, but the layer before it"),
        ([w1, b1[:8], w2, b2], r"layer 0's bias has shape \[8\]; expected \[9\]"),
        ([w1[None], b1, w2, b2], "layer 0's weight has shape"),
        ([w1, b1, w2.half(), b2], "x is float32 but layer 1's weight is float16"),
        ([w1, b1, w2, b2.double()], "x is float32 but layer 1's bias is float64"),
        ([w1.to("meta"), b1, w2, b2], "layer 0's weight is on meta"),
    ):
        refused(message, op, x, tensors)
    refused("x is a scalar", op, x[0, 0], [w1, b1, w2, b2])
    refused("x has 5", op, x[:, :5], [w1, b1, w2, b2])
    refused("unknown activation", op, x, [w1, b1, w2, b2], "swish/b;identity/b")
    refused("gate and up need an even number", op, x, [w1, b1, w2, b2], "silu/first/b;identity/b")
    refused("x is int64; allowed are", op, x.long(), [t.long() for t in (w1, b1, w2, b2)])


@pytest.mark.usefixtures("default_way")
@pytest.mark.parametrize("wants", [False, True])
def test_dropout_in_a_spec_for_inference_is_refused(wants: bool) -> None:
    """It has no masks there."""
    x, tensors = given()
    for spec in ("gelu/b/drop:0.5;identity/b", "gelu/b;identity/b/drop:0.1"):
        with pytest.raises(ValueError, match="has dropout, which torchweld::chain_training alone"):
            torch.ops.torchweld.chain(x.requires_grad_(wants), tensors, spec)
    assert launched() == []


@pytest.mark.parametrize("way", WAYS)
def test_masks_that_do_not_fit_are_refused(way: str) -> None:
    x, tensors = given()
    saving = getattr(torch.ops.torchweld, f"{way}_saving")
    spec = "gelu/b/drop:0.5;identity/b"
    good = torch.ones(4, 2, dtype=torch.uint8)
    with pytest.raises(ValueError, match="has 1 layers with dropout, 0 masks were given"):
        saving(x, tensors, [], spec, True)
    for mask in (good[:, :1], good[:3], good.int(), good.to("meta")):
        with pytest.raises(ValueError, match=r"the mask of layer 0 is .*; expected \[4, 2\]"):
            saving(x, tensors, [mask], spec, True)
    with pytest.raises(ValueError, match="has 0 layers with dropout, 1 masks were given"):
        saving(x, tensors, [good], SPEC, True)
    assert launched() == []


@pytest.mark.parametrize("way", WAYS)
def test_what_a_backward_is_given_is_checked(way: str) -> None:
    x, tensors = given()
    right: dict[str, Any] = {
        "grad": torch.randn(4, 5), "x": x, "params": tensors, "saved": [torch.randn(4, 9)],
        "masks": [], "spec": SPEC, "needed": [True] * 5,
    }  # fmt: skip
    backward = getattr(torch.ops.torchweld, f"{way}_backward")
    for wrong, message in (
        ({"grad": torch.randn(4, 4)}, "the gradient of an output is [4, 4]"),
        ({"grad": torch.randn(3, 5)}, "the gradient of an output is [3, 5]"),
        ({"grad": torch.randn(4, 5).half()}, "of float16 on"),
        ({"saved": [torch.randn(4, 9)] * 2}, "the forward saves 1 tensors for this spec, 2 were"),
        ({"saved": [torch.randn(4, 8)]}, "a saved pre-activation is [4, 8]"),
        ({"saved": [torch.randn(4, 9).half()]}, "a saved pre-activation is [4, 9] of float16"),
        ({"needed": [True] * 4}, "needed has 4 flags; expected one for x and one for each of 4"),
        ({"params": tensors[:3]}, "the spec asks for 4 tensors, 3 were given"),
        ({"spec": "gelu/b/drop:0.5;identity/b"}, "0 masks were given"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            backward(**right | wrong)
    assert launched() == []
    assert len(backward(**right)) == 5


@pytest.mark.parametrize("way", WAYS)
def test_a_way_refuses_float64(way: str) -> None:
    """Its kernels add up in float32, so the result would have half the digits."""
    x, tensors = given()
    refused(
        f"x is float64; the way {way} computes in float32, bfloat16 and float16", way, x.double(),
        [t.double() for t in tensors],
    )  # fmt: skip


@pytest.mark.usefixtures("default_way")
@pytest.mark.parametrize("op", ["chain", "chain_training"])
def test_without_a_plan_float64_has_all_its_digits(op: str) -> None:
    """torch computes it, forward and backward, with and without what was saved."""
    x, tensors = given()
    forms = parse_spec(SPEC)
    run = getattr(torch.ops.torchweld, op)
    for wish in ({}, {"recompute": True}) if op == "chain_training" else ({},):

        def candidate(x: Tensor, tensors: Sequence[Tensor], wish: Any = wish) -> Tensor:
            y: Tensor = run(x, list(tensors), SPEC, **wish)
            return y

        doubles = [t.double() for t in tensors]
        grad = torch.randn(4, 5).double()
        all_within(check_block(candidate, x.double(), doubles, forms, grads=[grad]))
    with torch.no_grad():
        found = run(x.double(), [t.double() for t in tensors], SPEC)
    w1, b1, w2, b2 = (t.double() for t in tensors)
    wanted = torch.nn.functional.gelu(x.double() @ w1.t() + b1) @ w2.t() + b2
    torch.testing.assert_close(found, wanted, rtol=1e-13, atol=1e-13)
    assert launched() == []


@pytest.mark.usefixtures("default_way")
def test_dropout_in_float64_is_its_masks() -> None:
    x, tensors = given()
    leaves = [t.double().requires_grad_() for t in (x, *tensors)]
    torch.manual_seed(3)
    y = torch.ops.torchweld.chain_training(leaves[0], leaves[1:], "gelu/b/drop:0.5;identity/b")
    torch.manual_seed(3)
    mask = torch.ops.torchweld.dropout_mask(leaves[0], 9, 0.5)
    kept = ((mask[..., None].int() >> torch.arange(8)) & 1).flatten(-2)[..., :9]
    w1, b1, w2, b2 = leaves[1:]
    wanted = (torch.nn.functional.gelu(leaves[0] @ w1.t() + b1) * kept / 0.5) @ w2.t() + b2
    torch.testing.assert_close(y, wanted)
    for ours, eager in zip(
        torch.autograd.grad(y.sum(), leaves), torch.autograd.grad(wanted.sum(), leaves), strict=True
    ):
        torch.testing.assert_close(ours, eager)


@pytest.mark.usefixtures("default_way")
@pytest.mark.parametrize(("features", "p"), [(0, 0.5), (9, 0.0), (9, 1.0), (9, float("nan"))])
def test_a_mask_that_cannot_be_drawn_is_refused(features: int, p: float) -> None:
    x, _ = given()
    with pytest.raises(ValueError, match="dropout_mask takes a tensor with a dimension"):
        torch.ops.torchweld.dropout_mask(x, features, p)
    with pytest.raises(ValueError, match="dropout_mask takes a tensor with a dimension"):
        torch.ops.torchweld.dropout_mask(x[0, 0], 9, 0.5)


@pytest.mark.skipif(not on_real_gpu(), reason="it needs a GPU; run make gpu-test")
@pytest.mark.parametrize("way", WAYS)
def test_tensors_of_the_cpu_are_refused_beside_a_gpus(way: str) -> None:
    x, tensors = given()
    refused("layer 1's weight is on cpu", way, x, [*tensors[:2], tensors[2].cpu(), tensors[3]])
