"""Benches that earlier releases saved, brought up to date: plain data in, plain data out.

Version 4 had benches of the CPU alone, version 3 calls without gradients alone. Version 2 had NaN
and infinities where nothing was measured, an empty text where nothing was refused, and host times
that could exceed the call's.
Anybody may have written the data: what is not understood is left for the reader to refuse.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torchweld.core.records import UNMEASURED

ODD = ("nan", "inf", "-inf")


def _unmeasured(why: str) -> dict[str, str]:
    return {UNMEASURED: why}


def from_second(data: dict[str, Any]) -> dict[str, Any]:
    """The fields of version 2 as those of version 3."""
    return _each(data, "cells", lambda cell: _each(cell, "results", _result))


def from_third(data: dict[str, Any]) -> dict[str, Any]:
    """Version 3 had no training; all of its fields mean the same."""
    return data


def from_fourth(data: dict[str, Any]) -> dict[str, Any]:
    """Version 4 had no GPU; all of its fields mean the same."""
    return data


def _each(
    data: dict[str, Any], name: str, change: Callable[[dict[str, Any]], dict[str, Any]]
) -> dict[str, Any]:
    items = data.get(name)
    if not isinstance(items, list):
        return data
    return {**data, name: [change(item) if isinstance(item, dict) else item for item in items]}


def _result(data: dict[str, Any]) -> dict[str, Any]:
    found = dict(data)
    refused, compared = found.get("refused"), found.get("comparison")
    if refused == "":
        found["refused"] = None
    if found.get("us") in ODD:
        reason = compared.get("reason") if isinstance(compared, dict) else None
        found["us"] = _unmeasured(str(refused or reason or "nothing was timed"))
    if isinstance(found.get("check"), dict):
        found["check"] = _check(found["check"])
    if isinstance(found.get("cost"), dict):
        found["cost"] = _cost(found["cost"], found.get("us"))
    return found


def _check(data: dict[str, Any]) -> dict[str, Any]:
    found = dict(data)
    for name in ("error_ratio", "row_ratio", "rms_ratio"):
        if found.get(name) in ODD:
            exact = name == "error_ratio" and found[name] == "nan"
            why = "eager's own error is 0" if exact else "the output is not finite"
            found[name] = _unmeasured(why)
    return found


def _cost(data: dict[str, Any], us: Any) -> dict[str, Any]:
    found = dict(data)
    for name in ("host_us", "cpu_us", "cuda_us"):
        if found.get(name) in ODD:
            found[name] = None
    host_us = found.get("host_us")
    if isinstance(us, float) and isinstance(host_us, float) and host_us > us:
        found["host_us"] = _unmeasured("it was more than the whole call, at another moment")
    return found


# For each version, the function that makes the next version of it.
UPGRADES: Mapping[int, Callable[[dict[str, Any]], dict[str, Any]]] = {
    2: from_second,
    3: from_third,
    4: from_fourth,
}
