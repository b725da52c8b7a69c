"""Compares how a welded module is built, for graphs that are exported or traced.

`Structure.of(module, covers)` notes the classes and attributes of a module, and of the modules
inside it that a fused op does not call. `differs` tells whether they have changed, in a form that
torch.export can follow. Eager calls are decided by the guard (`guard.py`), which knows what the
code really reads.

A `Structure` is pickled and deep-copied together with its module.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from torchweld.welds.weld_marks import KEY, PLAN_KEY, plain_class

HOOKS = ("_forward_hooks", "_forward_pre_hooks")
BACKWARD_HOOKS = ("_backward_hooks", "_backward_pre_hooks")

# Not compared as attributes: they are read at every call, or do not matter to a block.
_BOOKKEEPING = frozenset(nn.Module().__dict__) | {KEY, PLAN_KEY, "forward", "_compiled_call_impl"}
_CONSTANTS = (int, float, bool, str, type(None))
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, type)


def steps_of(path: str) -> tuple[str, ...]:
    return tuple(path.split(".")) if path else ()


def inside(module: nn.Module, steps: Iterable[str]) -> nn.Module | None:
    """The module at a path inside a module; None if there is none."""
    found: nn.Module | None = module
    for step in steps:
        if found is None:
            return None
        found = found._modules.get(step)
    return found


class WeldedPart:
    """The welded module (path "") or a module inside it, as it was when welded."""

    def __init__(self, path: str, module: nn.Module) -> None:
        kind = plain_class(type(module))
        # A Linear computes with its parameters alone; tools that resize them set its attributes.
        own = {} if kind is nn.Linear else module.__dict__
        attributes = {key: value for key, value in own.items() if key not in _BOOKKEEPING}
        self.__setstate__((path, kind, attributes, module))

    def __getstate__(self) -> tuple[str, type, dict[str, Any], nn.Module | None]:
        return self.path, self.kind, self.attributes, self.ref()

    def __setstate__(self, state: tuple[str, type, dict[str, Any], nn.Module | None]) -> None:
        self.path, self.kind, self.attributes, module = state
        self.steps = steps_of(self.path)
        self.forward = self.kind.forward  # type: ignore[attr-defined]
        # A weak reference, so that a child that the user has replaced does not stay in memory.
        self.ref = weakref.ref(module) if module is not None else _nothing
        # Attributes that a compiler can compare and guard.
        items = self.attributes.items()
        self.constants = tuple((k, v) for k, v in items if type(v) in _CONSTANTS)
        self.functions = tuple((k, v) for k, v in items if isinstance(v, _FUNCTIONS))

    def differs(self, module: nn.Module | None) -> bool:
        """Whether `module`, now at the path, is built differently or has hooks."""
        if module is None or plain_class(type(module)) is not self.kind:
            return True
        own = module.__dict__
        # Also asked as an attribute: `own` alone makes no guard against a forward set later.
        ordinary = isinstance(module.forward, types.MethodType) and "forward" not in own
        if self.path and (not ordinary or _any_hook(own)):
            return True
        for key, value in self.constants:
            if own.get(key) != value:
                return True
        for key, value in self.functions:  # noqa: SIM110 (generators break graphs)
            if own.get(key) is not value:
                return True
        return False


def _nothing() -> None:
    """Replaces the weak reference to a module that is gone."""


def _any_hook(own: dict[str, Any]) -> bool:
    for kind in (*HOOKS, *BACKWARD_HOOKS):  # noqa: SIM110
        if len(own[kind]) > 0:
            return True
    return False


class Structure:
    """How a module and the modules inside it that a fused op does not call are built."""

    def __init__(self, parts: Sequence[WeldedPart]) -> None:
        self.parts = tuple(parts)

    @staticmethod
    def of(module: nn.Module, covers: Iterable[str]) -> Structure:
        """`covers` are paths relative to the module; a path without a module is left out."""
        paths = dict.fromkeys(["", *covers])
        found = [(path, inside(module, steps_of(path))) for path in paths]
        return Structure([WeldedPart(path, part) for path, part in found if part is not None])

    def dropout(self) -> list[float]:
        """Probabilities of the dropout modules among the parts."""
        dropping = (part for part in self.parts if issubclass(part.kind, _DropoutNd))
        return [float(part.attributes.get("p", 0.0)) for part in dropping]

    def differs(self, module: nn.Module) -> bool:
        """Whether the module has changed, as far as a compiler can see."""
        for part in self.parts:  # noqa: SIM110
            if part.differs(inside(module, part.steps)):
                return True
        return False


def release(module: nn.Module) -> None:
    """Restores the class and the `__dict__` of a welded module."""
    object.__setattr__(module, "__class__", plain_class(type(module)))
    module.__dict__.pop(KEY, None)
