"""Which module of one model is which of another: the same path below the wrappers of either.

In: normal paths of the modules of two models, and which of these ran. Out: the prefix that each
model's paths have before those that both share.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from torchweld.profiles.attributing.attribution import OPTIMIZER

Paths = tuple[Collection[str], Iterable[str]]  # all of them, and those that ran


def common_prefixes(one: Paths, two: Paths) -> tuple[str, str]:
    """The prefixes under which the two models have most in common."""
    most, chosen = 0, ("", "")
    for a in _prefixes(one[0]):
        for b in _prefixes(two[0]):
            if a and b:
                continue  # a wrapper on both sides is part of the model
            ran = {below_prefix(path, a) for path in one[1]}
            common = len((ran & {below_prefix(path, b) for path in two[1]}) - {""})
            if common > most:
                most, chosen = common, (a, b)
    return chosen


def below_prefix(path: str, prefix: str) -> str:
    """The path without the prefix; what stands outside of it counts as the model itself.

    The optimizer stands beside the model, never inside a wrapper of it.
    """
    if not prefix or path == OPTIMIZER:
        return path
    start = f"{prefix}."
    return path[len(start) :] if path.startswith(start) else ""


def _prefixes(paths: Collection[str]) -> list[str]:
    """Places at which the model proper may begin: below wrappers of a single child."""
    found, inner = [""], ""
    while True:
        start = f"{inner}." if inner else ""
        below = {
            start + path[len(start) :].partition(".")[0]
            for path in paths
            if path.startswith(start) and path not in (inner, OPTIMIZER)
        }
        if len(below) != 1:
            return found
        (inner,) = below
        found.append(inner)
