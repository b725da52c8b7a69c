"""The arithmetic against exact values, against the naive form, and on series that drift."""

import math
from collections.abc import Callable

import numpy as np
import pytest

from torchweld.timing.timing_statistics import (
    Floats,
    bootstrap_medians,
    complete_rounds,
    log_ratios,
    median_interval,
    sign_test_ranks,
)

ROUNDS = 60
SIDES = 3
SERIES = 400
TRUE_LOG_RATIO = math.log(1.03)

Series = Callable[[np.random.Generator, int], Floats]


def linear_drift(rng: np.random.Generator, blocks: int) -> Floats:
    return np.linspace(0.0, rng.choice([-1.0, 1.0]) * math.log(2.0), blocks)


def slow_wave(rng: np.random.Generator, blocks: int) -> Floats:
    phase, periods = rng.uniform(0.0, 2.0 * math.pi), rng.uniform(1.0, 20.0)
    return 0.2 * np.sin(phase + np.linspace(0.0, 2.0 * math.pi * periods, blocks))


def random_walk(rng: np.random.Generator, blocks: int) -> Floats:
    return np.cumsum(0.02 * rng.standard_normal(blocks))


def speed_regimes(rng: np.random.Generator, blocks: int) -> Floats:
    """A neighbour on the same core comes and goes: 1.7 times slower for 25 blocks at a time."""
    return math.log(1.7) * (np.cumsum(rng.random(blocks) < 0.04, dtype=np.float64) % 2)


def bursts(rng: np.random.Generator, blocks: int) -> Floats:
    """Every tenth block is preempted, for up to ten times its length."""
    return np.where(rng.random(blocks) < 0.1, rng.uniform(0.5, 2.3, blocks), 0.0)


MACHINES: list[Series] = [linear_drift, slow_wave, random_walk, speed_regimes, bursts]


def measured(machine: Series, rng: np.random.Generator) -> Floats:
    """R rounds of S sides in random order on a drifting machine; the last side is 3 % faster."""
    drift = machine(rng, ROUNDS * SIDES) + 0.01 * rng.standard_normal(ROUNDS * SIDES)
    seconds_RS = np.exp(rng.permuted(drift.reshape(ROUNDS, SIDES), axis=1))
    seconds_RS[:, -1] *= math.exp(-TRUE_LOG_RATIO)
    return seconds_RS


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("alpha", [0.05, 0.01])
def test_interval_covers_the_truth_on_a_drifting_machine(machine: Series, alpha: float) -> None:
    rng = np.random.default_rng(1)
    missed = excluded = 0
    for number in range(SERIES):
        ratios = log_ratios(measured(machine, rng), side=2)
        low, high = median_interval(ratios, alpha, seed=number)
        missed += not low <= TRUE_LOG_RATIO <= high
        excluded += not low <= TRUE_LOG_RATIO + math.log(1.2) <= high
    # Three standard deviations of the count above what the level allows.
    assert missed <= alpha * SERIES + 3.0 * math.sqrt(alpha * SERIES)
    assert excluded >= 0.99 * SERIES


@pytest.mark.parametrize("machine", MACHINES)
def test_baseline_against_itself_covers_one(machine: Series) -> None:
    rng = np.random.default_rng(2)
    missed = 0
    for number in range(SERIES):
        low, high = median_interval(log_ratios(measured(machine, rng), side=1), 0.01, seed=number)
        missed += not low <= 0.0 <= high
    assert missed <= 0.01 * SERIES + 3.0 * math.sqrt(0.01 * SERIES)


def test_one_side_after_the_other_would_not_cover() -> None:
    """The series are hard enough: without interleaving the drift is taken for a difference."""
    rng = np.random.default_rng(3)
    missed = 0
    for number in range(100):
        log_s = linear_drift(rng, 2 * ROUNDS) + 0.01 * rng.standard_normal(2 * ROUNDS)
        low, high = median_interval(log_s[:ROUNDS] - log_s[ROUNDS:], 0.01, seed=number)
        missed += not low <= 0.0 <= high
    assert missed == 100


