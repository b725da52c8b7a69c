"""Guards a welded module: checks at every call that the facts of its block still hold.

In: a module and the facts it depends on. Out: `Guard.holds`, and the change in words. Facts are
compared by address in C. If that fails, they are compared by value here, which also finds the words
for the change. Replacing a value by an equal one (a float by the same float) is not a change.
"""

from __future__ import annotations

import collections
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from torchweld import ops
from torchweld.welds.guarding.dependency_facts import (
    ABSENT,
    NAMELESS,
    PRESENT,
    TABLES,
    Entry,
    Facts,
    ModulePart,
    Name,
    Tie,
    contents_of,
    items_of,
    meaning,
)
from torchweld.welds.guarding.welded_structure import BACKWARD_HOOKS, HOOKS, inside, steps_of
from torchweld.welds.weld_marks import plain_class

# Compared by value: they are immutable, and equal values behave alike.
_PLAIN = (
    *(int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size),
    *(torch.layout, torch.memory_format, range, slice),
)
# The same numbers as in `Expect` in dependency_watch.h.
_VALUE, _ABSENT, _TENSOR, _TIED = range(4)


class Guard:
    """The facts of one welded module. A guard holds no reference to the module itself."""

    def __init__(self, module: nn.Module, facts: Facts) -> None:
        self.facts = facts
        # Weak references, so that a child that the user has replaced does not stay in memory.
        self._parts = [
            (part, None if not part.path else weakref.ref(found))
            for part in facts.parts
            if (found := inside(module, steps_of(part.path))) is not None
        ]
        self.watch: Any = None  # the comparison in C, once all facts have held

    def holds(self, module: nn.Module, training: bool, gradients: bool) -> bool:
        """Whether all facts still hold, and no module inside has hooks."""
        watch = self.watch
        if watch is not None and watch.holds(module, training, gradients):
            return True
        fresh = self._made_watch(module)
        # Compared after the watch was made, so that the next call finds a change in between.
        if self.changed(module) or self.hooked(module, gradients):
            return False
        if self.switched(module, training):
            return False
        self.watch = fresh
        return True

    def let_go(self) -> None:
        """Drops the objects that C compares; the user may have replaced some of them."""
        self.watch = None

    def switched(self, module: nn.Module, training: bool) -> bool:
        """Whether a module inside whose training mode is read is in the other mode."""
        found = (inside(module, steps_of(path)) for path in self.facts.switched)
        return any(inner is None or inner.training is not training for inner in found)

    def _made_watch(self, module: nn.Module) -> Any:
        """The comparison in C, made of the objects that are in place now."""
        if ops.compiled is None:
            return None
        numbers = {part.path: i for i, (part, _) in enumerate(self._parts)}
        switched = frozenset(self.facts.switched)
        modules = []
        for part, ref in self._parts:
            children: list[Any] = []
            for name, path in part.children:
                children += [name, -1 if path is None else numbers[path]]
            kind = type(module) if ref is None else part.kind
            modules.append((ref, kind, tuple(children), part.path in switched))
        kinds = {kind: None for _, kind, _, _ in modules} | dict.fromkeys(
            fact.kind for fact in self.facts.classes
        )
        for kind in kinds:
            getattr(kind, "forward", None)  # a lookup gives the class a version tag if it has none
        facts = self.facts
        functions = [fact.function for fact in facts.functions]
        # The dictionaries in which tensors are looked up must stay the same objects too.
        tables = {(e.path, e.table): None for e in facts.entries if e.value is PRESENT}
        holders = [Entry(path, "__dict__", None, table, None, "") for path, table in tables]
        return ops.compiled.Watch(
            modules,
            [
                *(_entry(fact, numbers, module) for fact in (*facts.entries, *holders)),
                *(_tie(fact, numbers) for fact in facts.ties),
            ],
            [(fact.container, items_of(fact.container)) for fact in facts.items],
            [(fact.thing, fact.kind, fact.own) for fact in facts.kinds],
            [(kind,) for kind in kinds],
            [(f, f.__code__, f.__defaults__, f.__kwdefaults__) for f in functions],
            [(fact.cell, None) for fact in facts.cells],
        )

    # ---- changes in words ----

    def changed(self, module: nn.Module) -> str | None:
        """The first change of the module, or of something it depends on, in words; None if none."""
        return next(self._changes(module), None)

    def _changes(self, module: nn.Module) -> Iterator[str]:
        for part, ref in self._parts:
            found = inside(module, steps_of(part.path))
            change = _changed_part(part, found, module if ref is None else ref())
            if change is not None:
                yield change
            yield from self._changed_entries(part.path, module)
        for fact in self.facts.classes:
            for name, value in fact.names.items():
                if not _same(meaning(fact.kind, name), value):
                    yield f"{fact.kind.__name__}.{name} was replaced"
        yield from self._changed_entries(None, module)
        for tie in self.facts.ties:
            if _tensor_at(module, tie.one) is not _tensor_at(module, tie.other):
                yield f"{_owned(tie.what)} is no longer tied"
        for kind in self.facts.kinds:
            if type(kind.thing) is not kind.kind:
                yield f"{_owned(kind.what)} became a {type(kind.thing).__name__}"
            elif kind.thing.__dict__ is not kind.own:
                yield f"{_owned(kind.what)} has another __dict__"
        for items in self.facts.items:
            now = items_of(items.container)
            if len(now) != len(items.values) or not _all_same(items.container, now, items.values):
                yield f"{_owned(items.what)} was changed in place"
        for one in self.facts.functions:
            code, defaults = one.function.__code__, one.function.__defaults__
            if code is not one.code or not _same_defaults(defaults, one.defaults):
                yield f"{one.what} has different code or defaults"
            elif one.function.__kwdefaults__ is not one.kwdefaults:
                yield f"{one.what} has different defaults"
        for cell in self.facts.cells:
            if not _same(contents_of(cell.cell), cell.contents):
                yield f"{cell.what}, was changed"

    def _changed_entries(self, path: str | None, module: nn.Module) -> Iterator[str]:
        for entry in self.facts.entries:
            if entry.path == path and not _same_entry(_found(entry, module), entry.value):
                if path is not None and entry.key == "forward":
                    yield f"{path or NAMELESS} has a forward of its own"
                else:
                    yield f"{_owned(entry.what)} was changed"

    def hooked(self, module: nn.Module, gradients: bool) -> str | None:
        """The first module inside with hooks that would run, in words; None if there is none."""
        for part, ref in self._parts:
            found = None if ref is None else ref()
            for kind in (*HOOKS, *BACKWARD_HOOKS[: 2 * gradients]):
                if found is not None and found.__dict__[kind]:
                    return f"{part.path} has {kind.strip('_').replace('_', ' ')}"
        return None


