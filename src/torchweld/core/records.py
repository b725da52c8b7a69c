"""Dataclasses to JSON and back, checked on the way in.

`to_plain(record)` gives dicts, lists, numbers and strings; `from_plain(kind, data)` gives the
record back, or a `RecordError` that says where the data do not fit. Nothing in a file is executed:
a field is read because the type declares it, and what is not declared is refused. Fields that have
their default value are left out, so files stay small and old files load.

What a field may hold is declared with its type, `Annotated[int, Bounds(0, 9)]`; record_fields.py
has names for the usual kinds. By default a number is finite and small enough for arithmetic, and
texts and lists are short enough for memory. Rules about several fields are in the dataclass itself:
`problems()` says what is wrong with it. A field of `float | NotMeasured` holds either; in JSON the
latter is `{"not_measured": reason}`. A record with a `FORMAT` has its mark before its fields.
"""

from __future__ import annotations

import json
import math
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from typing import (
    Annotated,
    Any,
    Literal,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from torchweld.core.errors import TorchweldError
from torchweld.core.not_measured import NotMeasured
from torchweld.core.record_fields import MOST_INT, MOST_TEXT, Bounds, Length, Letters
from torchweld.core.record_format import FormatError, RecordFormat
from torchweld.core.safe_text import clean

T = TypeVar("T")
_Reader = Callable[[Any], Any]

# Characters of a message, which may quote the file.
MOST_SAID = 500
# Levels of data that no type describes.
MOST_DEPTH = 50

# The one key of a `NotMeasured` in JSON.
UNMEASURED = "not_measured"
_ODD_FLOATS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class RecordError(TorchweldError):
    """Data do not fit the declared type; the message says where, and what was expected."""


# ---- out ----


def to_plain(
    value: Any,
    where: str = "",
    *,
    all_fields: bool = False,
    odd: Callable[[float], Any] = str,
) -> Any:
    """Dataclasses as dicts, tuples as lists: what JSON can hold; a RecordError for anything else.

    `where` names the value in that error. `all_fields`: those with their default value too. `odd`
    makes what stands for NaN and the infinities.
    """
    try:
        return _plain(value, all_fields, odd)
    except _MisfitError as misfit:
        raise _refused(misfit, where or type(value).__name__) from None


def json_text(value: Any, where: str = "", indent: int | None = None) -> str:
    """`to_plain` as JSON."""
    separators = (",", ":") if indent is None else None
    plain = to_plain(value, where)
    return json.dumps(plain, allow_nan=False, indent=indent, separators=separators)


def _plain(value: Any, all_fields: bool, odd: Callable[[float], Any]) -> Any:
    if value is None or isinstance(value, (str, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else odd(value)
    if isinstance(value, NotMeasured):
        return {UNMEASURED: value.reason}
    if isinstance(value, (tuple, list)):
        return _plain_list(value, all_fields, odd)
    if isinstance(value, Mapping):
        items: Iterable[tuple[Any, Any]] = value.items()
        found, shown = {}, "[{}]"
    elif is_dataclass(value) and not isinstance(value, type):
        form: RecordFormat | None = getattr(value, "FORMAT", None)
        all_fields = all_fields or (form is not None and form.all_fields)
        items = _written(value, all_fields)
        found, shown = {} if form is None else form.mark(form.version), ".{}"
    else:
        raise _MisfitError(
            f"is a {type(value).__name__}, which JSON cannot hold; give numbers, texts, None, and "
            "lists and mappings of these"
        )
    name: Any = None
    try:
        for name, item in items:
            found[str(name)] = _plain(item, all_fields, odd)
    except _MisfitError as misfit:
        misfit.path.append(shown.format(_name(str(name))))
        raise
    return found


def _plain_list(value: Sequence[Any], all_fields: bool, odd: Callable[[float], Any]) -> list[Any]:
    found: list[Any] = []
    try:
        for item in value:
            found.append(_plain(item, all_fields, odd))  # noqa: PERF401 (as in _tuple_reader)
    except _MisfitError as misfit:
        misfit.path.append(f"[{len(found)}]")
        raise
    return found


def _written(record: Any, all_fields: bool) -> Iterator[tuple[str, Any]]:
    for name, default in cast(Callable[[Any], Any], _defaults)(type(record)):
        item = getattr(record, name)
        if all_fields or item != default or type(item) is not type(default):
            yield name, item


@cache
def _defaults(kind: type) -> tuple[tuple[str, Any], ...]:
    return tuple((f.name, _default(f)) for f in fields(kind))


def _default(f: Field[Any]) -> Any:
    if f.default is not MISSING:
        return f.default
    return f.default_factory() if f.default_factory is not MISSING else MISSING


# ---- in ----


class _MisfitError(Exception):
    """What is wrong, and the path to it, from the inside out."""

    def __init__(self, says: str, *path: str) -> None:
        super().__init__(says)
        self.says, self.path = says, list(path)


def _refused(misfit: _MisfitError, where: str) -> RecordError:
    place, says = "".join(reversed(misfit.path)), misfit.says
    says = says if len(says) <= MOST_SAID else f"{says[: MOST_SAID - 1]}…"
    return RecordError(f"{where}{place} {says}")


def from_plain(kind: type[T], data: Any, where: str = "") -> T:
    """The record that `data` describes."""
    try:
        found: T = cast(Callable[[Any], _Reader], _reader)(kind)(data)
        return found
    except _MisfitError as misfit:
        raise _refused(misfit, where or kind.__name__) from None


@cache
def _reader(kind: Any) -> _Reader:
    """A function that reads data of this kind, or raises _MisfitError."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return _read_anything
    if kind is float:
        return _number_reader(float, Bounds())
    if kind is int:
        return _number_reader(int, Bounds(-MOST_INT, MOST_INT))
    if kind is str:
        return _text_reader(Length(most=MOST_TEXT))
    if kind in (bool, None, types.NoneType):
        return _plain_reader(bool if kind is bool else types.NoneType)
    if origin is Annotated:
        return _annotated_reader(arguments[0], arguments[1])
    if origin is Literal:
        return _literal_reader(arguments)
    if origin in (Union, types.UnionType):
        return _union_reader(arguments)
    if origin is tuple:
        return _tuple_reader(arguments, Length())
    if origin is dict:
        return _dict_reader(arguments[1])
    if is_dataclass(kind):
        return _record_reader(kind)
    raise AssertionError(f"{kind} is not a type that records are made of")


def _annotated_reader(kind: Any, allowed: Any) -> _Reader:
    if isinstance(allowed, Bounds):
        return _number_reader(kind, allowed)
    if isinstance(allowed, Letters):
        return _letters_reader(allowed)
    assert isinstance(allowed, Length), allowed
    return _text_reader(allowed) if kind is str else _tuple_reader(get_args(kind), allowed)


def _number_reader(kind: Any, allowed: Bounds) -> _Reader:
    def read(data: Any) -> Any:
        # JSON has one kind of number; True is not a number.
        if kind is float and type(data) is int and abs(data) <= MOST_INT:
            data = float(data)
        # We never write numbers that Python reads as infinite (Infinity, 1e999): JSON has none.
        infinite = type(data) is float and not math.isfinite(data)
        if type(data) is str and allowed.odd:
            data = _ODD_FLOATS.get(data, data)
        if infinite or type(data) is not kind:
            raise _misfit(kind, data)
        if not allowed.holds(data):
            raise _MisfitError(f"is {short(data)}; expected {allowed}")
        return data

    return read


def _text_reader(allowed: Length) -> _Reader:
    def read(data: Any) -> Any:
        if type(data) is not str:
            raise _misfit(str, data)
        if not allowed.least <= len(data) <= allowed.most:
            raise _MisfitError(f"is a text of {len(data):,} characters; allowed are {allowed}")
        return data

    return read


def _letters_reader(allowed: Letters) -> _Reader:
    def read(data: Any) -> Any:
        if type(data) is not str:
            raise _misfit(str, data)
        if not allowed.holds(data):
            raise _MisfitError(f"is {short(data)}; expected {allowed}")
        return data

    return read


def _plain_reader(kind: type) -> _Reader:
    def read(data: Any) -> Any:
        if type(data) is not kind:
            raise _misfit(kind, data)
        return data

    return read


def _literal_reader(allowed: tuple[Any, ...]) -> _Reader:
    def read(data: Any) -> Any:
        for one in allowed:
            if type(data) is type(one) and data == one:
                return one
        raise _MisfitError(f"is {short(data)}; it must be one of {', '.join(map(repr, allowed))}")

    return read


def _union_reader(arguments: tuple[Any, ...]) -> _Reader:
    """Reads a value of one kind, and None or NotMeasured if the union has them."""
    (kind,) = (one for one in arguments if one not in (types.NoneType, NotMeasured))
    inner, reason = _reader(kind), _reader(str)
    optional, unmeasured = types.NoneType in arguments, NotMeasured in arguments

    def read(data: Any) -> Any:
        if data is None and optional:
            return None
        if unmeasured and isinstance(data, dict) and data.keys() == {UNMEASURED}:
            try:
                return NotMeasured(reason(data[UNMEASURED]))
            except _MisfitError as misfit:
                misfit.path.append(f".{UNMEASURED}")
                raise
        return inner(data)

    return read


def _tuple_reader(arguments: tuple[Any, ...], allowed: Length) -> _Reader:
    repeated = len(arguments) == 2 and arguments[1] is Ellipsis
    readers = [_reader(argument) for argument in arguments[: 1 if repeated else None]]

    def read(data: Any) -> tuple[Any, ...]:
        if not isinstance(data, list):
            raise _misfit(list, data)
        if not repeated and len(data) != len(readers):
            raise _MisfitError(f"has {len(data)} items; it must have {len(readers)}")
        if not allowed.least <= len(data) <= allowed.most:
            raise _MisfitError(f"has {len(data):,} items; allowed are {allowed}")
        found: list[Any] = []
        try:
            if repeated:
                (inner,) = readers
                for item in data:
                    found.append(inner(item))  # noqa: PERF401 (its length says which one failed)
            else:
                for one, item in zip(readers, data, strict=True):
                    found.append(one(item))
        except _MisfitError as misfit:
            misfit.path.append(f"[{len(found)}]")
            raise
        return tuple(found)

    return read


def _dict_reader(kind: Any) -> _Reader:
    inner = _reader(kind)

    def read(data: Any) -> dict[str, Any]:
        if not isinstance(data, dict):
            raise _misfit(dict, data)
        found = {}
        try:
            for key, item in data.items():
                found[key] = inner(item)
        except _MisfitError as misfit:
            misfit.path.append(f"[{_name(key)}]")
            raise
        return found

    return read


def _record_reader(kind: Any) -> _Reader:
    hints = get_type_hints(kind, include_extras=True)
    # Made when first needed, since a record may hold records of its own kind.
    readers: dict[str, _Reader] = {}
    needed = [name for name, default in _defaults(kind) if default is MISSING]
    names = {name for name, _ in _defaults(kind)}
    problems: Callable[[Any], Iterator[str]] | None = getattr(kind, "problems", None)
    form: RecordFormat | None = getattr(kind, "FORMAT", None)

    def read(data: Any) -> Any:
        if not isinstance(data, dict):
            raise _misfit(kind, data)
        if form is not None:
            try:
                data = form.fields_of(data, unmarked=form.version)
            except FormatError as error:
                raise _MisfitError(str(error)) from None
        given = {}
        for name, item in data.items():
            if name not in readers:
                if name not in names:
                    raise _MisfitError(
                        f"has a field {short(name)}, which {kind.__name__} does not know"
                    )
                readers[name] = _reader(hints[name])
            try:
                given[name] = readers[name](item)
            except _MisfitError as misfit:
                misfit.path.append(f".{name}")
                raise
        missing = [name for name in needed if name not in given]
        if missing:
            raise _MisfitError(f"lacks {', '.join(missing)}, which {kind.__name__} needs")
        try:
            record = kind(**given)
        except TorchweldError as error:  # it checks itself
            raise _MisfitError(f"cannot be: {error}") from None
        for problem in problems(record) if problems is not None else ():
            raise _MisfitError(problem)
        return record

    return read


def _read_anything(data: Any) -> Any:
    """Data that no type describes: only JSON's kinds, and not nested too deeply."""
    level = [data]
    for _ in range(MOST_DEPTH):
        if not level:
            return data
        below: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                below += item.values()
            elif isinstance(item, list):
                below += item
            elif isinstance(item, float) and not math.isfinite(item):
                raise _MisfitError(f"holds {item}, which JSON does not have")
            elif type(item) is int and abs(item) > MOST_INT:
                raise _MisfitError("holds a number that is too large")
        level = below
    if level:
        raise _MisfitError(f"is nested deeper than {MOST_DEPTH} levels")
    return data


def _misfit(kind: Any, data: Any) -> _MisfitError:
    name = {list: "a list", dict: "an object", types.NoneType: "null"}.get(kind, "")
    return _MisfitError(f"is {short(data)}; {name or kind.__name__} was expected")


def short(data: Any) -> str:
    """A short form of it: huge numbers and deep lists are not written out."""
    if isinstance(data, (list, dict)) and data:
        return f"{'a list' if isinstance(data, list) else 'an object'} of {len(data):,}"
    if type(data) is int and abs(data) > MOST_INT:
        return f"a whole number of {data.bit_length():,} bits"
    text = repr(data[:60] if isinstance(data, str) else data)
    return text if len(text) <= 60 else text[:57] + "..."


def _name(key: str) -> str:
    return clean(key if len(key) <= 60 else key[:57] + "...")
