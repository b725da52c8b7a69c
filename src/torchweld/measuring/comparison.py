"""The result of a paired comparison: a verdict on one candidate against the baseline, with proof.

`Comparison` prints as one sentence and saves to JSON and loads again, raw log-ratios included, so
that every figure in it can be computed anew.
"""

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from torchweld.errors import TorchweldError

Verdict = Literal["faster", "slower", "same", "not measured"]

_KIND = "torchweld.comparison"
_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One candidate against the baseline.

    baseline, candidate: the names of the sides
    verdict:             what is known of the candidate, at this threshold
    reason:              why, in one sentence
    speedup:             baseline time / candidate time, the median over rounds (NaN without rounds)
    interval:            where the true speedup lies, early looks accounted for
    confidence:          how sure that is
    rounds, discarded:   rounds used, and rounds dropped because the processor was taken away
    baseline_us, candidate_us: the median time of one call
    noise:               how far from 1, as a fraction, the baseline against itself may be, by the
                         same interval in the same rounds (None without control)
    threshold:           the smallest change that counts
    cold:                whether the caches were emptied before every call
    threads:             the threads torch had
    elapsed_s:           what the comparison took, first calls included
    log_ratios:          log(baseline / candidate) of each round
    control_log_ratios:  log(baseline / baseline again) of each round
    """

    baseline: str
    candidate: str
    verdict: Verdict
    reason: str
    speedup: float
    interval: tuple[float, float]
    confidence: float
    rounds: int
    discarded: int
    baseline_us: float
    candidate_us: float
    noise: float | None
    threshold: float
    cold: bool
    threads: int
    seed: int
    elapsed_s: float
    log_ratios: tuple[float, ...]
    control_log_ratios: tuple[float, ...]

    def __str__(self) -> str:
        low, high = self.interval
        if self.verdict == "faster":
            figures = f"{self.speedup:.2f} ({low:.2f}-{high:.2f})"
            return f"{self.candidate} ran {figures} times faster than {self.baseline}"
        if self.verdict == "slower":
            figures = f"{1 / self.speedup:.2f} ({1 / high:.2f}-{1 / low:.2f})"
            return f"{self.candidate} ran {figures} times slower than {self.baseline}"
        if self.verdict == "same":
            figures = f"{self.speedup:.2f} ({low:.2f}-{high:.2f})"
            return f"{self.candidate} ran as fast as {self.baseline}, {figures}"
        return f"{self.candidate} against {self.baseline}: not measured, {self.reason}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON. A float that JSON cannot hold becomes "nan", "inf" or "-inf"."""
        fields = {field.name: _plain(getattr(self, field.name)) for field in _FIELDS}
        return {"kind": _KIND, "version": _VERSION, **fields}

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), allow_nan=False)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Comparison":
        given = (data.get("kind"), data.get("version"))
        if given != (_KIND, _VERSION):
            raise TorchweldError(
                f"kind and version are {given}, and must be {(_KIND, _VERSION)}; "
                "load what Comparison.to_json wrote with the same release"
            )
        missing = [field.name for field in _FIELDS if field.name not in data]
        if missing:
            raise TorchweldError(
                f"the comparison lacks {', '.join(missing)}; load what Comparison.to_json wrote"
            )
        values = {field.name: data[field.name] for field in _FIELDS}
        if values["verdict"] not in get_args(Verdict):
            raise TorchweldError(
                f"verdict is {values['verdict']!r}, and must be one of {get_args(Verdict)}; "
                "load what Comparison.to_json wrote"
            )
        for name in ("speedup", "baseline_us", "candidate_us"):
            values[name] = float(values[name])
        if values["noise"] is not None:
            values["noise"] = float(values["noise"])
        low, high = values["interval"]
        values["interval"] = (float(low), float(high))
        for name in ("log_ratios", "control_log_ratios"):
            values[name] = tuple(float(value) for value in values[name])
        return cls(**values)

    @classmethod
    def from_json(cls, text: str) -> "Comparison":
        return cls.from_dict(json.loads(text))


_FIELDS = dataclasses.fields(Comparison)


def _plain(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value
