"""Tests that random forwards, welded by force, give what their unwelded twins give."""

from __future__ import annotations

import functools

import pytest
from tests.behaviours.random_forwards import ForwardOutcome, generate, judge, report
from tests.support.helpers import ISAS

pytestmark = [
    pytest.mark.skipif(not ISAS, reason="no compiled kernels on this machine"),
    pytest.mark.usefixtures("one_thread"),
]

SUITE, ALL, AT_ONCE = 500, 10_000, 50


def test_twins_that_are_not_welded_agree() -> None:
    """Otherwise a difference would not be due to welding."""
    for seed in range(20):
        assert not judge(seed, weld=False).problems


def test_a_seed_makes_the_same_forward_every_time() -> None:
    assert generate(7) == generate(7)
    assert len({generate(seed).source for seed in range(50)}) > 45


@functools.cache
def outcome_of(seed: int) -> ForwardOutcome:
    return judge(seed)


def _assert_right(first: int, count: int) -> None:
    outcomes = {seed: outcome_of(seed) for seed in range(first, first + count)}
    wrong = [report(seed, one) for seed, one in outcomes.items() if one.problems]
    assert not wrong, f"{len(wrong)} of {count} are wrong; the first is\n{wrong[0]}"


def _assert_welded(first: int, count: int) -> None:
    welded = [one for one in map(outcome_of, range(first, first + count)) if one.welded]
    assert len(welded) >= 0.4 * count, f"{len(welded)} of {count} are welded"
    ran = sum(one.ran for one in welded)
    assert ran >= 0.95 * len(welded), f"the op ran in {ran} of {len(welded)}"


@pytest.mark.parametrize("first", range(0, SUITE, AT_ONCE))
def test_random_forwards_give_what_their_twins_give(first: int) -> None:
    _assert_right(first, AT_ONCE)


def test_enough_of_them_are_welded_and_run_the_op() -> None:
    _assert_welded(0, SUITE)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(SUITE, ALL, SUITE))
def test_many_random_forwards_give_what_their_twins_give(first: int) -> None:
    _assert_right(first, SUITE)
    _assert_welded(first, SUITE)
