"""Holds the facts that a forward depends on: records made by `dependencies`, compared by a guard.

A fact about a module of the block has the module's path inside the block, so facts found on a clone
hold for the original too. All other facts hold the objects themselves. `what` is a fact in words.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn


class _Mark:
    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name


ABSENT = _Mark("absent")
# A class has nn.Module's own attribute, which torch itself replaces while it exports a model.
INHERITED = _Mark("inherited")
PRESENT = _Mark("present")  # any tensor; it is looked up at every call

TABLES = ("__dict__", "_parameters", "_buffers")  # dictionaries of a module
NAMELESS = "it"  # how messages call the module of the block itself


@dataclass(frozen=True, eq=False)
class ModulePart:
    """A module of the block, its class, and its children in their order."""

    path: str
    kind: type
    children: tuple[tuple[str, str | None], ...]  # name and path; None: the child is None


@dataclass(frozen=True, eq=False)
class Entry:
    """The value of a key in one of a module's TABLES, or in the dictionary `holder`."""

    path: str | None  # of the module; None: see holder
    table: str  # one of TABLES; "": see holder
    holder: dict[str, Any] | None
    key: str
    value: Any  # ABSENT, PRESENT, or the object
    what: str


@dataclass(frozen=True, eq=False)
class Items:
    """The items of a list, dictionary, set or deque, in its order."""

    container: Any
    values: tuple[Any, ...]
    what: str


@dataclass(frozen=True, eq=False)
class ObjectKind:
    """The class of an object that is not a module of the block."""

    thing: Any
    kind: type
    own: dict[str, Any]  # its `__dict__`
    what: str


@dataclass(frozen=True, eq=False)
class ClassNames:
    """What a class has under some names, including what it inherits."""

    kind: type
    names: dict[str, Any]
    what: str


@dataclass(frozen=True, eq=False)
class FunctionFact:
    """The code of a function that ran, and its defaults."""

    function: types.FunctionType
    code: types.CodeType
    defaults: tuple[Any, ...] | None
    kwdefaults: dict[str, Any] | None
    what: str


@dataclass(frozen=True, eq=False)
class ClosureCell:
    """The value of a free variable of a function that ran."""

    cell: types.CellType
    contents: Any
    what: str


class Name(NamedTuple):
    """Where a tensor of the block is found."""

    path: str  # of its module
    table: str
    key: str


@dataclass(frozen=True, eq=False)
class Tie:
    """Two names of one tensor, which have to stay names of one tensor."""

    one: Name
    other: Name
    what: str


@dataclass(frozen=True, eq=False, kw_only=True)
class Facts:
    parts: tuple[ModulePart, ...] = ()
    entries: tuple[Entry, ...] = ()
    items: tuple[Items, ...] = ()
    kinds: tuple[ObjectKind, ...] = ()
    classes: tuple[ClassNames, ...] = ()
    functions: tuple[FunctionFact, ...] = ()
    cells: tuple[ClosureCell, ...] = ()
    modes: frozenset[str] = frozenset()  # modes the code asks about: see MODES in questions_asked
    ties: tuple[Tie, ...] = ()
    asks_sizes: bool = True  # whether the code may ask how large a tensor is
    switched: tuple[str, ...] = ()  # paths of the modules whose training mode is read

    @property
    def words(self) -> tuple[str, ...]:
        """The facts in words."""
        groups = (self.entries, self.items, self.classes, self.functions, self.cells)
        named = [fact.what for group in groups for fact in group]
        named += [f"mode: {mode}" for mode in sorted(self.modes)]
        return tuple(dict.fromkeys(named))


class Observed:
    """The present values of all facts that are not about the block's modules."""

    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        self._before = list(self._values())

    def _values(self) -> Iterator[tuple[str, Any]]:
        for entry in self._facts.entries:
            if entry.holder is not None:
                yield entry.what, entry.holder.get(entry.key, ABSENT)
        for fact in self._facts.classes:
            for name in fact.names:
                yield f"{fact.kind.__name__}.{name}", meaning(fact.kind, name)
        for items in self._facts.items:
            yield items.what, items_of(items.container)
        for cell in self._facts.cells:
            yield cell.what, contents_of(cell.cell)

    def changed(self) -> str:
        """The first fact whose value has changed, in words; "" if there is none."""
        for (what, now), (_, before) in zip(self._values(), self._before, strict=True):
            same = now is before
            if isinstance(now, tuple) and isinstance(before, tuple):
                same = len(now) == len(before) and all(
                    a is b for a, b in zip(now, before, strict=True)
                )
            if not same:
                return what
        return ""


def contents_of(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not set yet
        return ABSENT


def looked_up(kind: type, name: str) -> Any:
    """What a class has under a name, found without calling anything; ABSENT if nothing."""
    for base in kind.__mro__:
        if name in base.__dict__:
            return base.__dict__[name]
    return ABSENT


def meaning(kind: type, name: str) -> Any:
    """`looked_up`, but INHERITED for anything that comes from nn.Module itself."""
    found = looked_up(kind, name)
    own = nn.Module.__dict__.get(name, ABSENT)
    return INHERITED if found is own and own is not ABSENT else found


def items_of(container: Any) -> tuple[Any, ...]:
    """A container's items as one tuple; for a dictionary, keys and values in turn."""
    if isinstance(container, dict):
        return tuple(thing for pair in container.items() for thing in pair)
    return tuple(container)
