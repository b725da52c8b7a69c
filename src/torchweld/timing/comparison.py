"""The result of a paired comparison: a verdict on one candidate against the baseline, with proof.

`Comparison` prints as one sentence and saves to JSON and loads again, raw log-ratios included, so
that every figure in it can be computed anew. A figure that was not measured is a `NotMeasured`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from torchweld.core.html_shown import ShownInNotebooks
from torchweld.core.measured_speed import Speed
from torchweld.core.not_measured import NotMeasured
from torchweld.core.record_fields import Count, Measured, Positive, Ratio
from torchweld.core.record_format import RecordFormat
from torchweld.core.records import UNMEASURED
from torchweld.core.safe_text import clean
from torchweld.core.saved_records import SavedRecord

Verdict = Literal["faster", "slower", "same", "not measured"]


def _from_first(data: dict[str, Any]) -> dict[str, Any]:
    """The fields of version 1, which had no NotMeasured but NaN, infinities and None."""
    found = dict(data)
    because = {UNMEASURED: str(data.get("reason", ""))}
    unknown = ("nan", "inf", "-inf")
    for name in ("speedup", "baseline_us", "candidate_us"):
        if found.get(name) in unknown:
            found[name] = because
    ends = found.get("interval")
    if isinstance(ends, (list, tuple)) and any(end in (*unknown, 0) for end in ends):
        found["interval"] = because
    if "noise" in found and found["noise"] in (None, *unknown):
        found["noise"] = because
    return found


@dataclass(frozen=True, kw_only=True)
class Comparison(ShownInNotebooks, SavedRecord):
    """One candidate against the baseline.

    baseline, candidate: the names of the sides
    verdict:             what is known of the candidate, at this threshold
    reason:              why, in one sentence
    wanted_s:            the budget_s that may be enough for a verdict; None if there is one, or if
                         more time would not help
    speedup:             baseline time / candidate time, the median over rounds
    interval:            where the true speedup lies, corrected for early looks
    confidence:          how sure that is
    rounds, discarded:   rounds used, and rounds dropped because the processor was taken away
    baseline_us, candidate_us: the median time of one call
    noise:               how far from 1, as a fraction, the baseline against itself may be, by the
                         same interval in the same rounds
    threshold:           the smallest change that counts
    cold:                whether the caches were emptied before every call
    threads:             the threads torch had
    elapsed_s:           what the comparison took, first calls included
    log_ratios:          log(baseline / candidate) of each round
    control_log_ratios:  log(baseline / baseline again) of each round

    Without enough rounds for any verdict the figures are `NotMeasured`. If there were enough and
    the verdict is still "not measured", they are what was seen; `speed` is then `NotMeasured`.
    """

    FORMAT = RecordFormat(
        what="comparison",
        version=2,
        upgrades={1: _from_first},
        remedy="compare again",
        by_kind=True,
        all_fields=True,
    )

    baseline: str
    candidate: str
    verdict: Verdict
    reason: str
    speedup: Ratio | NotMeasured
    interval: tuple[Measured, Measured] | NotMeasured
    confidence: float
    rounds: Count
    discarded: Count
    baseline_us: Ratio | NotMeasured
    candidate_us: Ratio | NotMeasured
    noise: Measured | NotMeasured
    threshold: float
    cold: bool
    threads: Count
    seed: int
    elapsed_s: float
    log_ratios: tuple[Measured, ...]
    control_log_ratios: tuple[Measured, ...]
    wanted_s: Positive | None = None

    def __str__(self) -> str:
        return clean(self._sentence())

    @property
    def speed(self) -> Speed | NotMeasured:
        """The candidate's speed; the reason if the verdict is "not measured"."""
        figures = (self.speedup, self.interval, self.baseline_us, self.candidate_us)
        speedup, interval, before_us, after_us = figures
        if (
            self.verdict == "not measured"
            or isinstance(speedup, NotMeasured)
            or isinstance(interval, NotMeasured)
            or isinstance(before_us, NotMeasured)
            or isinstance(after_us, NotMeasured)
        ):
            return NotMeasured(self.reason)
        return Speed(speedup=speedup, interval=interval, before_us=before_us, after_us=after_us)

    def _sentence(self) -> str:
        speed = self.speed
        if isinstance(speed, NotMeasured):
            more = f"; give budget_s={self.wanted_s}" if self.wanted_s is not None else ""
            return f"{self.candidate} against {self.baseline}: not measured, {self.reason}{more}"
        low, high = speed.interval
        if self.verdict == "slower":
            figures = f"{1 / speed.speedup:.2f} ({1 / high:.2f}-{1 / low:.2f})"
            return f"{self.candidate} ran {figures} times slower than {self.baseline}"
        figures = f"{speed.speedup:.2f} ({low:.2f}-{high:.2f})"
        if self.verdict == "faster":
            return f"{self.candidate} ran {figures} times faster than {self.baseline}"
        return f"{self.candidate} ran as fast as {self.baseline}, {figures}"
