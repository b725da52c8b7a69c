"""Remakes objects that lead to modules, so that they lead to the modules of a clone instead.

In: an object of the model. Out: a new object of the same kind. `links_of(value)` lists the objects
that a value leads to. Objects that can be filled later (lists, dicts, sets, cells, functions, plain
objects) are made as empty shells and then filled. The others (tuples, methods, partials, weak
references) are made when they are first needed. `why_not` says why an object cannot be remade. No
code of these objects is called.
"""

from __future__ import annotations

import functools
import gc
import logging
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, fx

# Exactly these types; an instance of a subclass is treated as an object.
CONTAINERS = (list, dict, set, OrderedDict, defaultdict, deque)

_FILLED = (OrderedDict, defaultdict, dict, list, set, deque)  # subclasses before their bases
_FROZEN = (tuple, frozenset)
_ATOMS = frozenset([int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device])
# Objects that are not followed: they lead to many unrelated ones, and never to values that a
# module computes with.
_LEAVES = (
    *(type, types.ModuleType, types.CodeType, types.FrameType, types.TracebackType),
    *(BaseException, Tensor, torch.Generator, logging.Logger, fx.Graph, fx.Node),
)
_VIEWS = {
    type({}.keys()): dict.keys,
    type({}.values()): dict.values,
    type({}.items()): dict.items,
    type(OrderedDict().keys()): OrderedDict.keys,
    type(OrderedDict().values()): OrderedDict.values,
    type(OrderedDict().items()): OrderedDict.items,
}
_REFS = (weakref.ref, weakref.KeyedRef, weakref.WeakMethod)
_PROXIES = (weakref.ProxyType, weakref.CallableProxyType)
_BUILTIN = (types.BuiltinMethodType, types.MethodWrapperType)
_TRIES = 100


def is_leaf(value: Any) -> bool:
    """Whether the value leads to no other object."""
    kind = type(value)
    if kind in _ATOMS or not gc.is_tracked(value):
        return True
    if kind is types.FunctionType:
        parts = (value.__closure__, value.__defaults__, value.__kwdefaults__, value.__dict__)
        return not any(parts)
    return issubclass(kind, _LEAVES)


def entries_of(own: dict[Any, Any]) -> list[tuple[Any, Any]]:
    """Items of a dict in its order; other threads may be changing the dict."""
    items: Any = OrderedDict.items if isinstance(own, OrderedDict) else dict.items
    return _steady(lambda: list(items(own)))


def _items_of(value: Any) -> list[Any]:
    base: Any = next(base for base in (*_FILLED, *_FROZEN) if isinstance(value, base))
    return _steady(lambda: list(base.__iter__(value)))


def _steady(read: Callable[[], list[Any]]) -> list[Any]:
    for _ in range(_TRIES):
        with suppress(RuntimeError):  # its size changed during the read
            return read()
    return read()


# ---- the objects a value leads to ----


def links_of(value: Any) -> list[tuple[str, Any]]:
    """The objects a value leads to, each with its name, "" if it has none."""
    kind = type(value)
    if kind is types.MethodType:
        return [("", value.__self__), ("", value.__func__)]
    if kind is types.FunctionType:
        parts = (*(value.__closure__ or ()), value.__defaults__, value.__kwdefaults__)
        return [*_unnamed(*parts), *entries_of(value.__dict__)]
    if kind is types.CellType:
        return _unnamed(*_contents(value))
    if issubclass(kind, weakref.ref):
        return _unnamed(weakref.ref.__call__(value))
    if kind in _PROXIES:
        return _unnamed(_proxied(value))
    links: list[tuple[str, Any]] = []
    if issubclass(kind, functools.partial):
        links += _unnamed(value.func, value.args, value.keywords)
    elif issubclass(kind, dict):
        for key, item in entries_of(value):
            links += [(str(key) if type(key) in _ATOMS else "", item), ("", key)]
        if issubclass(kind, defaultdict):
            links.append(("", value.default_factory))
    elif issubclass(kind, (*_FILLED, *_FROZEN)):
        links += [(str(i), item) for i, item in enumerate(_items_of(value))]
    else:  # an object: its attributes, and whatever else the garbage collector sees
        links += _unnamed(*(x for x in gc.get_referents(value) if not _is_namespace(x)))
    if kind not in CONTAINERS and kind not in _FROZEN:
        links = [*entries_of(_dict_of(value)), *slots_of(value, kind), *links]
    return [(name, linked) for name, linked in links if type(linked) not in _ATOMS]