def _changed_part(
    part: ModulePart, found: nn.Module | None, expected: nn.Module | None
) -> str | None:
    name = part.path or NAMELESS
    if found is None:
        return f"{name} is gone"
    if found is not expected:
        return f"{name} was replaced by a {type(found).__name__}"
    if plain_class(type(found)) is not plain_class(part.kind):
        return f"{name} became a {type(found).__name__}"
    children = [key for key, _ in part.children]
    if list(found._modules) != children:
        return f"{name} has different children ({', '.join(found._modules) or 'none'})"
    empty = [key for key, path in part.children if path is None]
    filled = [key for key in empty if found._modules[key] is not None]
    return f"{name}.{filled[0]} is no longer None" if filled else None


def _found(entry: Entry, module: nn.Module) -> Any:
    holder: Any = entry.holder
    if entry.path is not None:
        inner = inside(module, steps_of(entry.path))
        if inner is None:
            return ABSENT
        holder = inner.__dict__ if entry.table == "__dict__" else inner.__dict__[entry.table]
    return holder.get(entry.key, ABSENT)


def _entry(fact: Entry, numbers: dict[str, int], module: nn.Module) -> tuple[Any, ...]:
    """An entry for C: module, table, dictionary, key, what is expected, value."""
    expect = _ABSENT if fact.value is ABSENT else _TENSOR if fact.value is PRESENT else _VALUE
    number = -1 if fact.path is None else numbers[fact.path]
    table = TABLES.index(fact.table) if fact.table else 0
    value = _found(fact, module) if expect == _VALUE else None
    return number, table, fact.holder, fact.key, expect, value


def _tie(fact: Tie, numbers: dict[str, int]) -> tuple[Any, ...]:
    one, other = fact.one, fact.other
    tied = (numbers[other.path], TABLES.index(other.table), other.key)
    return numbers[one.path], TABLES.index(one.table), None, one.key, _TIED, tied


def _tensor_at(module: nn.Module, name: Name) -> Any:
    inner = inside(module, steps_of(name.path))
    return None if inner is None else inner.__dict__[name.table].get(name.key)


def _owned(what: str) -> str:
    """ "its act" or "up's negative_slope"; a name with spaces, "global SCALE of model", stays."""
    if " " in what:
        return what
    owner, _, name = what.rpartition(".")
    return f"{owner}'s {name}" if owner and owner != NAMELESS else f"its {name}"


def _same_entry(now: Any, before: Any) -> bool:
    if before is PRESENT:
        return now is not ABSENT and now is not None
    return _same(now, before)


def _same(now: Any, before: Any) -> bool:
    if now is before:
        return True
    if type(now) is not type(before):
        return False
    if isinstance(now, tuple) and type(now) is tuple:
        return len(now) == len(before) and all(map(_same, now, before))
    if isinstance(now, (float, complex)):
        return repr(now) == repr(before)  # repr tells -0.0 from 0.0, and NaN equals NaN
    return type(now) in _PLAIN and bool(now == before)


def _all_same(container: Any, now: tuple[Any, ...], before: tuple[Any, ...]) -> bool:
    if isinstance(container, (set, frozenset)):
        return collections.Counter(map(_key, now)) == collections.Counter(map(_key, before))
    return all(map(_same, now, before))


def _key(value: Any) -> Any:
    return (type(value), value) if type(value) in _PLAIN else id(value)


def _same_defaults(now: Any, before: Any) -> bool:
    return now is before or (
        now is not None
        and before is not None
        and len(now) == len(before)
        and all(map(_same, now, before))
    )
