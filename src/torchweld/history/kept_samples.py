"""The names by which series of samples are understood, and comparisons as cells.

A series whose name ends in `log_ratios` has log(baseline / candidate) of each round: a speed-up.
Any other series has times in one unit, which its name says: `eager_us`. In a cell's data, at any
depth, a number under `speedup` is a speed-up, and one under `…_us` a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torchweld.timing import Comparison

LOG_RATIOS = "log_ratios"
CONTROL = "control_log_ratios"


def of_comparison(found: Comparison) -> tuple[dict[str, Any], dict[str, tuple[float, ...]]]:
    """Data and samples of a cell that holds one comparison."""
    data = found.to_dict()
    for series in (LOG_RATIOS, CONTROL):
        data.pop(series)
    return data, {LOG_RATIOS: found.log_ratios, CONTROL: found.control_log_ratios}


def to_comparison(data: Mapping[str, Any], samples: Mapping[str, Sequence[float]]) -> Comparison:
    """The opposite of `of_comparison`."""
    series = {name: [*samples.get(name, ())] for name in (LOG_RATIOS, CONTROL)}
    return Comparison.from_dict({**data, **series})
