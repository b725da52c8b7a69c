"""What the page is to show for a record: figures as text, computed apart from its script."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import ROUND_HALF_UP, Decimal

from torchweld.core.not_measured import NotMeasured
from torchweld.core.number_text import counted
from torchweld.pages.page_records import Flame
from torchweld.profiles.accounting.time_splits import Split

PARTS = ("arithmetic", "traffic", "launch", "round_trip", "host", "slow", "unexplained")
MINUS = "−"


def fixed(value: float, digits: int) -> str:
    """A figure rounded as browsers round: halves go up. Python takes the even one."""
    rounded = Decimal(value).quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP)
    return str(rounded).replace("-", MINUS)


def figure(value: float) -> str:
    size = abs(value)
    return fixed(value, 2 if size < 9.995 else 1 if size < 99.95 else 0)


def duration(us: float | NotMeasured) -> str:
    if isinstance(us, NotMeasured):
        return "not measured"
    if us == 0:
        return "0 µs"
    for unit, scale in (("s", 1e6), ("ms", 1e3)):
        if abs(us) >= 0.9995 * scale:
            return f"{figure(us / scale)} {unit}"
    return f"{figure(us)} µs"


def share(part: float, whole: float) -> str:
    percent = 100 * part / whole
    if percent == 0:
        return "0 %"
    if abs(percent) < 0.1:
        return "<0.1 %"
    return f"{fixed(percent, 0 if abs(percent) >= 9.95 else 1)} %"


def parts_us(split: Split) -> list[float]:
    """The bar's parts: none is negative, and they add up to the same time."""
    parts = [getattr(split, f"{name}_us") for name in PARTS]
    rest, total = parts[-1], sum(parts)
    if rest >= 0 or total <= 0:
        return [max(0.0, part) for part in parts]
    return [part * total / (total - rest) for part in parts[:-1]] + [0.0]


def widths_us(flame: Flame) -> list[float]:
    """Times of frames with everything inside them."""
    return inside_too(flame.parent, flame.own_us)


def inside_too(parent: Sequence[int], own: Sequence[float]) -> list[float]:
    total = list(own)
    for i in range(len(total) - 1, 0, -1):
        if parent[i] >= 0:
            total[parent[i]] += total[i]
    return total


def found(names: Sequence[str], widths: Sequence[float], parent: Sequence[int], text: str) -> str:
    """What a search says: frames that match, their time, and its share of the step."""
    wanted = text.lower()
    match = [
        width > 0 and wanted in name.lower() for name, width in zip(names, widths, strict=True)
    ]
    covered = [False] * len(match)
    for i, around in enumerate(parent):
        covered[i] = around >= 0 and (match[around] or covered[around])
    time_us = sum(w for w, m, c in zip(widths, match, covered, strict=True) if m and not c)
    frames = counted(sum(match), "frame")
    return f"{frames}, {duration(time_us)}, {share(time_us, widths[0])} of the step"
