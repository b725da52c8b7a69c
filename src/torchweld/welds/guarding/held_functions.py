"""Finds Python functions in the objects that hold them: methods, properties, wrappers, partials."""

from __future__ import annotations

import functools
import types
from typing import Any

from torchweld.welds.guarding.dependency_facts import contents_of
from torchweld.welds.guarding.executed_code import is_installed


def is_function(value: Any) -> bool:
    return isinstance(
        value,
        (
            *(types.FunctionType, types.MethodType, staticmethod, classmethod, property),
            *(functools.cached_property, functools._lru_cache_wrapper, functools.partialmethod),
        ),
    )


def functions_in(value: Any, seen: set[int] | None = None) -> list[types.FunctionType]:
    """All Python functions in a function, method, property or wrapper."""
    seen = set() if seen is None else seen
    if id(value) in seen:
        return []
    seen.add(id(value))
    inner: list[Any] = []
    if isinstance(value, types.FunctionType):
        found = [value]
        inner = [value.__dict__.get("__wrapped__")]
        inner += map(contents_of, value.__closure__ or ())
    else:
        found = []
        if isinstance(value, (types.MethodType, staticmethod, classmethod)):
            inner = [value.__func__]
        elif isinstance(value, property):
            inner = [value.fget, value.fset]
        elif isinstance(value, (functools.cached_property, functools.partialmethod)):
            inner = [value.func]
    for one in inner:
        if is_function(one):
            found += functions_in(one, seen)
    return found


def is_installed_cache(value: Any) -> bool:
    """Whether it is a cached function of an installed package, such as a check for hardware."""
    code = getattr(getattr(value, "__wrapped__", None), "__code__", None)
    return code is not None and is_installed(code.co_filename)


def homes(kind: type, code: types.CodeType) -> list[tuple[type, str]]:
    """Where a class and its bases have a function with this code: (class, name)."""

    def is_it(value: Any) -> bool:
        return is_function(value) and any(f.__code__ is code for f in functions_in(value))

    name = code.co_name
    usual = [(b, name) for b in kind.__mro__ if is_it(b.__dict__.get(name))]
    return usual or [(b, n) for b in kind.__mro__ for n, v in b.__dict__.items() if is_it(v)]
