"""`redacted`: a page without names, to be sent to others. Numbers and structure stay.

In: a `Page`. Out: the same, with stand-ins for names of modules, of classes that are not torch's,
of ops that are neither torch's nor torchweld's, of files, machines, runs, commits and titles, and
for every word in a text that is not torchweld's own. A name has one stand-in on the whole page:
`layers.3.mlp.up` is `m1.3.m2.m3` wherever it stands. The page is marked, since the stand-ins of
another page are those of other names.

Every field that holds text has a rule in `RULES`; a field without one fails, so that a new one
cannot be forgotten.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from functools import cache
from typing import Any, get_args, get_origin, get_type_hints

from torchweld.core.not_measured import NotMeasured
from torchweld.pages.page_records import Page
from torchweld.pages.stand_ins import StandIns

# ---- which rule is for which field ----

# Class and field -> the name of a rule, a method of `StandIns`. Fields of fixed words (Literal)
# need none.
RULES: dict[str, str] = {
    "Page.title": "title",
    "Page.verdict": "verdict",
    "Page.not_comparable": "text",
    "Page.environment": "environment",
    "Page.command": "command",
    "Page.notes": "text",
    "PageSide.name": "text",
    "PageSide.notices": "text",
    "About.what": "kind",
    "About.inputs": "text",
    "About.torch": "keep",
    "About.cpu": "keep",
    "About.fingerprint": "machine",
    "About.load": "text",
    "ModuleRow.path": "path",
    "ModuleRow.kind": "kind",
    "ModuleRow.extra": "extra",
    "ModuleRow.bound": "text",
    "ModuleRow.why": "text",
    "Flame.names": "name",
    "Flame.note": "text",
    "FlameDiff.names": "name",
    "Lane.name": "text",
    "Timeline.names": "name",
    "Timeline.note": "text",
    "DeviceView.name": "text",
    "DeviceView.cores": "text",
    "CallRow.name": "name",
    "ProductRow.name": "name",
    "GemmName.maker": "text",
    "GemmName.layout": "text",
    "GemmName.dtype": "text",
    "Roof.name": "text",
    "RoofPoint.name": "name",
    "RoofPoint.phase": "text",
    "RoofPoint.bound": "text",
    "AliveBytes.module": "path",
    "AliveBytes.op": "name",
    "AliveBytes.phase": "text",
    "Finding.rule": "text",
    "Finding.title": "text",
    "Finding.cause": "text",
    "Finding.action": "text",
    "Finding.evidence": "text",
    "Finding.waste": "text",
    "Finding.modules": "path",
    "BlockRow.path": "path",
    "BlockRow.what": "what",
    "BlockRow.outcome": "text",
    "BlockRow.serves": "text",
    "BlockRow.reason": "text",
    "CurvePlot.title": "text",
    "Curve.name": "text",
    "CurvePoint.verdict": "text",
    "CrossoverMap.title": "text",
    "CrossoverMap.rows": "text",
    "CrossoverMap.columns": "text",
    "MapCell.best": "text",
    "LaunchedRow.cell": "text",
    "LaunchedRow.side": "text",
    "LaunchedRow.kinds": "text",
    "KernelRow.name": "name",
    "KernelRow.category": "text",
    "HistoryPlot.title": "plot",
    "HistoryPoint.name": "run",
    "HistoryPoint.kind": "text",
    "HistoryPoint.created": "date",
    "HistoryPoint.commit": "commit",
    "HistoryPoint.verdict": "text",
    "ErrorRow.block": "text",
    "ErrorRow.tensor": "tensor",
    "Strip.name": "text",
    "Strip.verdict": "text",
}


def redacted(page: Page) -> Page:
    """The page with stand-ins for all names."""
    names = StandIns()
    names.learn(tuple(_texts(page)), page.environment)
    found: Page = _walk(page, names)
    return replace(found, redacted=True)


def _walk(value: Any, names: StandIns) -> Any:
    """The value with every text replaced by its rule."""
    if isinstance(value, NotMeasured):
        return NotMeasured(names.text(value.reason))
    if isinstance(value, tuple):
        return tuple(_walk(item, names) for item in value)
    if not is_dataclass(value) or isinstance(value, type):
        return value
    changed = {}
    for one in fields(value):
        held = getattr(value, one.name)
        rule = rule_of(type(value), one.name)
        changed[one.name] = _walk(held, names) if rule is None else _apply(rule, held, names)
    return replace(value, **changed)


def _apply(rule: str, held: Any, names: StandIns) -> Any:
    if isinstance(held, str):
        return names.way(rule)(held)
    if rule == "environment":
        return tuple(names.environment(*row) for row in held)
    if isinstance(held, tuple):
        return tuple(_apply(rule, item, names) for item in held)
    return _walk(held, names)


@cache
def rule_of(kind: Any, name: str) -> str | None:
    """The rule of a field; None if it cannot hold a text of its own."""
    return RULES[f"{kind.__name__}.{name}"] if _holds_text(get_type_hints(kind)[name]) else None


def _holds_text(hint: Any) -> bool:
    """Whether a text stands in the field itself, or in a list of texts."""
    if hint is str:
        return True
    inside = get_args(hint) if get_origin(hint) is not None else ()
    return str(get_origin(hint)) != "typing.Literal" and any(map(_holds_text, inside))


def _texts(value: Any) -> Iterator[tuple[str, str]]:
    """Rule and text, of every text but those of the environment, whose rows have rules."""
    if isinstance(value, NotMeasured):
        yield "text", value.reason
    elif isinstance(value, tuple):
        for item in value:
            yield from _texts(item)
    elif is_dataclass(value):
        kind: Any = type(value)
        for one in fields(value):
            held, rule = getattr(value, one.name), rule_of(kind, one.name)
            if rule is None or isinstance(held, NotMeasured):
                yield from _texts(held)
            elif rule != "environment":
                yield from ((rule, text) for text in _each(held))


def _each(held: Any) -> Iterator[str]:
    if isinstance(held, str):
        yield held
    elif isinstance(held, tuple):
        for item in held:
            yield from _each(item)
