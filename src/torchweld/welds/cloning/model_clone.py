"""Clones a model: a second model of the same structure on the same weights, to run and trace.

In: a model. Out: a `Clone`, with new module objects of the same classes that have their own
`__dict__` and dictionaries. Parameters and buffers are shared; on request they become new objects
or copies. Attributes are followed through containers, methods, partials, closures, weak references
and plain objects. Every object that leads back to a module of the model is remade, so code of the
clone never reaches a live module. If such an object cannot be remade, the clone raises
CannotCloneError. No user code is called, because other threads may be running the model.
"""

from __future__ import annotations

import types
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchweld.core.errors import CannotCloneError
from torchweld.welds.cloning import object_remaking
from torchweld.welds.cloning.clone_tensors import OwnTensors
from torchweld.welds.cloning.object_remaking import entries_of
from torchweld.welds.weld_marks import KEY, PLAN_KEY, plain_class

# State that a run may change (buffers, tensors in attributes) is copied up to this many bytes.
KEPT_BYTES = 256 << 20
# Most objects that a clone follows. A model has some thousands of objects; one with more than this
# holds a dictionary or a text corpus.
MOST_OBJECTS = 1_000_000

# Every module of a clone gets its own of these, whatever they hold.
_OWN = frozenset(
    key for key, value in nn.Module().__dict__.items() if isinstance(value, dict | set)
)
_TENSORS = ("_parameters", "_buffers")
_NOT_TAKEN = (KEY, PLAN_KEY)
# Left in a module by torch.compile. They refer to the live module; the clone runs uncompiled.
_ENTRY = "_compiled_call_impl"
_COMPILED = ("forward", "_forward", "dynamo_ctx", "_torchdynamo_orig_callable")

_DISTRIBUTED = (
    "torch.nn.parallel.distributed",
    "torch.distributed.fsdp",
    "torch.distributed._composable",
    "deepspeed",
    "fairscale",
)


@dataclass(frozen=True, kw_only=True)
class Clone:
    """A cloned model, with the modules of clone and model mapped to each other.

    model:    the clone of the root module
    live_of:  module of the clone -> module of the model; includes modules in attributes
    clone_of: module of the model -> module of the clone
    shared:   names and tensors that were too large to copy, so that clone and model share them
    """

    model: nn.Module
    live_of: dict[nn.Module, nn.Module]
    clone_of: dict[nn.Module, nn.Module]
    shared: tuple[tuple[str, Tensor], ...] = ()

    def rebound(self, value: Any) -> Any:
        """`value` with live modules replaced by their clones, also in lists, tuples and dicts."""
        if _is_module(value):
            return self.clone_of.get(value, value)
        if type(value) is types.MethodType and _is_module(value.__self__):
            return types.MethodType(value.__func__, self.rebound(value.__self__))
        if type(value) in (list, tuple):
            return type(value)(map(self.rebound, value))
        if type(value) is dict:
            return {key: self.rebound(item) for key, item in value.items()}
        return value


def clone_to_run(model: nn.Module) -> Clone:
    """A clone to switch, run, trace and weld; the live model does not change."""
    # Tensors made in inference mode could not be used outside of it.
    with torch.inference_mode(False):
        return structural_clone(model, own_parameters=True, own_bytes=KEPT_BYTES)


def structural_clone(
    model: nn.Module, *, own_parameters: bool = False, own_bytes: int | None = None
) -> Clone:
    """Clones `model`. Raises CannotCloneError, naming the attribute that cannot be copied.

    own_parameters: whether parameters are new objects over the same memory, with their own
                    gradients and hooks
    own_bytes:      buffers, and lists, dicts, sets and tensors in attributes, are copied, tensors
                    up to this many bytes in total; None: they are shared
    """
    return _Cloning(OwnTensors(own_parameters, own_bytes)).clone(model)


class _Node(NamedTuple):
    """An object that may lead to a module, and how it was first reached."""

    value: Any
    parent: int | None
    label: str
    links: list[tuple[str, Any]]


