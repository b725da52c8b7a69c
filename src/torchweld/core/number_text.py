"""Figures in sentences and tables: units, shares, counts. Numbers in, short strings out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import datetime

MINUS = "−"


def figure(value: float) -> str:
    """Three significant digits: 0.98, 3.20, 12.3, 2749."""
    if not math.isfinite(value):
        return "–"
    size = abs(value)
    # Rounding decides the digits: 9.996 is 10.0, not 10.00.
    digits = 2 if size < 9.995 else 1 if size < 99.95 else 0
    return f"{value:.{digits}f}".replace("-", MINUS)


def duration(us: float) -> str:
    """A single time with its unit: 12.3 µs, 1.20 ms, 3.45 s."""
    if us == 0:
        return "0 µs"
    size = abs(us)
    for unit, scale in (("s", 1e6), ("ms", 1e3)):
        if size >= 0.9995 * scale:
            return f"{figure(us / scale)} {unit}"
    return f"{figure(us)} µs"


def unit_of(step_us: float) -> tuple[str, float]:
    """The unit, with its length in µs, that suits a step of this length and its parts."""
    if step_us >= 10e6:
        return "s", 1e6
    return ("ms", 1e3) if step_us >= 10e3 else ("µs", 1.0)


def binary_size(count: int | None) -> str:
    """Bytes of caches and memory, which are powers of two: 512 B, 32 KiB, 1.5 GiB, unknown."""
    if count is None:
        return "unknown"
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= factor:
            return f"{count / factor:.4g} {unit}"
    return f"{count} B"


def size(count: float) -> str:
    """Bytes of tensors and traffic: 512 B, 4.20 kB, 19.0 MB, 1.20 GB."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(count) >= 0.9995 * factor:
            return f"{figure(count / factor)} {unit}"
    return f"{count:.0f} B".replace("-", MINUS)


def share(part: float, whole: float) -> str:
    """`24 %`, `0.4 %`; a dash if the whole is 0."""
    if not whole or not math.isfinite(part / whole):
        return "–"
    percent = 100 * part / whole
    if percent == 0:
        return "0 %"
    if abs(percent) < 0.1:
        return "<0.1 %" if percent > 0 else f"{MINUS}0.1 %"
    text = f"{percent:.0f}" if abs(percent) >= 9.95 else f"{percent:.1f}"
    return text.replace("-", MINUS) + " %"


def signed(text: str) -> str:
    """`text` with a plus if it has no minus, so that it reads as a change."""
    return text if text.startswith((MINUS, "–")) else f"+{text}"


def counted(count: int, noun: str) -> str:
    """`1 step`, `2 copies`, `12,500 launches`."""
    if noun.endswith("y") and noun[-2] not in "aeo":
        plural = f"{noun[:-1]}ies"
    else:
        plural = noun + ("es" if noun.endswith(("ch", "s")) else "s")
    return f"{count:,} {noun if count == 1 else plural}"


def listed(items: Sequence[str], most: int) -> str:
    """`a, b, c and 9 more`."""
    if len(items) <= most:
        return ", ".join(items)
    return f"{', '.join(items[:most])} and {len(items) - most} more"


def age(at: str, now: datetime) -> str:
    """The time since an ISO time: `2 days ago`; `on …` if the text is no such time."""
    try:
        seconds = (now - datetime.fromisoformat(at)).total_seconds()
    except (ValueError, TypeError):
        return f"on {at}"
    for unit, length in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= length:
            return f"{counted(int(seconds // length), unit)} ago"
    return "less than a minute ago"
