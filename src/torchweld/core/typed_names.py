"""Names that people type: the right one, or an error that suggests it."""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches

from torchweld.core.errors import TorchweldError


def known(given: str, allowed: Collection[str], what: str) -> str:
    """`given` if it is one of `allowed`, else a TorchweldError with the nearest and all of them."""
    if not isinstance(given, str):
        raise TorchweldError(f"{what} is a {type(given).__name__}; there are: {', '.join(allowed)}")
    if given in allowed:
        return given
    near = get_close_matches(given.lower(), allowed, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise TorchweldError(f"unknown {what} {given!r}; {hint}there are: {', '.join(allowed)}")
