"""Which sections a page has: those that there are data for, in the order of the page.

The script in the page goes by the same rules; a test in a browser holds the two together.
"""

from __future__ import annotations

from collections.abc import Callable

from torchweld.pages.page_records import Page, PageSide

_RULES: dict[str, Callable[[Page], bool]] = {
    "verdict": lambda page: True,
    "findings": lambda page: _any(page, lambda side: bool(side.findings)),
    "welded": lambda page: bool(page.blocks) or _any(page, lambda side: bool(side.modules)),
    "flame": lambda page: page.diff is not None or _any(page, _has_flame),
    "timeline": lambda page: _any(page, lambda side: side.timeline is not None),
    "device": lambda page: _any(page, lambda side: side.device is not None),
    "roofline": lambda page: _any(page, lambda side: bool(side.points)),
    "memory": lambda page: _any(page, lambda side: side.memory is not None),
    "bench": lambda page: bool(page.maps or page.launched) or _has_curve(page),
    "history": lambda page: any(plot.points for plot in page.history),
    "numerics": lambda page: bool(page.errors),
    "samples": lambda page: bool(page.strips),
    "environment": lambda page: bool(page.environment or page.command),
}
SECTIONS: tuple[str, ...] = tuple(_RULES)


def sections_of(page: Page) -> tuple[str, ...]:
    """The ids of the sections that there are data for."""
    return tuple(name for name, has in _RULES.items() if has(page))


def device_lanes(page: Page) -> tuple[str, ...]:
    """The names of the lanes of device streams in the timelines."""
    timelines = (side.timeline for side in page.sides if side.timeline is not None)
    return tuple(lane.name for one in timelines for lane in one.lanes if lane.device)


def _any(page: Page, has: Callable[[PageSide], bool]) -> bool:
    return any(map(has, page.sides))


def _has_curve(page: Page) -> bool:
    return any(curve.points for plot in page.curves for curve in plot.curves)


def _has_flame(side: PageSide) -> bool:
    return side.flame is not None or side.device_flame is not None
