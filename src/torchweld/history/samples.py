"""Values as the history keeps them, and the names by which series of samples are understood.

A series whose name ends in `log_ratios` has log(baseline / candidate) of each round: a speed-up. A
series of any other name has times, all in one unit; name it so that it says which: `eager_us`. In a
cell's data, at any depth, a number under `speedup` is a speed-up, and one under `…_us` a time.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from torchweld.core.errors import TorchweldError
from torchweld.core.not_measured import NotMeasured
from torchweld.core.records import to_plain
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
    return Comparison.from_dict({**data, **{s: samples.get(s, ()) for s in (LOG_RATIOS, CONTROL)}})


def encoded(value: Any, where: str) -> str:
    """As JSON. A float that JSON cannot hold becomes "nan", "inf" or "-inf".

    A `NotMeasured` becomes `{"not_measured": reason}`, as in every other file.
    """
    return json.dumps(_plain(value, where), allow_nan=False, separators=(",", ":"))


def _plain(value: Any, where: str) -> Any:
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, NotMeasured):
        return to_plain(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item, f"{where}[{key!r}]") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{where}[{i}]") for i, item in enumerate(value)]
    raise TorchweldError(
        f"{where} is a {type(value).__name__}, which the history cannot keep; give numbers, texts, "
        "None, lists and mappings of these"
    )


def encoded_samples(samples: Mapping[str, Sequence[float]]) -> str:
    return encoded(
        {name: [float(v) for v in series] for name, series in samples.items()}, "samples"
    )
