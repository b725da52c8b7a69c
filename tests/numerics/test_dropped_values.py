"""Dropout in comparisons: all sides drop the same values, and a side that does not is found."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tests.support.helpers import DTYPES, all_ok, random_tensors
from torch import Tensor, nn

import torchweld as tw
from torchweld.core.blocks import parse_spec
from torchweld.numerics.dropped_values import (
    drawing_from,
    drawn_masks,
    drew_alike,
    random_state,
    seeded_state,
)
from torchweld.numerics.model_check import EAGER, EXACT
from torchweld.numerics.numerical_rule import check_block
from torchweld.ops.backends import reference_backend

SPEC = "gelu/b/drop:0.4;identity/drop:0.2"
FORMS, CPU = parse_spec(SPEC), torch.device("cpu")


@pytest.mark.parametrize("dtype", DTYPES)
def test_masks_are_what_dropout_draws(dtype: torch.dtype) -> None:
    x, tensors = torch.randn(2, 3, 7).to(dtype), random_tensors((7, 31, 5), FORMS, dtype)
    state = seeded_state(CPU)
    masks = drawn_masks(x, tensors, FORMS, state)
    with drawing_from(state, CPU):
        for mask, N, p in zip(masks, (31, 5), (0.4, 0.2), strict=True):
            assert torch.equal(mask, F.dropout(torch.ones(2, 3, N, dtype=dtype), p) != 0)


def test_drawing_leaves_the_generator_as_it_was() -> None:
    before = random_state(CPU)
    with drawing_from(seeded_state(CPU), CPU):
        torch.rand(5)
    assert torch.equal(random_state(CPU), before)
    with drawing_from(None, CPU):
        torch.rand(5)
    assert not torch.equal(random_state(CPU), before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_block_that_drops_out_is_judged_with_its_gradients(dtype: torch.dtype) -> None:
    x, tensors = torch.randn(6, 7).to(dtype), random_tensors((7, 31, 5), FORMS, dtype)
    grads = [torch.randn(6, 5).to(dtype)]

    def op(x: Tensor, tensors: list[Tensor]) -> Tensor:
        y: Tensor = torch.ops.torchweld.chain_training(x, tensors, SPEC)
        return y

    before = random_state(CPU)
    all_ok(check_block(op, x, tensors, FORMS, grads=grads))  # type: ignore[arg-type]
    assert torch.equal(random_state(CPU), before)


@pytest.mark.parametrize("wrong", ["other numbers", "another probability", "nothing dropped"])
def test_a_block_that_drops_otherwise_is_wrong(wrong: str) -> None:
    x, tensors = torch.randn(6, 7), random_tensors((7, 31, 5), FORMS)
    spec = {"another probability": "gelu/b/drop:0.41;identity/drop:0.2"}.get(wrong, SPEC)
    forms = parse_spec("gelu/b;identity" if wrong == "nothing dropped" else spec)

    def candidate(x: Tensor, tensors: list[Tensor]) -> Tensor:
        if wrong == "other numbers":
            torch.rand(1)
        return reference_backend.chain(x, tensors, forms)

    judged = check_block(candidate, x, tensors, FORMS)  # type: ignore[arg-type]
    assert not judged["output"].within


# ---- whole models ----


class Drops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(9, 33), nn.Dropout(0.3), nn.GELU(), nn.Linear(33, 4), nn.Dropout(0.1)
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return y


class DropsByUniform(Drops):
    """Draws uniform numbers, which are others in float64."""

    drop_rate = 0.5

    def __init__(self) -> None:
        super().__init__()
        self.drop_rate = 0.5

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x * (torch.rand_like(x) < self.drop_rate)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_with_dropout_is_judged_against_float64(dtype: torch.dtype) -> None:
    """On a CPU, dropout draws the same numbers in every type."""
    model, other = Drops().to(dtype), Drops().to(dtype)
    other.load_state_dict(model.state_dict())
    check = tw.verify(model, other, torch.randn(16, 9).to(dtype), training=True)
    assert check
    assert check.against == EXACT
    with torch.no_grad():
        other.layers[3].weight[1, 5] += 0.1  # type: ignore[index, operator]
    assert not tw.verify(model, other, torch.randn(16, 9).to(dtype), training=True)


def test_a_model_that_draws_other_numbers_in_float64_is_judged_by_itself() -> None:
    model, other = DropsByUniform(), DropsByUniform()
    other.load_state_dict(model.state_dict())
    check = tw.verify(model, other, torch.randn(16, 9), training=True)
    assert check
    assert check.against == EAGER
    assert check.why_not_exact == "dropout draws other random numbers in float64"


def test_one_run_does_not_tell_what_was_drawn() -> None:
    assert not drew_alike({}, [{}])
    assert not drew_alike({"output 0": torch.ones(2)}, [{}, {}])
