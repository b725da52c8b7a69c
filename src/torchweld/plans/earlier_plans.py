"""Plans of earlier versions, brought up to date: from JSON, and from pickles of welded models.

In format 1, a figure that was not measured was a 0, with or without a reason. Each function takes
the fields of one record by name, as they were in JSON or in the object, and returns those of today.
A missing field takes its default. A field that makes no sense is left for the reader to refuse.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torchweld.core.measured_speed import Speed
from torchweld.core.not_measured import NotMeasured
from torchweld.core.records import UNMEASURED

Fields = Mapping[str, Any]

UNSAID = "an earlier version of torchweld did not say why"
EARLIER = "an unknown day"  # when it was measured, if that was not kept


# ---- records in pickles ----


def trial(state: Fields) -> dict[str, Any]:
    if "speed" in state:
        return dict(state)
    return _objects(_trial(state))


def tuning(state: Fields) -> dict[str, Any]:
    return {**state, "remembered": _remembered(state.get("remembered"))}


def whole(state: Fields) -> dict[str, Any]:
    if "speed" in state:
        return dict(state)
    return _objects(_whole(state))


def _objects(fields: dict[str, Any]) -> dict[str, Any]:
    """The same with objects in place of JSON's dicts."""

    def made(value: Any) -> Any:
        if isinstance(value, dict) and value.keys() == {UNMEASURED}:
            return NotMeasured(value[UNMEASURED])
        if isinstance(value, dict) and "before_us" in value:
            return Speed(**{**value, "interval": tuple(value["interval"])})
        return value

    return {name: made(value) for name, value in fields.items()}


# ---- records in JSON ----


def plan(fields: dict[str, Any]) -> dict[str, Any]:
    """Format 1 to format 2."""
    found = dict(fields)
    found["planned"] = _each(fields.get("planned"), _planned)
    if "whole" in fields:
        found["whole"] = _each(fields["whole"], _whole)
    return found


def without_groups(fields: dict[str, Any]) -> dict[str, Any]:
    """Format 2 to format 3, which has groups."""
    return dict(fields)


def without_recompute(fields: dict[str, Any]) -> dict[str, Any]:
    """Format 3 to format 4, whose choices say whether they recompute; before, none did."""
    return dict(fields)


def without_errors(fields: dict[str, Any]) -> dict[str, Any]:
    """Format 4 to format 5, which has the errors of single tensors; before, none were kept."""
    return dict(fields)


def without_hidden(fields: dict[str, Any]) -> dict[str, Any]:
    """Format 5 to format 6, whose blocks have their hidden sizes; before, none were kept."""
    return dict(fields)


def _each(items: Any, upgrade: Any) -> Any:
    if not isinstance(items, list):
        return items
    return [upgrade(item) if isinstance(item, dict) else item for item in items]


def _planned(fields: Fields) -> dict[str, Any]:
    return {**fields, "tunings": _each(fields.get("tunings"), _tuning)}


def _tuning(fields: Fields) -> dict[str, Any]:
    remembered = _remembered(fields.get("remembered"))
    return {
        **fields,
        "remembered": remembered,
        "trials": _each(fields.get("trials"), _trial),
    }


def _remembered(value: Any) -> Any:
    """Formerly a bool; now the time of the measurement, or None."""
    return (EARLIER if value else None) if isinstance(value, bool) else value


def _trial(fields: Fields) -> dict[str, Any]:
    gone = ("reason", "speedup", "interval", "original_us")
    found = {name: value for name, value in fields.items() if name not in gone}
    found["speed"] = _speed(fields, "original_us", None)
    found["error_ratio"] = _figure(fields.get("error_ratio", 0.0), "it was not verified")
    found["copy_gain"] = _figure(fields.get("copy_gain", 0.0), UNSAID)
    found.setdefault("copied_bytes", 0)
    return found


def _whole(fields: Fields) -> dict[str, Any]:
    gone = ("reason", "speedup", "interval", "before_us", "after_us", "saved_us")
    found = {name: value for name, value in fields.items() if name not in gone}
    found["speed"] = speed = _speed(fields, "before_us", "after_us")
    saved_us = fields.get("saved_us", 0.0)
    promised: Any = 0.0
    if "before_us" in speed and _number(saved_us) and 0 < saved_us < speed["before_us"]:
        promised = speed["before_us"] / (speed["before_us"] - saved_us)
    for name, value in (
        ("promised", promised),
        ("predicted", fields.get("predicted", 0.0)),
        ("ceiling", fields.get("ceiling", 0.0)),
        ("error_ratio", fields.get("error_ratio", 0.0)),
    ):
        found[name] = _figure(value, UNSAID)
    for name in ("predicted", "ceiling"):
        bound, gain = found[name], speed.get("speedup")
        if _number(bound) and _number(gain) and bound < gain:
            found[name] = {
                UNMEASURED: f"{bound:.2f}x was found, which is less than what was measured"
            }
    found["remembered"] = _remembered(fields.get("remembered"))
    found["time_share"] = {UNMEASURED: UNSAID}
    found.setdefault("against", "")
    return found


def _speed(fields: Fields, before: str, after: str | None) -> dict[str, Any]:
    verdict, speedup = fields.get("verdict"), fields.get("speedup", 0.0)
    ends, before_us = fields.get("interval", (0.0, 0.0)), fields.get(before, 0.0)
    if verdict not in ("faster", "slower", "same"):
        return {UNMEASURED: str(fields.get("reason") or UNSAID)}
    # Ends of an interval are numbers, but an interval of few rounds may be open.
    two = isinstance(ends, (list, tuple)) and len(ends) == 2
    low, high = ends if two else (speedup, speedup)
    low = low if _number(low) and low > 0 else speedup
    high = high if _number(high) else speedup
    after_us = fields.get(after) if after is not None else None
    if after_us is None and _number(speedup) and _number(before_us) and speedup > 0:
        after_us = before_us / speedup
    return {
        "speedup": speedup,
        "interval": [low, high],
        "before_us": before_us,
        "after_us": after_us,
    }


def _figure(value: Any, why: str) -> Any:
    return {UNMEASURED: why} if value == 0 or value in ("nan", "inf", "-inf") else value


def _number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)
