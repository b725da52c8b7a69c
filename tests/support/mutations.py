"""Files spoilt on purpose: every place of a JSON document with every odd value, and odd bytes.

`spoilt(document)` gives all of them in a fixed order, `sample(document, count)` some, which are the
same at every run. A spoilt document is text, for not all of them are JSON.
"""

from __future__ import annotations

import copy
import gzip
import json
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

REMOVED, DOUBLED, RENAMED, COPIED = object(), object(), object(), object()
DEEP = json.loads("[" * 60 + "]" * 60)

VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 7, -(2**40), 2**31, 2**63, 2**70, 10**400),
    *(0.5, -0.0, 1e-320, 1e300, -1e300, 1e15, float("inf"), float("-inf"), float("nan")),
    *("", "x", "inf", "nan", "x" * 10_000, "../../etc/passwd", "a\x1b[2Jb\x00\r\n\x9b31m"),
    *("\u202eabc\u2066", "\ud800", "relu", "float64", "int8", "..", "__class__", "é" * 100),
    *([], {}, [[]], [None], [1, 2, 3], ["x"], [-1] * 100, [2**28, 32], DEEP, {"x": 1}),
    *(REMOVED, DOUBLED, RENAMED, COPIED),
)


class Mutation(NamedTuple):
    """What is put where; shown when a test fails."""

    path: tuple[str | int, ...]
    value: Any

    def __str__(self) -> str:
        names = {id(REMOVED): "removed", id(DOUBLED): "doubled", id(RENAMED): "renamed"}
        shown = names.get(id(self.value)) or repr(self.value)[:60]
        return f"{'.'.join(map(str, self.path))} = {shown}"


def places(document: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Paths to all parts of a document; of a list, to the first three items and the last."""
    items: list[tuple[str | int, Any]] = []
    if isinstance(document, dict):
        items = list(document.items())
    elif isinstance(document, list):
        numbers = sorted({*range(min(3, len(document))), *range(len(document))[-1:]})
        items = [(i, document[i]) for i in numbers]
    for key, value in items:
        yield (*path, key)
        yield from places(value, (*path, key))


def mutations(document: Any) -> list[Mutation]:
    return [Mutation(path, value) for path in places(document) for value in VALUES]


def spoil(document: Any, mutation: Mutation) -> str:
    """The document's text after the mutation."""
    spoilt = copy.deepcopy(document)
    holder: Any = spoilt
    *steps, last = mutation.path
    for step in steps:
        holder = holder[step]
    value = mutation.value
    if value is REMOVED:
        del holder[last]
    elif value is DOUBLED:  # an item twice, a field beside its own list
        if isinstance(holder, list):
            holder.insert(int(last), copy.deepcopy(holder[int(last)]))
        else:
            holder[last] = [holder[last], holder[last]]
    elif value is RENAMED:
        if isinstance(holder, dict):
            holder[f"{last}\x1b[2J"] = holder.pop(last)
        else:
            holder[int(last)] = str(holder[int(last)])
    elif value is COPIED:  # what stands beside it
        others = list(holder.values()) if isinstance(holder, dict) else holder
        holder[last] = copy.deepcopy(others[-1])
    else:
        holder[last] = value
    return json.dumps(spoilt)


def sample(document: Any, count: int, seed: int = 0) -> list[Mutation]:
    """Some, the same at every run: each value about as often as any other."""
    everything = mutations(document)
    return random.Random(seed).sample(everything, min(count, len(everything)))


def odd_bytes(text: str) -> dict[str, bytes]:
    """Files that are damaged as a whole."""
    data = text.encode()
    packed = gzip.compress(data)
    return {
        "empty": b"",
        "cut": data[: len(data) // 2],
        "last byte missing": data.rstrip()[:-1],
        "binary": bytes(range(256)) * 20,
        "zeros": bytes(1000),
        "a byte order mark": b"\xef\xbb\xbf" + data,
        "UTF-16": text.encode("utf-16"),
        "not UTF-8": data.replace(b'"', b'"\xff\xfe', 20),
        "null": b"null",
        "a number": b"3",
        "a text": b'"x"',
        "a list": b"[]",
        "an object": b"{}",
        "deep": b"[" * 100_000,
        "deep objects": b'{"a":' * 100_000,
        "a long number": b"[" + b"1" * 10_000 + b"]",
        "NaN": b"NaN",
        "packed": packed,
        "packed and cut": packed[: len(packed) // 2],
        "packed, a byte flipped": packed[:20] + bytes([packed[20] ^ 0xFF]) + packed[21:],
        "packed, wrong sum": packed[:-8] + b"\0" * 8,
        "packed junk": gzip.compress(bytes(range(256)) * 20),
        "the mark of gzip alone": b"\x1f\x8b",
        "the mark and junk": b"\x1f\x8b" + bytes(range(256)),
        "two documents": data + data,
    }
