"""torch.utils.flop_counter counts torchweld's ops as it counts the products they stand for."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable

import pytest
import torch
from tests.support.helpers import ISAS, kernel_runs
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import torchweld as tw
from torchweld.welds.swapping.swap import welded_paths

pytestmark = pytest.mark.skipif(not ISAS, reason="no compiled kernels on this machine")
X = torch.randn(2, 3, 8)


def flops(run: Callable[[], object]) -> int:
    with FlopCounterMode(display=False) as counter:
        run()
    total: int = counter.get_total_flops()
    return total


def inference(model: nn.Module) -> int:
    def run() -> None:
        with torch.no_grad():
            model(X)

    return flops(run)


def test_a_welded_linear_counts_as_the_original() -> None:
    plain = nn.Linear(8, 16).eval()
    model = tw.apply(copy.deepcopy(plain), tw.plan(plain, X, force=True))
    assert welded_paths(model) == [""]
    with kernel_runs():
        found = inference(model)
    assert found == inference(plain) == 2 * 6 * 8 * 16


def test_a_model_of_welded_linears_counts_module_by_module() -> None:
    plain = nn.ModuleDict({"a": nn.Linear(8, 16), "b": nn.Linear(16, 8, bias=False)})

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = plain

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.parts["b"](self.parts["a"](x).sort().values)
            return y

    model = Model().eval()
    before = inference(model)
    tw.apply(model, tw.plan(model, X, force=True))
    assert set(welded_paths(model)) == {"parts.a", "parts.b"}
    assert inference(model) == before > 0


@pytest.mark.parametrize("gated", [False, True])
def test_a_fused_mlp_counts_its_products(gated: bool) -> None:
    model = tw.FusedMLP((8, 16, 8), gated=gated).eval()
    assert inference(model) == 2 * 6 * 8 * 16 * (3 if gated else 2)


@pytest.mark.parametrize("form", ["relu/b", "silu/b/first", "silu/second", "gelu/interleaved/t"])
def test_packed_weights_count_as_those_they_were_made_of(form: str) -> None:
    ops = torch.ops.torchweld
    shape = (8, 16) if form.endswith("/t") else (16, 8)
    params = [torch.randn(shape), *([torch.randn(16)] if "/b" in form else [])]
    packed = ops.pack(params, form)
    natural = flops(lambda: ops.chain(X, params, form))
    assert natural == 2 * 6 * 8 * 16
    assert flops(lambda: ops.chain_packed(X, packed, form)) == natural


def test_a_group_counts_all_its_members() -> None:
    ops, weights = torch.ops.torchweld, [torch.randn(4, 8), torch.randn(16, 8)]
    spec = "identity;identity"
    assert flops(lambda: ops.group(X, weights, spec)) == 2 * 6 * 8 * (4 + 16)
    packed = ops.pack(weights, spec)
    assert flops(lambda: ops.group_packed(X, packed, spec)) == 2 * 6 * 8 * (4 + 16)


PRODUCT = 2 * 6 * 8 * 16
# What is frozen -> products of the backward, if what it needs was saved: one per weight gradient,
# one per input gradient on the way to what is needed.
FROZEN = {"": 3, "up": 1, "down": 2, "up.weight": 2, "up down": 0}


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("frozen", FROZEN)
def test_the_backward_pass_counts_what_it_needs(frozen: str, recompute: bool) -> None:
    """Computing the hidden values again is a product more than the original has."""
    fused = tw.FusedMLP((8, 16, 8), recompute=recompute).train()
    for name in frozen.split():
        for parameter in (p for n, p in fused.named_parameters() if n.startswith(name)):
            parameter.requires_grad_(False)
    plain = nn.Sequential(fused.up, nn.GELU(), fused.down)

    def step(model: nn.Module) -> None:
        y = model(X)
        if y.requires_grad:
            y.sum().backward()

    products = FROZEN[frozen]
    assert flops(lambda: step(plain)) == (2 + products) * PRODUCT
    assert flops(lambda: step(fused)) == (2 + products + (recompute and products > 0)) * PRODUCT


def test_a_single_linear_has_nothing_to_compute_again() -> None:
    x, layer = X.clone().requires_grad_(), tw.Layer(torch.randn(16, 8, requires_grad=True))
    for recompute in (True, False):
        run = functools.partial(tw.mlp, x, [layer], recompute)
        assert flops(lambda run=run: run().sum().backward()) == 3 * PRODUCT  # type: ignore[misc]


@pytest.mark.parametrize("frozen", [False, True])
def test_the_backward_of_a_group(frozen: bool) -> None:
    x = X.clone().requires_grad_()
    weights = [torch.randn(16, 8, requires_grad=True), torch.randn(16, 8)]
    weights[1].requires_grad_(not frozen)
    ys = functools.partial(tw.linears, x, [tw.Layer(weights[0]), tw.Layer(weights[1])])
    found = flops(lambda: torch.stack(ys()).sum().backward())
    assert found == (2 + 2 + (1 if frozen else 2)) * PRODUCT
