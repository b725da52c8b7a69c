"""The life of a packed copy: when it is made, dropped, counted, declined and never shared."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.support.helpers import ISAS, kernel_runs, using_isa
from tests.support.mlps import INPUT as X
from tests.support.mlps import (
    KINDS,
    by_hand,
    in_place,
    packed_mlp,
    packs,
    result,
    uses_the_new_weights,
)
from torch import nn

import torchweld as tw

pytestmark = [
    pytest.mark.skipif(not ISAS, reason="no compiled kernels on this machine"),
    pytest.mark.usefixtures("one_thread"),
]


@pytest.fixture(params=list(KINDS))
def mlp(request: pytest.FixtureRequest) -> tw.FusedMLP:
    return packed_mlp(request.param)


def test_train_drops_the_copy_and_eval_makes_a_new_one(mlp: tw.FusedMLP) -> None:
    mlp.train()
    assert mlp.packed_bytes == 0
    with torch.no_grad(), kernel_runs("natural"):
        mlp(X)
    assert mlp.packed_bytes == 0
    mlp.eval()
    assert mlp.packed_bytes == 0
    result(mlp)
    assert mlp.packed_bytes > 0


def test_train_of_a_parent_drops_it_too(mlp: tw.FusedMLP) -> None:
    parent = nn.Sequential(nn.Identity(), mlp)
    parent.train()
    assert tw.packed_bytes(parent) == 0


def test_gradients_make_no_copy() -> None:
    mlp = tw.FusedMLP((31, 64, 16)).eval()
    with kernel_runs("natural"):
        mlp(X)
    assert mlp.packed_bytes == 0


def test_unchanged_weights_are_packed_once(mlp: tw.FusedMLP) -> None:
    for rows in (1, 2, 7, 40):
        with torch.no_grad(), kernel_runs("packed"):
            mlp(torch.randn(rows, 31))
    assert packs(mlp) == 1


def test_packing_can_be_declined() -> None:
    mlp = tw.FusedMLP((31, 64, 16), packing=False).eval()
    with torch.no_grad():
        for rows, weights in ((5, "natural"), (40, "repacked")):
            x = torch.randn(rows, 31)
            with kernel_runs(weights):
                torch.testing.assert_close(mlp(x), by_hand(mlp, x))
    assert mlp.packed_bytes == 0
    assert tw.packed_bytes(mlp) == 0
    assert tw.repack(mlp) is mlp


def test_packed_bytes_counts_every_copy_in_a_model() -> None:
    mlps = [tw.FusedMLP((64, 64, 64)) for _ in range(3)]
    model = nn.Sequential(*mlps).eval()
    assert tw.packed_bytes(model) == 0
    with torch.no_grad():
        model[0](torch.randn(2, 64))
        one = tw.packed_bytes(model)
        model(torch.randn(2, 64))
    weights = sum(p.numel() * p.element_size() for p in model[0].parameters())
    assert weights <= one <= 1.1 * weights + 4096
    assert tw.packed_bytes(model) == 3 * one == sum(m.packed_bytes for m in mlps)


def test_repack_forgets_all_copies() -> None:
    """So an edit counts at once, even one that a sample cannot see."""
    first, second = tw.FusedMLP((64, 64, 64)), tw.FusedMLP((64, 64, 64))
    model = nn.Sequential(first, nn.ReLU(), second).eval()
    x = torch.randn(3, 64)
    with torch.no_grad():
        model(x)
        for mlp in (first, second):
            mlp.up.weight.data[1, 1] += 100.0
        assert tw.repack(model) is model
        assert tw.packed_bytes(model) == 0
        with kernel_runs("packed", calls=2):
            y = model(x)
        expected = by_hand(second, torch.relu(by_hand(first, x)))
        torch.testing.assert_close(y, expected)


def test_another_instruction_set_packs_anew(mlp: tw.FusedMLP) -> None:
    expected = result(mlp)
    for isa in ISAS:
        with using_isa(isa):
            torch.testing.assert_close(result(mlp), expected)


def test_a_copy_that_fails_to_be_made_leaves_none() -> None:
    mlp = tw.FusedMLP((31, 64, 16)).eval()
    before = result(mlp)
    up = mlp.up.weight
    mlp.up.weight = nn.Parameter(torch.randn(64, 30))
    with torch.no_grad(), pytest.raises(ValueError, match="30 features, but x has 31"):
        mlp(X)
    mlp.up.weight = up
    assert torch.equal(result(mlp), before)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_copies_do_not_share(mlp: tw.FusedMLP, count: int) -> None:
    copies = [copy.deepcopy(mlp) for _ in range(count)]
    before = result(mlp)
    for other in copies:
        assert other.packed_bytes == 0
        in_place(other)
        uses_the_new_weights(other, before)
        assert torch.equal(result(mlp), before)
