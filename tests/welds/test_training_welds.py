"""Welded blocks in training: what they drop, what they keep, and when the original runs."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.helpers import ISAS, kernel_runs
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import torchweld as tw
from torchweld.core.saved_tensors import saved_bytes
from torchweld.welds.found_blocks import Block
from torchweld.welds.swapping.swap import disabled, stats, weld
from torchweld.welds.weld_decisions import Choice, Decision

pytestmark = [
    pytest.mark.skipif(not ISAS, reason="no compiled kernels on this machine"),
    pytest.mark.usefixtures("one_thread"),
]
K, H, N = 13, 40, 21
SAVES, RECOMPUTES = Choice(backend="cpu"), Choice(backend="cpu", recompute=True)


class Between(nn.Module):
    """Dropout between the layers and after the last, as modules."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(K, H), nn.GELU(), nn.Linear(H, N)
        self.inner, self.outer = nn.Dropout(0.4), nn.Dropout(0.25)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.outer(self.down(self.inner(self.act(self.up(x)))))
        return y


class Gated(nn.Module):
    """Functional dropout, its probability an attribute, after a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(K, H, bias=False), nn.Linear(K, H, bias=False)
        self.down, self.p = nn.Linear(H, N), 0.3

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.silu(self.gate(x)) * self.up(x)
        y: Tensor = self.down(F.dropout(hidden, self.p, self.training))
        return y


class Scaled(nn.Module):
    """One Linear, dropout and a factor behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(K, N), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.drop(self.linear(x))
        return 0.5 * y


KINDS: dict[str, Callable[[], Any]] = {"between": Between, "gated": Gated, "scaled": Scaled}


def welded(module: nn.Module, choice: Choice = SAVES, *, rows: int = 64) -> Block:
    """Welds the module for training, and gives its block."""
    (block,) = tw.find(module, torch.randn(5, K), training=True)
    weld(module, [Decision(block=block, by_rows=((1, rows, choice),), training=True)])
    return block


def step(module: nn.Module, x: Tensor, *, fused: bool = True) -> list[Tensor]:
    """The output, and the gradients of x and of every parameter, from one seed."""
    torch.manual_seed(7)
    x = x.clone().requires_grad_()
    with kernel_runs(calls=int(fused)):
        y = module(x)
    return [y, *torch.autograd.grad(y.square().sum(), [x, *module.parameters()])]


