"""The arithmetic of a paired comparison: arrays in, numbers out; no clock, no state.

R rounds, S sides. A round times every side once, so a log-ratio within a round is free of what the
machine did between rounds; the median over rounds is free of what it did to a few of them.
"""

import math

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

RESAMPLES = 10_000


def log_ratios(seconds_RS: Floats, side: int, baseline: int = 0) -> Floats:
    """log(baseline / side) of each round; above 0 where the side was the faster one."""
    result: Floats = np.log(seconds_RS[:, baseline]) - np.log(seconds_RS[:, side])
    return result


def complete_rounds(seconds_RS: Floats, sides: list[int]) -> Floats:
    """The rounds in which every one of `sides` has a time; a disturbed one is NaN."""
    result: Floats = seconds_RS[np.isfinite(seconds_RS[:, sides]).all(axis=1)]
    return result


def median_interval(values: Floats, alpha: float, seed: int) -> tuple[float, float]:
    """An interval that misses the true median in at most `alpha` of all cases.

    It is the percentile bootstrap of the median over rounds, widened where needed to the interval
    of the sign test. The bootstrap alone is too narrow far out in the tails: with 20 rounds and
    alpha 0.002 it missed in 0.6 % of 6,000 normal series. Without enough values for alpha it
    is (-inf, inf).
    """
    low_rank, high_rank = sign_test_ranks(len(values), alpha)
    if low_rank < 0:
        return -math.inf, math.inf
    ordered = np.sort(values)
    medians = bootstrap_medians(ordered, RESAMPLES, np.random.default_rng(seed))
    low, high = np.quantile(medians, [alpha / 2.0, 1.0 - alpha / 2.0])
    return min(float(low), float(ordered[low_rank])), max(float(high), float(ordered[high_rank]))


def few_interval(values: Floats, control: Floats | None) -> tuple[float, float]:
    """An interval for the median of so few values that no bootstrap or sign test can tell.

    Their range, widened to both sides by its own length, or by how far the baseline is from itself
    (`control`), whichever is more. Of every four values beyond five the outermost one at either end
    is left out: one disturbed round would decide otherwise. In 400,000 series of each of nine kinds
    of noise (normal, exponential, heavy-tailed, of two and four levels), looked at after every
    round from 5 to 19, it ever missed the true median in 1.4e-4 of them at most, and in 2.2e-3
    without a control.
    """
    n = len(values)
    left_out = max(0, (n - 5) // 4)
    ordered = np.sort(values)
    low, high = float(ordered[left_out]), float(ordered[n - 1 - left_out])
    width = high - low
    if control is not None:
        width = max(width, float(np.sort(np.abs(control))[n - 1 - left_out]))
    return low - width, high + width


def bootstrap_medians(ordered: Floats, resamples: int, rng: np.random.Generator) -> Floats:
    """The medians of `resamples` resamples, with replacement, of the sorted values.

    A resample draws n positions uniformly. Its upper middle position is the (n // 2 + 1)-th
    smallest of n uniforms, a Beta variate, and the one below is that times the largest of
    n // 2 further uniforms: two draws in place of n, the same distribution.
    """
    n = len(ordered)
    half = n // 2
    upper = rng.beta(half + 1, n - half, resamples)
    medians: Floats = ordered[_positions(upper, n)]
    if n % 2 == 0:
        lower = upper * rng.random(resamples) ** (1.0 / half)
        medians = (medians + ordered[_positions(lower, n)]) / 2.0
    return medians


def sign_test_ranks(n: int, alpha: float) -> tuple[int, int]:
    """The ranks (from 0) of the order statistics that enclose the median at level 1 - alpha.

    The narrowest such pair, exact for any distribution; (-1, n) when n values are too few.
    """
    if n == 0:
        return -1, 0
    k = np.arange(n + 1)
    log_factorials = np.concatenate(([0.0], np.cumsum(np.log(np.arange(1, n + 1)))))
    log_choose = log_factorials[n] - log_factorials[k] - log_factorials[n - k]
    at_most_k = np.cumsum(np.exp(log_choose - n * math.log(2.0)))
    low_rank = int(np.searchsorted(at_most_k, alpha / 2.0, side="right")) - 1
    return low_rank, n - 1 - low_rank


def _positions(uniforms: Floats, n: int) -> NDArray[np.intp]:
    return np.minimum((uniforms * n).astype(np.intp), n - 1)
