"""Figures as pages hold them: short, and intervals and rounds as ratios."""

from __future__ import annotations

import math
from collections.abc import Iterable

from torchweld.core.measured_speed import Speed
from torchweld.core.not_measured import NotMeasured

Interval = tuple[float, float]


def brief(value: float, digits: int = 5) -> float:
    """So many digits; more say nothing about a measured time, and make pages larger."""
    return float(f"{value:.{digits}g}")


def ends(interval: Interval | NotMeasured | None) -> Interval | None:
    """An interval, if there is one."""
    return (brief(interval[0]), brief(interval[1])) if isinstance(interval, tuple) else None


def figures(speed: Speed | NotMeasured) -> tuple[float | NotMeasured, Interval | None]:
    """The speed-up with its interval, or why there is none."""
    if isinstance(speed, NotMeasured):
        return speed, None
    return brief(speed.speedup), ends(speed.interval)


def ratios(log_ratios: Iterable[float]) -> tuple[float, ...]:
    """Rounds as ratios of times; above 1 is faster."""
    return tuple(brief(math.exp(min(value, 700.0))) for value in log_ratios)
