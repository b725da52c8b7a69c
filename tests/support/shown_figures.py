"""What the page is to show for a record: its figures as text, computed apart from the page's script."""

from __future__ import annotations

from collections.abc import Sequence

from torchweld.core import number_text
from torchweld.core.not_measured import NotMeasured
from torchweld.pages.page_records import Flame
from torchweld.profiles.accounting.time_splits import Split

PARTS = ("arithmetic", "traffic", "launch", "round_trip", "host", "slow", "unexplained")
# A browser rounds halves up, Python to even: a value just above is rounded up by both.
ABOVE = 1 + 1e-13


def duration(us: float | NotMeasured) -> str:
    return "not measured" if isinstance(us, NotMeasured) else number_text.duration(us * ABOVE)


def share(part: float, whole: float) -> str:
    return number_text.share(part * ABOVE, whole)


def figure(value: float) -> str:
    return number_text.figure(value * ABOVE)


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
    match = [width > 0 and wanted in name.lower() for name, width in zip(names, widths, strict=True)]
    covered = [False] * len(match)
    for i, around in enumerate(parent):
        covered[i] = around >= 0 and (match[around] or covered[around])
    time_us = sum(w for w, m, c in zip(widths, match, covered, strict=True) if m and not c)
    frames = number_text.counted(sum(match), "frame")
    return f"{frames}, {duration(time_us)}, {share(time_us, widths[0])} of the step"
