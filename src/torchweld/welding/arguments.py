"""How x is found among the arguments of a call."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torchweld.errors import TorchweldError

_NAMED = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_MISSING = object()


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """A block is a function of one argument; the others may be at their defaults, or ignored."""

    wanted: str
    ignored: tuple[str, ...]
    positional: tuple[str, ...]
    defaults: Mapping[str, Any]  # None for a parameter that has none

    @staticmethod
    def of(forward: Callable[..., Any], wanted: str, ignored: tuple[str, ...] = ()) -> Arguments:
        """Of a method; raises TorchweldError if it has no parameter `wanted`."""
        parameters = list(inspect.signature(forward).parameters.values())[1:]
        positional = tuple(p.name for p in parameters if p.kind in _NAMED)
        names = [p.name for p in parameters]
        for name in (wanted, *ignored):
            if name not in names:
                raise TorchweldError(
                    f"forward has no parameter {name!r}; it takes {', '.join(names) or 'none'}"
                )
        defaults = {p.name: None if p.default is p.empty else p.default for p in parameters}
        return Arguments(wanted=wanted, ignored=ignored, positional=positional, defaults=defaults)

    @property
    def wanted_first(self) -> bool:
        return self.positional[:1] == (self.wanted,)

    def pick(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """x, if the other arguments do not matter; else None."""
        if len(args) > len(self.positional):
            return None
        x = None
        for name, value in (*zip(self.positional, args, strict=False), *kwargs.items()):
            if name == self.wanted and x is None:
                x = value
            elif name not in self.ignored and value is not self.defaults.get(name, _MISSING):
                return None
        return x