def close(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("choice", [SAVES, RECOMPUTES], ids=["saves", "recomputes"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_seed_drops_what_the_original_drops(kind: str, choice: Choice) -> None:
    module = KINDS[kind]().train()
    assert any(welded(module, choice).dropout)
    for shape in ((5, K), (1, K), (2, 9, K), (17, K)):
        x = torch.randn(shape)
        found = step(module, x)
        with disabled(module):
            expected = step(module, x, fused=False)
        assert torch.equal(found[0] == 0, expected[0] == 0)
        close(found, expected)
    originals = stats(module)[""].originals
    assert originals == {"disabled": 4}, originals


@pytest.mark.parametrize("kind", KINDS)
def test_training_goes_on_from_the_same_random_numbers(kind: str) -> None:
    """The call draws as many as the original: what comes after it draws the same."""
    module, x = KINDS[kind]().train(), torch.randn(5, K)
    welded(module)
    torch.manual_seed(3)
    module(x)
    after = torch.rand(3)
    torch.manual_seed(3)
    with disabled(module):
        module(x)
    assert torch.equal(after, torch.rand(3))


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_dropped_in_evaluation(kind: str) -> None:
    module, x = KINDS[kind]().train(), torch.randn(5, K)
    welded(module)
    module.eval()
    with kernel_runs():
        found = module(x)
    assert torch.equal(found, module(x))
    with disabled(module):
        torch.testing.assert_close(found, module(x))
    module.train()
    assert not torch.equal(module(x), module(x))


def test_without_gradients_training_mode_drops_too() -> None:
    module, x = Between().train(), torch.randn(5, K)
    welded(module)
    torch.manual_seed(1)
    with torch.no_grad(), kernel_runs():
        found = module(x)
    torch.manual_seed(1)
    with disabled(module):
        torch.testing.assert_close(found, module(x))


# ---- the original runs ----


def _more(module: Any) -> None:
    module.inner.p = 0.9


def _none(module: Any) -> None:
    module.outer.p = 0.0


def _another(module: Any) -> None:
    module.inner = nn.Dropout(0.9)


@pytest.mark.parametrize("change", [_more, _none, _another])
def test_a_changed_dropout_runs_the_original(change: Callable[[Any], None]) -> None:
    module, x = Between().train(), torch.randn(5, K)
    welded(module)
    change(module)
    with pytest.warns(UserWarning, match="runs its original code"):
        found = step(module, x, fused=False)
    with disabled(module):
        assert torch.equal(found[0], step(module, x, fused=False)[0])


def test_a_changed_argument_of_a_functional_dropout_runs_the_original() -> None:
    module, x = Gated().train(), torch.randn(5, K)
    welded(module)
    module.p = 0.6
    with pytest.warns(UserWarning, match="its p was changed"):
        step(module, x, fused=False)
    module.p = 0.3
    step(module, x)


def test_a_dropout_in_another_mode_runs_the_original() -> None:
    module, x = Between().train(), torch.randn(5, K)
    welded(module)
    module.inner.eval()
    step(module, x, fused=False)
    assert stats(module)[""].originals == {"training mode": 1}


class Always(nn.Module):
    """Drops in evaluation too."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(K, N)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.linear(x), 0.5)


@pytest.mark.parametrize("training", [False, True])
def test_dropout_in_evaluation_is_refused(training: bool) -> None:
    blocks = tw.find(Always().train(training), torch.randn(5, K), training=training)
    reasons = {one.path: one.reason for one in blocks.refused}
    assert reasons[""] == "drops out in evaluation too"


def test_a_dropout_of_everything_runs_the_original() -> None:
    module = Between().train()
    module.outer.p = 1.0
    welded(module)
    with kernel_runs(calls=0):
        assert not module(torch.randn(5, K)).any()


def test_a_backend_without_dropout_leaves_such_blocks_alone() -> None:
    module = Between().train()
    welded(module, Choice(backend="torch"))
    with kernel_runs(calls=0):
        module(torch.randn(5, K))
    assert stats(module)[""].originals == {"training mode": 1}


# ---- what is kept ----


@pytest.mark.parametrize("training", [True, False])
def test_each_range_of_rows_keeps_what_its_choice_says(training: bool) -> None:
    module = nn.Sequential(nn.Linear(K, H), nn.GELU(), nn.Linear(H, N)).train()
    (block,) = tw.find(module, torch.randn(5, K), training=True)
    ranges = ((1, 8, SAVES), (9, 64, RECOMPUTES))
    weld(module, [Decision(block=block, by_rows=ranges, training=True)])
    module.train(training)
    for rows, hidden in ((8, H), (9, 0)):
        x = torch.randn(rows, K, requires_grad=True)
        kept = saved_bytes(lambda x=x: module(x), module.parameters())  # type: ignore[misc]
        checksum = 0 if hidden else 8
        assert kept == 4 * rows * (K + hidden) + checksum


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_replays_the_dropout(reentrant: bool) -> None:
    module, x = Between().train(), torch.randn(5, K)
    welded(module)

    class Checkpointed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = checkpoint(module, x, use_reentrant=reentrant)
            return y

    def backward() -> list[Tensor]:
        torch.manual_seed(5)
        given = x.clone().requires_grad_()
        Checkpointed()(given).square().sum().backward()
        found = [given.grad, *(p.grad for p in module.parameters())]
        module.zero_grad()
        return [grad for grad in found if grad is not None]

    found = backward()
    with disabled(module):
        close(found, backward())


# ---- copies, and the safety net ----


def test_copies_and_pickles_drop_the_same() -> None:
    module, x = Between().train(), torch.randn(5, K)
    welded(module)
    expected = step(module, x)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        close(step(other, x), expected)


def test_a_copy_whose_dropout_was_changed_before_its_first_call_runs_the_original() -> None:
    module, x = Between().train(), torch.randn(5, K)
    welded(module)
    other = copy.deepcopy(module)
    other.inner.p = 0.9
    with pytest.warns(UserWarning, match=r"drops out with 0\.9, 0\.25 and not with 0\.4, 0\.25"):
        found = step(other, x, fused=False)
    with disabled(other):
        assert torch.equal(found[0], step(other, x, fused=False)[0])


@pytest.mark.parametrize("kind", KINDS)
def test_calls_that_drop_are_checked_against_the_original(kind: str) -> None:
    module, x = KINDS[kind]().train(), torch.randn(5, K)
    welded(module)
    tw.check_calls(module, first=2)
    torch.manual_seed(7)
    found = module(x)
    assert stats(module)[""].checked == 1
    torch.manual_seed(7)
    with disabled(module):
        close([found], [module(x)])
    torch.manual_seed(3)
    module(x)
    after = torch.rand(3)
    with disabled(module):
        torch.manual_seed(3)
        module(x)
    assert torch.equal(after, torch.rand(3))  # comparing has drawn nothing


def test_a_block_that_drops_other_values_is_undone() -> None:
    module, x = Between().train(), torch.randn(5, K)
    (block,) = tw.find(module, x, training=True)
    wrong = replace(block, dropout=(0.4, 0.5))
    weld(module, [Decision(block=wrong, by_rows=((1, 64, SAVES),), training=True)])
    tw.check_calls(module, first=1)
    with pytest.warns(UserWarning, match="welded no longer, since a call disagreed"):
        module(x)
    assert not tw.stats(module)


# ---- choices ----


def test_a_choice_recomputes_or_keeps_a_copy() -> None:
    with pytest.raises(tw.TorchweldError, match="packed=True is for inference and recompute=True"):
        Choice(backend="cpu", packed=True, recompute=True)
    with pytest.raises(tw.TorchweldError, match="Choice: recompute is 1; expected True or False"):
        Choice(backend="cpu", recompute=1)  # type: ignore[arg-type]
    assert [SAVES.mode, RECOMPUTES.mode] == ["natural", "recompute"]


def test_a_backend_that_cannot_recompute_is_named() -> None:
    module = Between().train()
    with pytest.raises(tw.TorchweldError, match="backend torch computes nothing again"):
        welded(module, Choice(backend="torch", recompute=True))


def test_choices_of_before_do_not_recompute() -> None:
    """As they are in pickles: without the field."""
    old: Choice = Choice.__new__(Choice)
    old.__dict__.update(backend="cpu", packed=False)
    assert old == SAVES
    assert hash(old) == hash(SAVES)
    assert old.mode == "natural"
