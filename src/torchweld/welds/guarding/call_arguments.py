"""Finds x among the arguments of a call, and decides whether the block is valid for the call.

In: the arguments of a call, and a block. Out: `Picked` arguments, and why the call is not covered.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchweld.core.errors import TorchweldError
from torchweld.welds.found_blocks import Block
from torchweld.welds.guarding.valid_sizes import ANY_DIMS, pattern_of

_NAMED = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_MISSING = object()


class Picked(NamedTuple):
    """The arguments of a call by kind; those at their defaults are left out."""

    x: Any
    beside: dict[str, Tensor]  # other tensors, which do not affect the result
    nones: tuple[str, ...]  # arguments given as None whose default is not None


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """The parameters of a forward that a block serves as a function of one argument, x."""

    wanted: str  # the parameter that is x
    ignored: tuple[str, ...]  # parameters whose tensors do not affect the result
    positional: tuple[str, ...]  # parameters that can be given by position
    names: frozenset[str]  # all parameters
    unnamed: frozenset[str]  # parameters that can be given by position only
    defaults: Mapping[str, Any]

    @staticmethod
    def of(forward: Callable[..., Any], wanted: str, ignored: tuple[str, ...] = ()) -> Arguments:
        """The parameters of a method; raises TorchweldError if it lacks one of the names."""
        parameters = list(inspect.signature(forward).parameters.values())[1:]
        positional = tuple(p.name for p in parameters if p.kind in _NAMED)
        names = [p.name for p in parameters]
        for name in (wanted, *ignored):
            if name not in names:
                raise TorchweldError(
                    f"forward has no parameter {name!r}; it takes {', '.join(names) or 'none'}"
                )
        return Arguments(
            wanted=wanted,
            ignored=ignored,
            positional=positional,
            names=frozenset(names),
            unnamed=frozenset(p.name for p in parameters if p.kind is p.POSITIONAL_ONLY),
            defaults={p.name: p.default for p in parameters if p.default is not p.empty},
        )

    @property
    def wanted_first(self) -> bool:
        return self.positional[:1] == (self.wanted,)

    def pick(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Picked | None:
        """The arguments by kind; None if one was given that no recorded call gave."""
        if len(args) > len(self.positional):
            return None
        x: Any = None
        given: set[str] = set()
        beside: dict[str, Tensor] = {}
        nones: tuple[str, ...] = ()
        for name, value in (*zip(self.positional, args, strict=False), *kwargs.items()):
            default = self.defaults.get(name, _MISSING)
            if name in given or (name in kwargs and name in self.unnamed):
                return None  # the original raises an error for this
            given.add(name)
            if name == self.wanted:
                x = value
            elif value is default:
                continue
            elif name in self.ignored and isinstance(value, Tensor):
                beside[name] = value
            elif value is None and name in self.names:
                nones = (*nones, name)
            else:
                return None
        return Picked(x, beside, nones)


def _is_odd(tensor: Tensor, x: Tensor) -> bool:
    """Whether a tensor other than x has more that code can ask about than recorded tensors."""
    return (
        type(tensor) is not Tensor
        or tensor.layout != torch.strided
        or tensor.device.type != x.device.type
        or bool(tensor.__dict__)
    )


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


class Validity:
    """Decides in which calls a block is known to compute its chain."""

    def __init__(self, block: Block) -> None:
        self._ignored = set() if block.valid else set(block.ignores)
        self._any = not block.valid  # made by hand: trusted for all calls
        # For the arguments other than x: patterns of ones for which any sizes will do, and the
        # leading shapes that are valid otherwise.
        self._patterns: dict[Any, set[str]] = {}
        self._shapes: dict[Any, set[tuple[int, ...]]] = {}
        for domain in block.valid:
            about = frozenset((b.name, b.dtype, b.shape or b.ones) for b in domain.beside)
            key = (about, frozenset(domain.nones))
            if domain.shapes:
                self._shapes.setdefault(key, set()).update(domain.shapes)
            else:
                self._patterns.setdefault(key, set()).add(domain.ones)
        alone = self._patterns.get((frozenset(), frozenset()), set())
        # Numbers of dimensions for which any sizes will do, in a call with x alone.
        dims = {len(pattern) + 1 for pattern in alone}
        self._all_dims = ANY_DIMS in alone
        self._free_dims = {n for n in dims if sum(len(p) == n - 1 for p in alone) == 2 ** (n - 1)}

    def why_not(self, picked: Picked) -> str | None:
        """Why a call is not covered, in a few words; None if it is covered."""
        given = [picked.x, *picked.beside.values()]
        if len(given) != len({id(tensor) for tensor in given}):
            return "the same tensor twice"
        if any(_is_odd(tensor, picked.x) for tensor in picked.beside.values()):
            return "other arguments"
        if self._any:
            return None if self._ignored >= set(picked.nones) else "other arguments"
        nones = frozenset(picked.nones)
        free, exact = (
            (frozenset((n, _dtype(t), kind(t.shape)) for n, t in picked.beside.items()), nones)
            for kind in (pattern_of, tuple)
        )
        if free not in self._patterns and exact not in self._shapes:
            return "other arguments"
        leading = tuple(picked.x.shape[:-1])
        if 0 in leading:
            return "no rows"
        patterns = self._patterns.get(free, ())
        if ANY_DIMS in patterns or pattern_of(leading) in patterns:
            return None
        return None if leading in self._shapes.get(exact, ()) else "another shape"

    def holds_in_graphs(self, picked: Picked) -> bool:
        """Whether a call is covered, asked while compiling, with as few guards as possible."""
        any_size = self._all_dims or picked.x.dim() in self._free_dims
        if self._any or (any_size and not picked.beside):
            return self._ignored >= set(picked.nones)
        return self.why_not(picked) is None
