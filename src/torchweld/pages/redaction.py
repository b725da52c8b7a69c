"""`redacted`: a page without names, to be sent to others. Numbers and structure stay.

In: a `Page`. Out: the same, with stand-ins for names of modules, of classes that are not torch's,
of ops that are neither torch's nor torchweld's, of files, machines, runs, commits and titles, and
for every word in a text that is not torchweld's own. A name has one stand-in on the whole page:
`layers.3.mlp.up` is `m1.3.m2.m3` wherever it stands.

Every field that holds text has a rule in `RULES`; a field without one fails, so that a new one
cannot be forgotten.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from datetime import datetime
from functools import cache
from typing import Any, get_args, get_origin, get_type_hints

from torchweld.core.not_measured import NotMeasured
from torchweld.pages.page_records import Page
from torchweld.pages.public_names import WORD, is_own_word, is_public_op, is_torch_class

# ---- which rule is for which field ----

# Class and field -> the name of a rule below. Fields of fixed words (Literal) need none.
RULES: dict[str, str] = {
    "Page.title": "text",
    "Page.verdict": "text",
    "Page.not_comparable": "text",
    "Page.environment": "environment",
    "Page.command": "text",
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
    "ModuleRow.extra": "text",
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
    "HistoryPlot.title": "text",
    "HistoryPoint.name": "run",
    "HistoryPoint.kind": "text",
    "HistoryPoint.created": "date",
    "HistoryPoint.commit": "commit",
    "HistoryPoint.verdict": "text",
    "ErrorRow.block": "text",
    "ErrorRow.tensor": "text",
    "Strip.name": "text",
    "Strip.verdict": "text",
}
# Rows of the environment whose values stay: they tell how fast a machine is, not whose it is.
KEPT_ROWS = ("CPU", "instruction set", "threads", "torch", "torchweld", "kernels", "rank", "seed")
# Parts of a path, and classes, that are torch's or torchweld's own.
KEPT_PARTS = frozenset({"", "*", "weight", "bias", "optimizer", "the model"})
KEPT_KINDS = frozenset({"", "workload", "Optimizer"})
# Words of sentences that are names of modules in many models; alone they stay.
PROSE = frozenset(
    (
        *("a", "all", "an", "and", "as", "at", "backward", "be", "block", "blocks", "by", "cache"),
        *("call", "calls", "copy", "cpu", "device", "down", "each", "first", "forward", "from"),
        *("gate", "group", "host", "in", "input", "inputs", "is", "it", "key", "last", "layer"),
        *("layers", "left", "less", "linear", "linears", "loss", "machine", "memory", "mode"),
        *("model", "module", "modules", "more", "no", "norm", "not", "of", "on", "one", "op"),
        *("ops", "or", "other", "out", "output", "over", "right", "row", "rows", "run", "same"),
        *("scale", "size", "step", "steps", "table", "test", "text", "the", "time", "to", "torch"),
        *("up", "use", "value", "weight", "weights", "whole", "with"),
    )
)
# A list of numbers in a pattern of paths: "layers.[0-3,5].mlp".
_NUMBERS = re.compile(r"\d+|\[[\d,-]+\]")
_SIZES = re.compile(
    r"\d[\d.,x×→–…:-]*(?:e[+-]?\d+)?(?:x|k|M|G|T|B|kB|MB|GB|s|ms|µs|ns|%|FLOP|th|st|nd|rd)?"
)
_ADDRESS = re.compile(r"\d+\.\d+\.\d+\.\d+|@")
_LETTERED = re.compile(r"\w*[^\W\d]\w*")
# A size, or a stand-in that was put into the text before.
_PLAIN = re.compile(rf"{_SIZES.pattern}|m\d+")
_FILE = re.compile(r"[~/].*|.*\.(py|pyc|json|gz|html?|so|sqlite|cpp|cu|h|csv|pt|txt|sh)(:.*)?")
# The name of a GPU, which says no more than that of a CPU; or what blanks and brackets enclose.
_PIECE = re.compile(
    r"(?P<device>\b(?:NVIDIA|AMD|Intel)(?: (?:Instinct|GeForce|RTX|GTX|Radeon|Tesla|Arc))* "
    r"[A-Z]{0,4}\d+[A-Z]*(?:-[A-Z\d]+)*\b)|[^\s()\[\]{},;\"'`=“”|<>→]+"
)
_TORCH = re.compile(r"(torch|nn|tw|F|aten|torchweld)(\.\w+)+")
_ENDS = ".:!?…"


def redacted(page: Page) -> Page:
    """The page with stand-ins for all names."""
    names = _StandIns()
    for rule, text in _texts(page):
        names.learn(rule, text)
    found: Page = _walk(page, names)
    return found


def _walk(value: Any, names: _StandIns) -> Any:
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
        changed[one.name] = _walk(held, names) if rule is None else names.apply(rule, held)
    return replace(value, **changed)


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
    """Every text with its rule."""
    if isinstance(value, tuple):
        for item in value:
            yield from _texts(item)
    elif is_dataclass(value) and not isinstance(value, NotMeasured):
        kind: Any = type(value)
        for one in fields(value):
            held, rule = getattr(value, one.name), rule_of(kind, one.name)
            if rule is None:
                yield from _texts(held)
            else:
                yield from ((rule, text) for text in _each(held))


def _each(held: Any) -> Iterator[str]:
    if isinstance(held, str):
        yield held
    elif isinstance(held, tuple):
        for item in held:
            yield from _each(item)


class _StandIns:
    """Names that were met, each with its stand-in. Each rule is a method."""

    def __init__(self) -> None:
        self._given: dict[str, dict[str, str]] = {}
        self._odd: list[str] = []  # paths, or parts of them, that are not words

    def _stand_in(self, sort: str, name: str) -> str:
        """The same for the same name: m1, m2, …"""
        given = self._given.setdefault(sort, {})
        return given.setdefault(name, f"{sort}{len(given) + 1}")

    def _known(self, sort: str, name: str) -> bool:
        return name in self._given.get(sort, {})

    def learn(self, rule: str, text: str) -> None:
        """Names that are known to be names, before texts are looked through."""
        if rule == "path":
            self.path(text)
            odd = [part for part in text.split(".") if not re.fullmatch(r"\w*|\*", part)]
            self._odd += [part for part in odd if part not in self._odd]
        elif rule == "kind":
            self.kind(text)

    def apply(self, rule: str, held: Any) -> Any:
        if isinstance(held, str):
            way: Callable[[str], str] = getattr(self, rule)
            return way(held)
        if rule == "environment":
            return tuple(self._environment(*row) for row in held)
        if isinstance(held, tuple):
            return tuple(self.apply(rule, item) for item in held)
        return _walk(held, self)

    # ---- rules ----

    def keep(self, text: str) -> str:
        return text

    def path(self, text: str) -> str:
        return ".".join(map(self._part, text.split(".")))

    def _part(self, part: str) -> str:
        if part in KEPT_PARTS or _NUMBERS.fullmatch(part):
            return part
        return self._stand_in("m", part)

    def kind(self, text: str) -> str:
        public = text in KEPT_KINDS or is_torch_class(text.rpartition(".")[2])
        return text if public else self._stand_in("Class", text)

    def what(self, text: str) -> str:
        """What a block computes, or the class of a module that was refused."""
        return self.kind(text) if WORD.fullmatch(text) else self.text(text)

    def machine(self, text: str) -> str:
        return self._stand_in("machine", text) if text else ""

    def run(self, text: str) -> str:
        return self._stand_in("run", text) if text else ""

    def commit(self, text: str) -> str:
        return self._stand_in("commit", text) if text else ""

    def date(self, text: str) -> str:
        try:
            datetime.fromisoformat(text)
        except ValueError:
            return self.text(text)
        return text

    def name(self, text: str) -> str:
        """A frame: an op, a kernel, or a module as "mlp: Mlp"."""
        if is_public_op(text):
            return text
        path, colon, kind = text.rpartition(": ")
        if colon and (self._known("Class", kind) or is_torch_class(kind)):
            return f"{self.path(path)}{colon}{self.kind(kind)}"
        if self._known("Class", text):
            return self.kind(text)
        if "::" in text:
            return self._stand_in("op", text)
        if any(self._known("m", part) for part in text.split(".")):
            return self.path(text)
        return self.text(text)

    def text(self, text: str) -> str:
        """A sentence, or a title: names and words that are not torchweld's own are replaced."""
        for part in sorted(self._odd, key=len, reverse=True):
            text = text.replace(part, self._part(part))
        return _PIECE.sub(self._piece, text)

    # ---- within a text ----

    def _piece(self, found: re.Match[str]) -> str:
        return found[0] if found["device"] else self._chunk(found[0])

    def _chunk(self, chunk: str) -> str:
        """A piece without spaces: a word, a number, a path, a file, an op."""
        plain = chunk.rstrip(_ENDS)
        ending = chunk[len(plain) :]
        if _ADDRESS.search(plain):
            return self._stand_in("host", plain) + ending
        if not WORD.search(plain) or _SIZES.fullmatch(plain) or _TORCH.fullmatch(plain):
            return chunk
        if "::" in plain:
            public = is_public_op(plain)
            return (plain if public else self._stand_in("op", plain)) + ending
        if _FILE.fullmatch(plain):
            return self._stand_in("file", plain) + ending
        if re.search(r"\w\.[^\W\d]|\.\*|\*\.|\w\.\d+\b(?!\.\d)", plain) and WORD.match(plain):
            return self.path(plain) + ending
        return _LETTERED.sub(lambda found: self._word(found[0]), plain) + ending

    def _word(self, word: str) -> str:
        if self._known("Class", word):
            return self.kind(word)
        if self._known("m", word) and word not in PROSE:
            return self._stand_in("m", word)
        if is_own_word(word) or is_torch_class(word) or _PLAIN.fullmatch(word):
            return word
        return self._stand_in("w", word)

    def _environment(self, name: str, value: str) -> tuple[str, str]:
        if name in KEPT_ROWS:
            return name, value
        ways: dict[str, Callable[[str], str]] = {
            "machine": self.machine,
            "commit": self.commit,
            "model": self.kind,
        }
        return self.text(name), ways.get(name, self.text)(value)
