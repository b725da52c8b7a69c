"""What is wrong with the records of a page that was read from a file: columns, and places in them.

Anybody may have written the file. What passes here can be looked up without a further check.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence


def uneven(**columns: Sequence[object]) -> Iterator[str]:
    """Columns of one table that differ in length."""
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        told = ", ".join(f"{name} {length:,}" for name, length in lengths.items())
        yield f"has columns of different lengths: {told}"


def astray(name: str, places: Iterable[int], count: int) -> Iterator[str]:
    """The first place that is not below `count`."""
    for i, place in enumerate(places):
        if place >= count:
            yield f"has {name}[{i}] = {place}; expected is one of {count:,}"
            return


def not_before(name: str, parents: Iterable[int]) -> Iterator[str]:
    """The first parent that does not stand before its child; the first of all has none."""
    for i, parent in enumerate(parents):
        if parent >= i or (parent < 0) != (i == 0):
            yield f"has {name}[{i}] = {parent}; expected is one before it, and -1 for the first"
            return
