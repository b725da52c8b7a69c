"""Verdicts on log-ratios: every rule alone, and the error rate over all looks together."""

import math
from typing import Any

import numpy as np
import pytest

from torchweld.timing.timing_statistics import Floats
from torchweld.timing.timing_verdicts import (
    ALPHA,
    EARLY_ALPHA,
    EARLY_LOOKS,
    FEW_ROUNDS,
    LAST_ALPHA,
    judge,
    judge_few,
)


def spread(centre: float, sigma: float, rounds: int = 100) -> Floats:
    """Values whose median is `centre` exactly."""
    half = np.abs(np.random.default_rng(0).standard_normal(rounds // 2)) * sigma
    return centre + np.concatenate([half, -half])


def verdict_of(ratios: Floats, control: Floats | None, **changed: Any) -> tuple[str, bool, str]:
    options = {"threshold": 0.01, "precision": 0.02, "alpha": LAST_ALPHA, "seed": 0}
    judgement = judge(ratios, control, **{**options, **changed})
    return judgement.verdict, judgement.settled, judgement.reason


QUIET = spread(0.0, 0.005)


@pytest.mark.parametrize(
    ("change", "expected"), [(0.05, "faster"), (-0.05, "slower"), (0.02, "faster"), (0.0, "same")]
)
def test_clear_cases(change: float, expected: str) -> None:
    verdict, settled, reason = verdict_of(spread(change, 0.005), QUIET)
    assert (verdict, settled) == (expected, True)
    assert reason


def test_a_sure_difference_below_the_threshold_is_the_same() -> None:
    verdict, settled, reason = verdict_of(spread(0.006, 0.005), QUIET)
    assert (verdict, settled) == ("same", True)
    assert "below the threshold" in reason


def test_a_wide_interval_is_not_the_same() -> None:
    verdict, settled, reason = verdict_of(spread(0.0, 0.2), QUIET)
    assert (verdict, settled) == ("not measured", False)
    assert "too wide" in reason


def test_a_difference_within_the_noise_of_the_baseline_is_not_measured() -> None:
    ratios = spread(0.05, 0.005)
    noisy = spread(0.0, 0.3)
    verdict, settled, reason = verdict_of(ratios, noisy)
    assert (verdict, settled) == ("not measured", False)
    assert "baseline shows against itself" in reason
    assert verdict_of(ratios, None)[0] == "faster"


def test_a_baseline_that_differs_from_itself_is_not_measured() -> None:
    verdict, settled, reason = verdict_of(spread(0.1, 0.005), spread(0.04, 0.005))
    assert (verdict, settled) == ("not measured", False)
    assert "differed from itself by 4.1%" in reason


def test_a_control_off_by_less_than_matters_is_tolerated() -> None:
    assert verdict_of(spread(0.05, 0.005), spread(0.003, 0.005))[0] == "faster"


def test_a_sure_but_vague_difference_is_not_settled_early() -> None:
    verdict, settled, _ = verdict_of(spread(0.5, 0.2), spread(0.0, 0.2))
    assert (verdict, settled) == ("faster", False)


def test_threshold_and_precision_are_the_callers() -> None:
    ratios = spread(0.03, 0.005)
    assert verdict_of(ratios, QUIET)[0] == "faster"
    assert verdict_of(ratios, QUIET, threshold=0.05, precision=0.1)[0] == "same"


def test_figures_are_those_of_the_rounds() -> None:
    ratios = spread(0.05, 0.005)
    judgement = judge(ratios, QUIET, threshold=0.01, precision=0.02, alpha=LAST_ALPHA, seed=0)
    low, high = judgement.log_interval
    assert judgement.log_speedup == float(np.median(ratios))
    assert low < judgement.log_speedup < high
    assert judgement.log_noise is not None
    assert 0.0 < judgement.log_noise < 0.005


def test_the_looks_share_the_chance_of_error() -> None:
    assert EARLY_ALPHA * len(EARLY_LOOKS) + LAST_ALPHA == pytest.approx(ALPHA)
    assert all(0.0 < look < 1.0 for look in EARLY_LOOKS)


def test_all_looks_together_keep_the_error_rate() -> None:
    """With no threshold and no control to help, the interval alone has to hold over every look."""
    rng = np.random.default_rng(9)
    runs, wrong = 400, 0
    for number in range(runs):
        ratios = 0.05 * rng.standard_t(2, 640)
        for look in (*EARLY_LOOKS, 1.0):
            judgement = judge(
                ratios[: int(look * len(ratios))],
                None,
                threshold=1e-9,
                precision=1e9,
                alpha=LAST_ALPHA if look == 1.0 else EARLY_ALPHA,
                seed=number,
            )
            if judgement.verdict in ("faster", "slower"):
                wrong += 1
                break
    assert wrong <= ALPHA * runs + 3.0 * math.sqrt(ALPHA * runs)


def test_a_difference_that_is_surely_enough_is_settled_however_wide_its_interval() -> None:
    wide = spread(0.7, 0.4)
    assert verdict_of(wide, QUIET)[:2] == ("faster", False)
    assert verdict_of(wide, QUIET, enough=0.15)[:2] == ("faster", True)
    assert verdict_of(wide, QUIET, enough=2.0)[:2] == ("faster", False)
    assert verdict_of(-wide, QUIET, enough=0.15)[:2] == ("slower", True)
    assert verdict_of(spread(0.0, 0.4), QUIET, enough=0.15)[0] == "not measured"


# ---- few rounds ----


def noise_of(kind: str, rng: np.random.Generator, shape: tuple[int, ...]) -> Floats:
    """Log-times of one side, in some way that a machine can be noisy; none of it small."""
    if kind == "normal":
        return rng.standard_normal(shape)
    if kind == "exponential":
        return rng.exponential(size=shape)
    if kind == "heavy":
        return np.abs(rng.standard_cauchy(shape))
    jitter = 0.02 * rng.standard_normal(shape)
    if kind == "two levels":  # now and then a whole time slice is lost
        return (rng.random(shape) < 0.5) + jitter
    return rng.integers(0, 4, shape) + jitter


@pytest.mark.parametrize("kind", ["normal", "exponential", "heavy", "two levels", "four levels"])
def test_few_rounds_hardly_ever_see_a_difference_that_is_not_there(kind: str) -> None:
    """All looks from the fifth round to the nineteenth count; they add little to `ALPHA`."""
    rng = np.random.default_rng(7)
    series, wrong = 4000, 0
    first, second, other = (noise_of(kind, rng, (series, 19)) for _ in range(3))
    for a, again, b in zip(first, second, other, strict=True):
        looks = (
            judge_few((a - b)[:n], (a - again)[:n], threshold=0.01, enough=None)
            for n in range(FEW_ROUNDS, 20)
        )
        wrong += any(looks)
    assert wrong <= ALPHA / 5 * series


def test_few_rounds_tell_a_plain_difference() -> None:
    ratios, control = spread(math.log(3.0), 0.1, rounds=6), spread(0.0, 0.1, rounds=6)
    few = judge_few(ratios, control, threshold=0.01, enough=0.15)
    assert few is not None
    assert (few.verdict, few.settled) == ("faster", True)
    low, high = few.log_interval
    assert low < math.log(3.0) < high
    slower = judge_few(-ratios, control, threshold=0.01, enough=None)
    assert slower is not None
    assert (slower.verdict, slower.settled) == ("slower", False)


@pytest.mark.parametrize(
    ("ratios", "control"),
    [
        (spread(0.05, 0.05, rounds=6), spread(0.0, 0.05, rounds=6)),  # within their own range
        (spread(0.5, 0.01, rounds=6), spread(0.0, 0.8, rounds=6)),  # within the baseline's noise
        (np.arange(0.1, 0.65, 0.1), spread(0.0, 0.001, rounds=6)),  # scattered beyond their least
        (spread(1.0, 0.01, rounds=4), spread(0.0, 0.01, rounds=4)),  # too few by all means
    ],
)
def test_few_rounds_that_cannot_tell_say_nothing(ratios: Floats, control: Floats) -> None:
    assert judge_few(ratios, control, threshold=0.01, enough=None) is None


def test_one_disturbed_round_of_nine_does_not_hide_a_plain_difference() -> None:
    ratios = np.append(spread(1.0, 0.05, rounds=8), -2.0)
    control = np.append(spread(0.0, 0.05, rounds=8), 3.0)
    few = judge_few(ratios, control, threshold=0.01, enough=None)
    assert few is not None
    assert few.verdict == "faster"


def test_a_plain_difference_is_told_though_the_baseline_differs_from_itself() -> None:
    assert verdict_of(spread(0.7, 0.005), spread(0.04, 0.005))[0] == "faster"