def test_few_rounds_and_a_high_level_are_covered_where_the_bootstrap_alone_is_not() -> None:
    rng = np.random.default_rng(10)
    alpha, series = 0.002, 2_000
    missed = bootstrap_missed = 0
    for number in range(series):
        ordered = np.sort(rng.standard_normal(20))
        low, high = median_interval(ordered, alpha, seed=number)
        missed += not low <= 0.0 <= high
        medians = bootstrap_medians(ordered, 2_000, np.random.default_rng(number))
        low, high = np.quantile(medians, [alpha / 2.0, 1.0 - alpha / 2.0])
        bootstrap_missed += not low <= 0.0 <= high
    allowed = alpha * series + 3.0 * math.sqrt(alpha * series)
    assert missed <= allowed < bootstrap_missed


@pytest.mark.parametrize("n", [1, 2, 5, 20, 21, 64])
def test_bootstrap_draws_what_resampling_draws(n: int) -> None:
    ordered = np.sort(np.random.default_rng(4).standard_normal(n))
    rng = np.random.default_rng(5)
    naive = np.median(rng.choice(ordered, (40_000, n)), axis=1)
    drawn = bootstrap_medians(ordered, 40_000, rng)
    points = np.unique(ordered)
    naive_cdf = np.searchsorted(np.sort(naive), points, side="right") / len(naive)
    drawn_cdf = np.searchsorted(np.sort(drawn), points, side="right") / len(drawn)
    # The two-sample Kolmogorov-Smirnov bound at 0.001.
    assert np.max(np.abs(naive_cdf - drawn_cdf)) < 1.95 * math.sqrt(2.0 / 40_000)


@pytest.mark.parametrize("n", [1, 7, 20, 33, 200])
@pytest.mark.parametrize("alpha", [0.05, 0.01, 0.001])
def test_sign_test_ranks_are_the_narrowest_that_keep_the_level(n: int, alpha: float) -> None:
    def outside(low_rank: int) -> float:
        return 2.0 * sum(math.comb(n, k) for k in range(low_rank + 1)) / 2**n

    low_rank, high_rank = sign_test_ranks(n, alpha)
    assert high_rank == n - 1 - low_rank
    assert outside(low_rank) <= alpha
    assert outside(low_rank + 1) > alpha


@pytest.mark.parametrize("n", [0, 1, 5])
def test_too_few_values_give_no_bound(n: int) -> None:
    assert median_interval(np.zeros(n), 0.01, seed=0) == (-math.inf, math.inf)


def test_interval_is_seeded_and_encloses_the_median() -> None:
    values = np.random.default_rng(6).standard_normal(41)
    low, high = median_interval(values, 0.01, seed=7)
    assert (low, high) == median_interval(values, 0.01, seed=7)
    assert low < float(np.median(values)) < high
    wider_low, wider_high = median_interval(values, 0.001, seed=7)
    assert wider_low <= low
    assert wider_high >= high


def test_interval_ignores_the_size_of_outliers() -> None:
    values = np.random.default_rng(8).standard_normal(60) * 0.01
    wild = np.where(values == values.max(), 1e6, values)
    assert median_interval(wild, 0.01, seed=0) == median_interval(values, 0.01, seed=0)


def test_log_ratio_is_positive_where_the_side_is_faster() -> None:
    ratios = log_ratios(np.array([[2.0, 1.0], [1.0, 4.0]]), side=1)
    assert ratios == pytest.approx([math.log(2.0), -math.log(4.0)])


def test_a_round_counts_only_if_every_side_concerned_has_a_time() -> None:
    nan = math.nan
    seconds_RS = np.array([[1.0, 2.0, 3.0], [nan, 2.0, 3.0], [1.0, nan, 3.0], [1.0, 2.0, nan]])
    assert len(complete_rounds(seconds_RS, [0, 1, 2])) == 1
    assert len(complete_rounds(seconds_RS, [0, 1])) == 2
