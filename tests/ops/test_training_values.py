"""Derivatives where formulas break: at kinks, far out, at infinity and NaN, among the tiniest.

A layer of one weight, which is 1, has its activation's derivative as the gradient of its input.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tests.support.helpers import ACTIVATION_TEXTS, DTYPES, ISAS, using_isa
from tests.support.training_steps import KEEPING, backward_runs, chain_training
from torch import Tensor

from torchweld.core.blocks import parse_spec
from torchweld.ops.backends import reference_backend

pytestmark = [
    pytest.mark.skipif(not ISAS, reason="no compiled kernels on this machine"),
    pytest.mark.usefixtures("one_thread"),
]

SIZES = [0.0, 1e-40, 1e-7, 1e-3, 0.3, 1.0, 2.5, 3.0, 5.0, 6.0, 9.0, 17.0, 20.0, 40.0, 88.0, 89.0]
SIZES += [104.0, 300.0, 700.0, 6e4, 1e19, 1e30, 3e38, float("inf")]
VALUES = torch.tensor([*SIZES, *(-size for size in SIZES), float("nan")], dtype=torch.float64)


def kinds(t: Tensor) -> Tensor:
    """0 finite, 1 Inf, -1 -Inf, 2 NaN."""
    return torch.where(t.isnan(), 2, t.isposinf().int() - t.isneginf().int())


def same_values(got: Tensor, eager: Tensor, reference: Tensor) -> None:
    """As far from the reference as eager, or closer; NaN and Inf where eager or it has them, and of
    NaN (eager's elu has a slope of 1 there)."""
    slack = (16 if got.dtype == torch.float64 else 4) * torch.finfo(got.dtype).eps
    got, eager = got.double(), eager.double()
    odd = ~reference.isfinite() | ~got.isfinite() | ~eager.isfinite()
    wrong = odd & (kinds(got) != kinds(eager)) & (kinds(got) != kinds(reference))
    wrong &= ~(VALUES[:, None].isnan() & got.isnan())
    limit = 2 * (eager - reference).abs() + slack * (1 + reference.abs())
    wrong = torch.where(odd, wrong, (got - reference).abs() > limit)
    assert not bool(wrong.any()), (
        f"at {VALUES[wrong.flatten()].tolist()}: {got[wrong].tolist()}, eager has "
        f"{eager[wrong].tolist()}, right is {reference[wrong].tolist()}"
    )


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATION_TEXTS)
def test_derivatives_of_special_values(activation: str, dtype: torch.dtype, isa: str) -> None:
    forms = parse_spec(activation)
    x = VALUES.to(dtype)[:, None]
    found = []
    for t in (x, x.double()):
        own = t.clone().requires_grad_()
        y = reference_backend.chain(own, [torch.ones(1, 1, dtype=t.dtype)], forms)
        found.append(torch.autograd.grad(y, own, torch.ones_like(y))[0])
    for recompute in KEEPING.values():
        own = x.clone().requires_grad_()
        with using_isa(isa), backward_runs():
            y = chain_training(own, [torch.ones(1, 1, dtype=dtype)], activation, recompute)
            (grad,) = torch.autograd.grad(y, own, torch.ones_like(y))
        same_values(grad, *found)


@pytest.mark.parametrize("recompute", KEEPING.values(), ids=KEEPING)
@pytest.mark.parametrize("which", ["x", "grad"])
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_one_bad_value_reaches_what_it_should(value: float, which: str, recompute: bool) -> None:
    """A row of the gradient of x, a column of weights: no further than in eager, and no less."""
    spec = "gelu/b;silu/first/b;identity/b"
    forms = parse_spec(spec)
    sizes = ((20, 33), (20,), (24, 20), (24,), (7, 12), (7,))
    tensors = [torch.randn(size).requires_grad_() for size in sizes]
    x, g = torch.randn(9, 33), torch.randn(9, 7)
    (x if which == "x" else g)[3, 2] = value
    x.requires_grad_()
    inputs = [x, *tensors]
    wanted = torch.autograd.grad(reference_backend.chain(x, tensors, forms), inputs, g)
    with backward_runs():
        found = torch.autograd.grad(chain_training(x, tensors, spec, recompute), inputs, g)
    for got, expected in zip(found, wanted, strict=True):
        assert torch.equal(got.isfinite(), expected.isfinite())
        fine = got.isfinite()
        torch.testing.assert_close(got[fine], expected[fine], rtol=1e-3, atol=1e-3)


def test_a_dropped_infinity_is_eagers_nan() -> None:
    """Eager multiplies by 0."""
    w = torch.ones(5, 1)
    x = torch.full((40, 1), float("inf"))
    torch.manual_seed(1)
    expected = F.dropout((x @ w.t()).relu(), 0.5)
    torch.manual_seed(1)
    y = chain_training(x, [w], "relu/drop:0.5")
    assert torch.equal(kinds(y), kinds(expected))