def _unnamed(*values: Any) -> list[tuple[str, Any]]:
    return [("", value) for value in values if value is not None]


def _contents(cell: types.CellType) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:  # it is empty
        return []


def _proxied(proxy: Any) -> Any:
    try:
        return proxy.__repr__.__self__
    except ReferenceError:
        return None


def _is_namespace(value: Any) -> bool:
    """Whether it is the globals of a Python module, which a frame leads to."""
    return type(value) is dict and ("__builtins__" in value or "__spec__" in value)


def _dict_of(value: Any) -> dict[str, Any]:
    try:
        found = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return found if isinstance(found, dict) else {}


def slots_of(value: Any, kind: type) -> list[tuple[str, Any]]:
    """Names and values of the `__slots__` that are set."""
    found = []
    for name, slot in _slots(kind):
        with suppress(AttributeError):  # not set
            found.append((name, slot.__get__(value)))
    return found


def _slots(kind: type) -> Iterator[tuple[str, Any]]:
    for base in kind.__mro__:
        if "__slots__" in vars(base):
            for name, slot in vars(base).items():
                if type(slot) is types.MemberDescriptorType:
                    yield name, slot


# ---- objects that cannot be remade ----


def why_not(value: Any) -> str:
    """Why a value that leads to a module of the model cannot be remade; "" if it can."""
    kind = type(value)
    if issubclass(kind, weakref.ref):
        return "" if kind in _REFS else _leads(kind)
    if kind in _VIEWS or kind in _PROXIES or kind in _BUILTIN:
        return ""
    if kind in (types.MethodType, types.FunctionType, types.CellType, types.MappingProxyType):
        return ""
    if kind in (functools.partial, *CONTAINERS, *_FROZEN):
        return ""
    return why_not_made(kind)


def why_not_made(kind: type) -> str:
    if hasattr(kind, "__del__"):
        return f"is a {kind.__name__}, whose __del__ would run for the copy too; take it out"
    base = _base_of(kind)
    try:
        base.__new__(kind, *_arguments(base))
    except TypeError:
        return _leads(kind)
    return ""


def _leads(kind: type) -> str:
    return (
        f"is a {kind.__module__}.{kind.__qualname__}, which leads to modules of the model and "
        "cannot be copied; take it out of the model, or let it hold no modules"
    )


def _base_of(kind: type) -> Any:
    """The built-in type that a class is derived from."""
    bases = (*_FILLED, *_FROZEN, functools.partial, types.SimpleNamespace)
    return next((base for base in bases if issubclass(kind, base)), object)


def _arguments(base: type) -> tuple[Any, ...]:
    return (_arguments,) if base is functools.partial else ()


# ---- remaking ----


def is_open(value: Any) -> bool:
    """Whether the value is made empty and filled later."""
    kind = type(value)
    if kind in (types.FunctionType, types.CellType):
        return True
    if kind in _VIEWS or kind in (*_PROXIES, *_BUILTIN, types.MethodType, types.MappingProxyType):
        return False
    return not issubclass(kind, (*_FROZEN, functools.partial, weakref.ref))


def make_shell(value: Any, made: dict[int, Any], anew: dict[int, Any]) -> None:
    """Makes the empty shell of an open value, and enters it into `made`."""
    if id(value) not in made:  # a function's shell has made its cells already
        made[id(value)] = _shell(value, made, anew)


