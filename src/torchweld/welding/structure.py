"""How a welded module is built, and whether it is still built that way.

`Structure.of(module, covers)` looks at a module and at the modules inside it whose calls a fused op
leaves out: which objects they are, of which class, with which attributes. `changed` and `hooked`
say in a few words what the user has done to them since; then the original code has to run. Not
looked at are the contents of parameters, which are read at every call, and of attributes that are
containers or objects of their own.

A `Structure` goes through pickle and deepcopy together with its module.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from torchweld.interrupts import is_interrupt

KEY = "_torchweld"  # the one name that welding adds to a module's __dict__
# The plan that a whole model was welded by, in the dictionary of the model itself.
PLAN_KEY = "_torchweld_plan"
HOOKS = ("_forward_hooks", "_forward_pre_hooks")
BACKWARD_HOOKS = ("_backward_hooks", "_backward_pre_hooks")

# Not attributes in the sense of this module: read at every call, or none of the block's business.
_BOOKKEEPING = frozenset(nn.Module().__dict__) | {KEY, PLAN_KEY, "forward", "_compiled_call_impl"}
_CONSTANTS = (int, float, bool, str, type(None))
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, type)
_ABSENT = object()


def plain_class(kind: type) -> type:
    """The class under a welded one; any other class is itself."""
    # A subclass made of a welded class (by parametrize, say) inherits the attribute.
    if getattr(kind, "_torchweld_class", None) is kind:
        base: type = kind._torchweld_base
        return base
    return kind


def steps_of(path: str) -> tuple[str, ...]:
    return tuple(path.split(".")) if path else ()


def inside(module: nn.Module, steps: Iterable[str]) -> nn.Module | None:
    """The module at a path, or None."""
    found: nn.Module | None = module
    for step in steps:
        if found is None:
            return None
        found = found._modules.get(step)
    return found


class Part:
    """One module as it was: the welded one (path "") or one inside it."""

    def __init__(self, path: str, module: nn.Module) -> None:
        kind = plain_class(type(module))
        # A Linear computes from its parameters alone; tools that resize them set its attributes.
        own = {} if kind is nn.Linear else module.__dict__
        attributes = {key: value for key, value in own.items() if key not in _BOOKKEEPING}
        self.__setstate__((path, kind, attributes, module))

    def __getstate__(self) -> tuple[str, type, dict[str, Any], nn.Module | None]:
        return self.path, self.kind, self.attributes, self.ref()

    def __setstate__(self, state: tuple[str, type, dict[str, Any], nn.Module | None]) -> None:
        self.path, self.kind, self.attributes, module = state
        self.steps = steps_of(self.path)
        self.forward = self.kind.forward  # type: ignore[attr-defined]
        # Weakly: a child that its user has replaced is not to stay in memory on our account.
        self.ref = weakref.ref(module) if module is not None else _nothing
        # What a compiler can compare, and guard.
        items = self.attributes.items()
        self.constants = tuple((k, v) for k, v in items if type(v) in _CONSTANTS)
        self.functions = tuple((k, v) for k, v in items if isinstance(v, _FUNCTIONS))

    def changed(self, module: nn.Module | None) -> str | None:
        """What was done to it, given the module that stands at its path now."""
        name = self.path or "it"
        if module is None:
            return f"{name} is gone"
        if self.path and module is not self.ref():
            return f"{name} was replaced by a {type(module).__name__}"
        if plain_class(type(module)) is not self.kind:
            return f"{name} became a {type(module).__name__}"
        if self.kind.forward is not self.forward:  # type: ignore[attr-defined]
            return f"{self.kind.__name__}.forward was replaced"
        if self.path and "forward" in module.__dict__:
            return f"{name} has a forward of its own"
        for key, value in self.attributes.items():
            if not _same(module.__dict__.get(key, _ABSENT), value):
                owner = f"{self.path}'s" if self.path else "its"
                return f"{owner} {key} was changed"
        return None

    def differs(self, module: nn.Module | None) -> bool:
        """`changed` and `hooked` in a form that a compiler can follow and guard."""
        if module is None or plain_class(type(module)) is not self.kind:
            return True
        own = module.__dict__
        # Asked as an attribute too: a look into `own` alone leaves no guard against one set later.
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
    """A weak reference to a module that is gone."""


def _any_hook(own: dict[str, Any]) -> bool:
    for kind in (*HOOKS, *BACKWARD_HOOKS):  # noqa: SIM110
        if len(own[kind]) > 0:
            return True
    return False


def _same(now: Any, before: Any) -> bool:
    if now is before:
        return True
    try:
        return (now == before) is True
    except Exception as error:  # whatever a foreign __eq__ raises
        if is_interrupt(error):
            raise
        return False


class Structure:
    """A module and the modules inside it that a fused op does not call."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = tuple(parts)

    @staticmethod
    def of(module: nn.Module, covers: Iterable[str]) -> Structure:
        """`covers` are paths relative to the module's; a path that leads nowhere is left out."""
        paths = dict.fromkeys(["", *covers])
        found = [(path, inside(module, steps_of(path))) for path in paths]
        return Structure([Part(path, part) for path, part in found if part is not None])

    def dropout(self) -> list[float]:
        """Probabilities of the dropout modules among the parts."""
        dropping = (part for part in self.parts if issubclass(part.kind, _DropoutNd))
        return [float(part.attributes.get("p", 0.0)) for part in dropping]

    def changed(self, module: nn.Module) -> str | None:
        """What was done to the module since, in words, or None."""
        reasons = (part.changed(inside(module, part.steps)) for part in self.parts)
        return next((reason for reason in reasons if reason is not None), None)

    def hooked(self, module: nn.Module, *, backward: bool) -> str | None:
        """Which of the modules inside has hooks that are to be called, in words, or None."""
        for part in self.parts:
            found = inside(module, part.steps) if part.path else None
            for kind in (*HOOKS, *BACKWARD_HOOKS[: 2 * backward]):
                if found is not None and found.__dict__[kind]:
                    return f"{part.path} has {kind.strip('_').replace('_', ' ')}"
        return None

    def differs(self, module: nn.Module) -> bool:
        """Whether anything was done to it, as far as a compiler can see."""
        for part in self.parts:  # noqa: SIM110
            if part.differs(inside(module, part.steps)):
                return True
        return False


def release(module: nn.Module) -> None:
    """Gives a welded module its own class and `__dict__` back."""
    object.__setattr__(module, "__class__", plain_class(type(module)))
    module.__dict__.pop(KEY, None)
