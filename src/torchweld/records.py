"""Dataclasses to JSON and back, checked on the way in.

`to_plain(record)` gives dicts, lists, numbers and strings; `from_plain(kind, data)` gives the
record back, or a `RecordError` that says where the data do not fit the declared types. Nothing in a
file is executed: a field is read because the type declares it, and what is not declared is refused.
Fields that have their default value are left out, so files stay small and old files load.
JSON has no infinity: where a type says float, the texts "inf", "-inf" and "nan" stand for these.
"""

from __future__ import annotations

import math
import sys
import types
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from torchweld.errors import TorchweldError

T = TypeVar("T")
_NOT_FINITE = ("inf", "-inf", "nan")
_LARGEST = int(sys.float_info.max)


class RecordError(TorchweldError):
    """Data do not fit the declared type; the message says where and what was expected."""


def to_plain(value: Any) -> Any:
    """Dataclasses as dicts, tuples as lists; what JSON can hold."""
    if is_dataclass(value) and not isinstance(value, type):
        return {
            name: to_plain(item)
            for name, default in _defaults(type(value))
            if (item := getattr(value, name)) != default or type(item) is not type(default)
        }
    if isinstance(value, (tuple, list)):
        return [to_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


@cache
def _defaults(kind: type) -> tuple[tuple[str, Any], ...]:
    return tuple((f.name, _default(f)) for f in fields(kind))


def _default(f: Field[Any]) -> Any:
    if f.default is not MISSING:
        return f.default
    return f.default_factory() if f.default_factory is not MISSING else MISSING


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def from_plain(kind: type[T], data: Any, where: str = "") -> T:
    """The record that `data` describes."""
    return _read(kind, data, where or kind.__name__)  # type: ignore[no-any-return]


def _read(kind: Any, data: Any, where: str) -> Any:
    if kind is Any:
        return data
    if kind is float:
        # JSON has one kind of number; True is none.
        if isinstance(data, str) and data in _NOT_FINITE:
            return float(data)
        # What Python reads as infinite was not written by us: JSON has no such number, or 1e999.
        if isinstance(data, float) and math.isfinite(data):
            return data
        if isinstance(data, int) and not isinstance(data, bool) and abs(data) <= _LARGEST:
            return float(data)
        raise _misfit(kind, data, where)
    if kind in (int, str, bool):
        if type(data) is kind:
            return data
        raise _misfit(kind, data, where)
    if kind is None or kind is type(None):
        if data is None:
            return None
        raise _misfit(kind, data, where)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        if data in arguments:
            return data
        raise RecordError(
            f"{where} is {data!r}; it must be one of {', '.join(map(repr, arguments))}"
        )
    if origin in (Union, types.UnionType):
        return _read_union(arguments, data, where)
    if origin is tuple:
        return _read_tuple(arguments, data, where)
    if origin is dict:
        if not isinstance(data, dict):
            raise _misfit(kind, data, where)
        of = arguments[1]
        return {key: _read(of, item, f"{where}[{key}]") for key, item in data.items()}
    if is_dataclass(kind):
        return _read_record(kind, data, where)
    raise AssertionError(f"{where}: {kind} is not a type that records are made of")


def _read_union(arguments: tuple[Any, ...], data: Any, where: str) -> Any:
    if data is None and type(None) in arguments:
        return None
    (kind,) = (kind for kind in arguments if kind is not type(None))
    return _read(kind, data, where)


def _read_tuple(arguments: tuple[Any, ...], data: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(data, list):
        raise _misfit(tuple, data, where)
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        return tuple(_read(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(data))
    if len(arguments) != len(data):
        raise RecordError(f"{where} has {len(data)} items; it must have {len(arguments)}")
    pairs = enumerate(zip(arguments, data, strict=True))
    return tuple(_read(kind, item, f"{where}[{i}]") for i, (kind, item) in pairs)


def _read_record(kind: Any, data: Any, where: str) -> Any:
    if not isinstance(data, dict):
        raise _misfit(kind, data, where)
    hints = _hints(kind)
    given = {}
    for name, item in data.items():
        if name not in hints:
            raise RecordError(f"{where} has a field {name!r}, which {kind.__name__} does not know")
        given[name] = _read(hints[name], item, f"{where}.{name}")
    missing = [
        name for name, default in _defaults(kind) if default is MISSING and name not in given
    ]
    if missing:
        raise RecordError(f"{where} lacks {', '.join(missing)}, which {kind.__name__} needs")
    return kind(**given)


def _misfit(kind: Any, data: Any, where: str) -> RecordError:
    name = getattr(kind, "__name__", str(kind))
    return RecordError(f"{where} is {_short(data)}; {name} was expected")


def _short(data: Any) -> str:
    text = repr(data)
    return text if len(text) <= 60 else text[:57] + "..."
