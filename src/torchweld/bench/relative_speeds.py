"""How fast our first backend is beside any other side of a cell, with an interval.

Both were timed against eager in the same rounds, so their ratio needs no third comparison. Ratios
are our speed over the other's: above 1 we win.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torchweld.bench.bench_results import Bench, Cell
from torchweld.core.not_measured import NotMeasured


@dataclass(frozen=True, kw_only=True)
class RelativeSpeed:
    """Our speed over another's, and the interval it lies in."""

    value: float
    low: float
    high: float

    @property
    def behind(self) -> bool:
        """Beyond noise."""
        return self.high < 1.0

    @property
    def ahead(self) -> bool:
        return self.low > 1.0


def over(bench: Bench, cell: Cell, name: str, ours: str = "") -> RelativeSpeed | None:
    """The first backend, or `ours`, over one other side; None where one of them has no figures.

    Distances to the ends of both intervals are added as squares. What the two share, eager's own
    noise, cancels in their ratio, so that the interval is rather too wide than too narrow.
    """
    own = _over_eager(cell, ours or bench.first)
    if own is None or name == "eager":
        return own
    theirs = _over_eager(cell, name)
    if theirs is None:
        return None
    down = math.hypot(math.log(own.value / own.low), math.log(theirs.high / theirs.value))
    up = math.hypot(math.log(own.high / own.value), math.log(theirs.value / theirs.low))
    value = own.value / theirs.value
    return RelativeSpeed(value=value, low=value * math.exp(-down), high=value * math.exp(up))


def _over_eager(cell: Cell, name: str) -> RelativeSpeed | None:
    compared = cell.result(name).comparison
    if compared is None:
        return None
    value, interval = compared.speedup, compared.interval
    if isinstance(value, NotMeasured) or isinstance(interval, NotMeasured):
        return None
    low, high = interval
    if not 0.0 < low <= value <= high < math.inf:
        return None
    return RelativeSpeed(value=value, low=low, high=high)


def others(bench: Bench, cell: Cell) -> Iterator[str]:
    """Eager, and the peers that were timed."""
    yield "eager"
    yield from (name for name in bench.against if cell.result(name).comparison is not None)


def over_best(bench: Bench, cell: Cell) -> tuple[str, RelativeSpeed] | None:
    """The fastest of the others, and our speed over its; None while one of them has no figures."""
    found = {name: over(bench, cell, name) for name in others(bench, cell)}
    known = {name: ratio for name, ratio in found.items() if ratio is not None}
    if len(known) < len(found):
        return None
    return min(known.items(), key=lambda item: item[1].value)


def geometric_mean(values: Iterable[float]) -> float:
    """The geometric mean of at least one value."""
    logs = [math.log(value) for value in values]
    return math.exp(math.fsum(logs) / len(logs))