def _shell(value: Any, made: dict[int, Any], anew: dict[int, Any]) -> Any:
    kind = type(value)
    if kind is types.CellType:
        return types.CellType()
    if kind is types.FunctionType:
        cells = value.__closure__ or ()
        for cell in cells:
            if id(cell) in anew:
                make_shell(cell, made, anew)
        # A cell that leads to no module stays shared with the original function.
        own = tuple(made.get(id(cell), cell) for cell in cells)
        name = value.__name__
        return types.FunctionType(value.__code__, value.__globals__, name, None, own or None)
    new = _base_of(kind).__new__(kind)
    if issubclass(kind, deque):
        deque.__init__(new, (), value.maxlen)
    return new


def fill(new: Any, value: Any, remake: Remake) -> None:
    kind = type(value)
    if kind is types.CellType:
        for contents in _contents(value):
            new.cell_contents = remake(contents)
        return
    if kind is types.FunctionType:
        new.__defaults__ = remake(value.__defaults__)
        new.__kwdefaults__ = remake(value.__kwdefaults__)
        new.__qualname__, new.__module__ = value.__qualname__, value.__module__
        new.__doc__ = value.__doc__
    elif issubclass(kind, dict):
        base: Any = OrderedDict if issubclass(kind, OrderedDict) else dict
        for key, item in entries_of(value):
            base.__setitem__(new, remake(key), remake(item))
        if issubclass(kind, defaultdict):
            new.default_factory = remake(value.default_factory)
    elif issubclass(kind, set):
        set.update(new, map(remake, _items_of(value)))
    elif issubclass(kind, (list, deque)):
        _base_of(kind).extend(new, map(remake, _items_of(value)))
    if kind not in CONTAINERS:
        _fill_attributes(new, value, remake)


def _fill_attributes(new: Any, value: Any, remake: Remake) -> None:
    attributes = _dict_of(value)
    if attributes:
        _dict_of(new).update({key: remake(item) for key, item in entries_of(attributes)})
    fill_slots(new, value, remake)


def fill_slots(new: Any, value: Any, remake: Remake) -> None:
    found = dict(slots_of(value, type(value)))
    for name, slot in _slots(type(value)):
        if name in found:
            slot.__set__(new, remake(found[name]))


def copied(value: Any) -> Any:
    """A copy of one of the CONTAINERS, with the same items."""
    new = _shell(value, {}, {})
    fill(new, value, Remake({}, {}))
    return new


class Remake:
    """Gives the remade object for a value, made now if needed, or the value itself."""

    def __init__(self, made: dict[int, Any], anew: dict[int, Any]) -> None:
        self._made, self._anew = made, anew

    def __call__(self, value: Any) -> Any:
        key = id(value)
        if key in self._made:
            return self._made[key]
        if key not in self._anew:
            return value
        new = self._made[key] = self._closed(value)
        return new

    def _closed(self, value: Any) -> Any:
        kind = type(value)
        if kind is types.MethodType:
            return types.MethodType(self(value.__func__), self(value.__self__))
        if kind is weakref.WeakMethod:
            method = value()
            return weakref.WeakMethod(types.MethodType(method.__func__, self(method.__self__)))
        if issubclass(kind, weakref.ref):  # without the callback, which is about the live object
            target = self(weakref.ref.__call__(value))
            if kind is weakref.KeyedRef:
                return weakref.KeyedRef(target, None, self(value.key))  # type: ignore[arg-type]
            return weakref.ref(target)
        if kind in _PROXIES:
            return weakref.proxy(self(_proxied(value)))
        if kind in _VIEWS:
            return _VIEWS[kind](self(gc.get_referents(value)[0]))
        if kind is types.MappingProxyType:
            return types.MappingProxyType(self(gc.get_referents(value)[0]))
        if kind in _BUILTIN:
            return getattr(self(value.__self__), value.__name__)
        if issubclass(kind, functools.partial):
            args, keywords = self(value.args), self(value.keywords)
            new = functools.partial.__new__(kind, self(value.func), *args, **keywords)
        else:
            base = _base_of(kind)
            new = base.__new__(kind, [self(item) for item in _items_of(value)])
        if kind not in _FROZEN:
            _fill_attributes(new, value, self)
        return new
