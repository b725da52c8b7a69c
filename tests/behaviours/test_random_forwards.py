"""No random forward, welded by force, gives anything but what its unwelded twin gives."""

from __future__ import annotations

import functools

import pytest
from tests.behaviours.random_forwards import Outcome, judge, report
from tests.helpers import ISAS

pytestmark = [
    pytest.mark.skipif(not ISAS, reason="no compiled kernels on this machine"),
    pytest.mark.usefixtures("one_thread"),
]

SUITE, ALL, AT_ONCE = 500, 10_000, 50


@functools.cache
def outcome_of(seed: int) -> Outcome:
    return judge(seed)


def _assert_right(first: int, count: int) -> None:
    outcomes = {seed: outcome_of(seed) for seed in range(first, first + count)}
    wrong = [report(seed, one) for seed, one in outcomes.items() if one.problems]
    assert not wrong, f"{len(wrong)} of {count} are wrong; the first is\n{wrong[0]}"


@pytest.mark.parametrize("first", range(0, SUITE, AT_ONCE))
def test_random_forwards_give_what_their_twins_give(first: int) -> None:
    _assert_right(first, AT_ONCE)


def test_enough_of_them_are_welded() -> None:
    welded = sum(outcome_of(seed).welded for seed in range(SUITE))
    assert welded >= 0.4 * SUITE, f"{welded} of {SUITE}"


@pytest.mark.slow
@pytest.mark.parametrize("first", range(SUITE, ALL, SUITE))
def test_many_random_forwards_give_what_their_twins_give(first: int) -> None:
    _assert_right(first, SUITE)
    welded = sum(outcome_of(seed).welded for seed in range(first, first + SUITE))
    assert welded >= 0.4 * SUITE, f"{welded} of {SUITE}"