class _Cloning:
    def __init__(self, tensors: OwnTensors) -> None:
        self._tensors = tensors
        self._nodes: dict[int, _Node] = {}
        self._parents: dict[int, list[int]] = {}
        # Objects to remake, whatever they lead to. Every object that leads to one is remade too.
        self._wanted: list[int] = []
        self._made: dict[int, Any] = tensors.made

    def clone(self, model: nn.Module) -> Clone:
        self._tensors.look_at(model)
        self._walk(model)
        anew = self._leading()
        self._check(anew)
        values = {key: self._nodes[key].value for key in anew}
        # Objects that can be filled later come first, so that cycles of references end.
        for key, value in values.items():
            if _is_module(value) and key not in self._made:
                new: nn.Module = object.__new__(plain_class(type(value)))
                self._made[key] = new
                # An object may hold the module's __dict__ itself.
                self._made[id(_dict(value))] = _dict(new)
        empty = {
            key: value
            for key, value in values.items()
            if key not in self._made and object_remaking.is_open(value)
        }
        for value in empty.values():
            object_remaking.make_shell(value, self._made, values)
        remake = object_remaking.Remake(self._made, values)
        for key, value in values.items():
            if _is_module(value):
                self._fill(self._made[key], value, remake)
            elif key in empty:
                object_remaking.fill(self._made[key], value, remake)
        modules = [node.value for node in self._nodes.values() if _is_module(node.value)]
        pairs = [(live, self._made[id(live)]) for live in modules]
        return Clone(
            model=self._made[id(model)],
            live_of={new: live for live, new in pairs},
            clone_of=dict(pairs),
            shared=tuple(self._tensors.shared),
        )

    # ---- which objects lead to a module ----

    def _walk(self, model: nn.Module) -> None:
        # The bool: whether it is state of a module itself, not of an object the module refers to.
        stack: list[tuple[Any, int | None, str, bool]] = [(model, None, "", True)]
        while stack:
            value, parent, label, state = stack.pop()
            key = id(value)
            if parent is not None:
                self._parents.setdefault(key, []).append(parent)
            if key in self._nodes:
                continue
            if len(self._nodes) == MOST_OBJECTS:
                raise CannotCloneError(
                    f"the model leads to more than {MOST_OBJECTS:,} objects, too many to see which "
                    f"of them lead back to its modules; the last was {self._path(parent, label)}; "
                    "take large dictionaries out of the model"
                )
            if _is_module(value):
                links, state = self._links_of(value, self._path(parent, label)), True
            else:
                links = object_remaking.links_of(value)
                # The clone has its own containers in attributes if state is copied.
                state = state and type(value) in object_remaking.CONTAINERS
                if state and self._tensors.copies:
                    self._wanted.append(key)
            self._nodes[key] = _Node(value, parent, label, links)
            for name, linked in reversed(links):
                if state and self._tensors.copies:
                    self._copy_state(linked, key, name)
                if id(linked) in self._made:
                    self._wanted.append(key)
                elif not object_remaking.is_leaf(linked):
                    stack.append((linked, key, name, state))

    def _links_of(self, module: nn.Module, path: str) -> list[tuple[str, Any]]:
        """The objects a module leads to. Also handles its tensors and its own dictionaries."""
        self._wanted.append(id(module))
        if isinstance(module, torch.jit.ScriptModule):
            self._made[id(module)] = self._tensors.script_copy(module)
            return []
        self._tensors.look_at(module, path)
        own = _dict(module)
        compiled = _is_compiled(module)
        links: list[tuple[str, Any]] = []
        for name, value in entries_of(own):
            if name in _NOT_TAKEN or name == _ENTRY or (compiled and name in _COMPILED):
                continue
            if name in _OWN and isinstance(value, dict | set):
                if type(value) in _PLAIN and not value:
                    self._made[id(value)] = type(value)()
                    self._tensors.alive.append(value)
                    continue
                self._wanted.append(id(value))
            # A path names the children; `_modules` itself is left out of it.
            links.append(("" if name == "_modules" else name, value))
        links += object_remaking.slots_of(module, type(module))
        return links

    def _copy_state(self, value: Any, parent: int, label: str) -> None:
        if isinstance(value, Tensor):
            self._tensors.copy(value, lambda: self._path(parent, label))
            return
        # A container that leads to other objects is handled in the walk.
        plain = type(value) in object_remaking.CONTAINERS and object_remaking.is_leaf(value)
        if plain and id(value) not in self._made:
            self._made[id(value)] = object_remaking.copied(value)
            self._tensors.alive.append(value)

    def _leading(self) -> list[int]:
        """All objects to remake, in the order in which they were reached."""
        found: set[int] = set()
        stack = list(self._wanted)
        while stack:
            key = stack.pop()
            if key not in found:
                found.add(key)
                stack += self._parents.get(key, [])
        return [key for key in self._nodes if key in found]

    # ---- objects that cannot be copied ----

    def _check(self, anew: list[int]) -> None:
        for key in anew:
            node = self._nodes[key]
            if key in self._made:
                continue
            if _is_module(node.value):
                why = _why_not_module(node.value)
            else:
                why = object_remaking.why_not(node.value)
            if why:
                raise CannotCloneError(
                    f"the model cannot be copied for analysis: "
                    f"{self._path(node.parent, node.label) or 'the model itself'} {why}"
                )

    def _path(self, parent: int | None, label: str) -> str:
        steps = [label]
        while parent is not None:
            node = self._nodes[parent]
            steps.append(node.label)
            parent = node.parent
        return ".".join(filter(None, reversed(steps)))

    # ---- making the clone ----

    def _fill(self, new: nn.Module, module: nn.Module, remake: object_remaking.Remake) -> None:
        if isinstance(module, torch.jit.ScriptModule):
            return
        own = _dict(new)
        compiled = _is_compiled(module)
        for name, value in entries_of(_dict(module)):
            if name == _ENTRY and value is not None:
                own[name] = nn.Module._call_impl.__get__(new)
            elif compiled and name == "forward":
                inner = remake(module._modules["_orig_mod"])
                own[name] = nn.Module.__call__.__get__(inner)
            elif name not in _NOT_TAKEN and not (compiled and name in _COMPILED[1:]):
                own[name] = remake(value)
        object_remaking.fill_slots(new, module, remake)


_PLAIN = (dict, set, OrderedDict)


def _dict(module: nn.Module) -> dict[str, Any]:
    own: dict[str, Any] = object.__getattribute__(module, "__dict__")
    return own


def _is_module(value: Any) -> bool:
    return issubclass(type(value), nn.Module)  # isinstance() also accepts a weakref.proxy


def _is_compiled(module: nn.Module) -> bool:
    return "_orig_mod" in _dict(module).get("_modules", ())


def _why_not_module(module: nn.Module) -> str:
    kind = plain_class(type(module))
    for base in kind.__mro__:
        if base.__module__.startswith(_DISTRIBUTED):
            return (
                f"is a {base.__name__}, whose ranks would have to run together; give the module "
                "that it wraps (model.module), before it is wrapped"
            )
    return object_remaking.why_not_made(kind)
