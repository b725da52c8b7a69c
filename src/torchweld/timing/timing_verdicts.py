"""The verdict on a candidate, from its log-ratios and the control's. Pure functions of arrays.

A candidate is faster or slower only if its interval excludes 1, and the change exceeds both the
practical threshold and what the baseline shows against itself. It is the same only if the interval
is narrow enough to exclude any change that matters. Everything else is not measured.

A plain difference needs few rounds: `judge_few` has its own, wide interval for them, and only says
faster or slower.
"""

import math
from dataclasses import dataclass

import numpy as np

from torchweld.timing.comparison import Verdict
from torchweld.timing.timing_statistics import Floats, few_interval, median_interval

# The looks at the data share the chance of error: five early ones a tenth each, the last one half.
ALPHA = 0.01
EARLY_LOOKS = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2)
EARLY_ALPHA = ALPHA / 2 / len(EARLY_LOOKS)
LAST_ALPHA = ALPHA / 2

# The fewest rounds that can show a plain difference; without a control more are needed. Such
# verdicts add little to the chance of error, compared with ALPHA: see `few_interval`.
FEW_ROUNDS, FEW_ROUNDS_ALONE = 5, 8
# A difference that is surely this many times what the baseline shows against itself counts even on
# a machine that is not steady.
PLAIN = 3.0


@dataclass(frozen=True, kw_only=True)
class PairedVerdict:
    """A verdict at one look. Logs are natural; `settled` says that more rounds are not needed."""

    verdict: Verdict
    reason: str
    log_speedup: float
    log_interval: tuple[float, float]
    log_noise: float | None
    settled: bool


def judge(
    ratios: Floats,
    control: Floats | None,
    *,
    threshold: float,
    precision: float,
    alpha: float,
    seed: int,
    enough: float | None = None,
) -> PairedVerdict:
    """The verdict on log-ratios of at least one round; `control` are those of the baseline alone.

    `precision` is the width, to either side of 1, within which an interval has to lie for "same",
    and what the interval's half-width may be for a difference to be settled early; one that surely
    exceeds `enough` is settled too.
    """
    change = float(np.median(ratios))
    low, high = median_interval(ratios, alpha, seed)
    smallest, tolerated = math.log1p(threshold), math.log1p(precision)
    noise: float | None = None
    drift = 0.0
    if control is not None:
        control_low, control_high = median_interval(control, alpha, seed + 1)
        noise = max(abs(control_low), abs(control_high))
        if control_low > 0.0 or control_high < 0.0:
            drift = abs(float(np.median(control)))

    def judgement(verdict: Verdict, reason: str, settled: bool) -> PairedVerdict:
        return PairedVerdict(
            verdict=verdict,
            reason=reason,
            log_speedup=change,
            log_interval=(low, high),
            log_noise=noise,
            settled=settled,
        )

    excludes_one = low > 0.0 or high < 0.0
    span = f"{math.exp(low):.3f} to {math.exp(high):.3f}"
    plain = noise is not None and max(low, -high) > PLAIN * noise
    if drift > smallest / 2 and not plain:
        return judgement(
            "not measured",
            f"the baseline differed from itself by {_percent(drift)} in the same rounds; "
            "the machine is not steady enough",
            False,
        )
    if excludes_one and abs(change) > smallest:
        if noise is not None and abs(change) <= noise:
            return judgement(
                "not measured",
                f"the change of {_percent(change)} is not beyond the {_percent(noise)} that the "
                "baseline shows against itself",
                False,
            )
        verdict: Verdict = "faster" if change > 0.0 else "slower"
        beyond = f" and the noise of {_percent(noise)}" if noise is not None else ""
        return judgement(
            verdict,
            f"the speedup lies in {span} and its change of {_percent(change)} exceeds the "
            f"threshold of {threshold:.1%}{beyond}",
            (high - low) / 2 <= tolerated
            or (enough is not None and min(abs(low), abs(high)) > math.log1p(enough)),
        )
    if -tolerated <= low and high <= tolerated:
        kind = "below the threshold" if excludes_one else "no difference at this precision"
        return judgement("same", f"the speedup lies in {span}: {kind}", True)
    return judgement(
        "not measured",
        f"the speedup lies somewhere in {span}, too wide to tell a change of {threshold:.1%}",
        False,
    )


def judge_few(
    ratios: Floats, control: Floats | None, *, threshold: float, enough: float | None
) -> PairedVerdict | None:
    """The verdict of a few rounds on a difference that is plain; None where they cannot tell.

    It is settled if the difference surely exceeds `enough`.
    """
    if len(ratios) < (FEW_ROUNDS_ALONE if control is None else FEW_ROUNDS):
        return None
    low, high = few_interval(ratios, control)
    least = max(low, -high)  # of the difference, whichever way; negative if 1 is inside
    if least <= math.log1p(threshold):
        return None
    span = f"{math.exp(low):.3f} to {math.exp(high):.3f}"
    return PairedVerdict(
        verdict="faster" if low > 0.0 else "slower",
        reason=f"the difference is plain: after {len(ratios)} rounds the speedup lies in {span}",
        log_speedup=float(np.median(ratios)),
        log_interval=(low, high),
        log_noise=None if control is None else float(np.max(np.abs(control))),
        settled=enough is not None and least > math.log1p(enough),
    )


def _percent(log_change: float) -> str:
    return f"{math.expm1(abs(log_change)):.1%}"
