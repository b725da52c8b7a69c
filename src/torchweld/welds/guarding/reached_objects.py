"""Notes as facts whatever can be read from an object under the names in the code that ran.

In: an attribute, a global, a function, a class. Out: entries, items, classes and functions, to be
compared at every call. An object leads to others, and those to more. A module is refused if it
depends on something that can change unseen: tensors and arrays that are not parameters or buffers,
objects without a dictionary, functions that cannot be inspected.
"""

from __future__ import annotations

import collections
import enum
import functools
import sys
import types
import weakref
from collections.abc import Iterable, Mapping, Set
from typing import Any

import numpy as np
from torch import Tensor, nn

from torchweld.welds.guarding.bytecode_names import line_of, names_of
from torchweld.welds.guarding.dependency_facts import (
    ABSENT,
    INHERITED,
    ClassNames,
    ClosureCell,
    Entry,
    FunctionFact,
    Items,
    ObjectKind,
    contents_of,
    items_of,
    looked_up,
    meaning,
)
from torchweld.welds.guarding.executed_code import is_library, is_users
from torchweld.welds.guarding.held_functions import (
    functions_in,
    is_function,
    is_installed_cache,
)
from torchweld.welds.guarding.unchanging_values import (
    BUILT_IN,
    PURE_MODULES,
    is_constant,
    is_made_in_python,
    is_standard_librarys,
    reads_by_hand,
)
from torchweld.welds.refusal_reasons import Refused, place_of_line

MOST_ITEMS = 256  # in a container: more would take too long to compare at every call

_CONTAINERS = (list, dict, set, frozenset, tuple, collections.deque)
# Names that torch itself looks up on a module at every call.
_ALWAYS = ("forward", "__call__", "_call_impl", "__getattr__", "__getattribute__")
BOOKKEEPING = frozenset(nn.Module().__dict__)


class ReachedObjects:
    """What was reached so far, as facts.

    codes: the code that ran
    paths: the modules of the block
    """

    def __init__(self, codes: Set[types.CodeType], paths: Mapping[nn.Module, str]) -> None:
        self._codes, self._paths = codes, paths
        named = [names_of(code) for code in self._codes]
        self._texts = frozenset(text for one in named for text in one.texts)
        self.names = frozenset(name for one in named for name in one.read)
        # Names that may be missing without an error: a function that ran may catch the error.
        self.may_miss = self.names if any(one.handles for one in named) else self._texts
        self.explained: set[types.CodeType] = set()
        self._explained_functions: set[int] = set()
        self._seen: set[Any] = set()  # ids of visited objects, and keys of entries
        self._keep: list[Any] = []  # keeps objects alive, so that ids stay unique
        self.entries: list[Entry] = []
        self.items: list[Items] = []
        self.kinds: list[ObjectKind] = []
        self.classes: dict[type, ClassNames] = {}
        self.functions: list[FunctionFact] = []
        self.cells: list[ClosureCell] = []

    def note_entry(
        self,
        path: str | None,
        table: str,
        holder: dict[str, Any] | None,
        key: str,
        value: Any,
        what: str,
    ) -> bool:
        """Notes an entry; False if it was noted before."""
        mark = (path, table, id(holder), key)
        if mark in self._seen:
            return False
        self._seen.add(mark)
        self.entries.append(Entry(path, table, holder, key, value, what))
        return True

    # ---- classes ----

    def note_class(self, kind: type, more: Iterable[str] = ()) -> None:
        """Notes what a class has under the names in the code, and under names Python looks up."""
        known = self.classes.get(kind)
        if known is not None and all(name in known.names for name in more):
            return
        if not is_made_in_python(kind):
            return
        meta: type = type(kind)
        if meta is not type and is_made_in_python(meta):
            self.note_class(meta)
        names = {name: meaning(kind, name) for name in (*_ALWAYS, *more)}
        # Missing names too: a name added to a class later may hide the value that was read.
        names |= {name: meaning(kind, name) for name in self.names}
        for base in kind.__mro__:
            if is_made_in_python(base) and not base.__module__.startswith("torch."):
                special = [n for n in base.__dict__ if n.startswith("__") and n.endswith("__")]
                names |= {name: meaning(kind, name) for name in special}
        fresh = {n: v for n, v in names.items() if known is None or n not in known.names}
        merged = names if known is None else {**known.names, **names}
        self.classes[kind] = ClassNames(kind, merged, f"class {kind.__name__}")
        for name, value in fresh.items():
            if name in self.names and not (name.startswith("__") and name.endswith("__")):
                self._note_class_attribute(kind, name, value)
            elif self._runs(value):
                self.note_function(value, f"{kind.__name__}.{name}", "")

    def _note_class_attribute(self, kind: type, name: str, value: Any) -> None:
        """Notes a class attribute that may have been read."""
        what, where = f"{kind.__name__}.{name}", self.where(name)
        home = next((b for b in kind.__mro__ if name in b.__dict__), kind)
        if home.__module__ == "builtins" or home.__module__.split(".")[0] == "torch":
            if self._runs(value):
                self.note_function(value, what, where)
            return
        if isinstance(value, (types.MemberDescriptorType,)):
            raise Refused(f"depends on {what}, which can change unseen", where=where)
        self.note_value(value, what, where)

    # ---- values ----

    def note_value(self, value: Any, what: str, where: str) -> None:
        """Notes the value of an attribute, a global or a free variable."""
        if value is ABSENT or value is INHERITED or is_constant(value):
            return
        if isinstance(value, BUILT_IN):
            owner = getattr(value, "__self__", None)  # for `table.get` it is the table
            if owner is not None and not isinstance(owner, (types.ModuleType, type)):
                self.note_value(owner, what, where)
            return
        if id(value) in self._seen:
            return
        self._seen.add(id(value))
        self._keep.append(value)
        if isinstance(value, nn.Module):
            if value not in self._paths:
                raise Refused(f"depends on {what}, a module outside of it", where=where)
        elif isinstance(value, (Tensor, np.ndarray)):
            kind = "a tensor" if isinstance(value, Tensor) else "an array"
            raise Refused(f"depends on {what}, {kind} that can change unseen", where=where)
        elif isinstance(value, types.ModuleType):
            self._note_namespace(value, what, where)
        elif isinstance(value, enum.Enum):
            self.note_class(type(value))
            self.kinds.append(ObjectKind(value, type(value), value.__dict__, what))
            self._note_attributes(value, what, where)
            self.note_value(value._value_, what, where)
        elif isinstance(value, type):
            if value.__module__ != "builtins" and value.__module__.split(".")[0] != "torch":
                self.note_class(value)
        elif isinstance(value, functools.partial):
            self.note_value(value.func, what, where)
            self._note_container(value.args, what, where)
            self._note_container(value.keywords, what, where)
            self._note_attributes(value, what, where)
        elif is_function(value):
            self.note_function(value, what, where)
        elif isinstance(value, (*_CONTAINERS, types.MappingProxyType)):
            self._note_container(value, what, where)
        else:
            self._note_object(value, what, where)

    def _note_container(self, value: Any, what: str, where: str) -> None:
        if len(value) > MOST_ITEMS:
            raise Refused(f"depends on {what}, which holds {len(value)} things", where=where)
        held = items_of(value)
        if hasattr(value, "__missing__"):
            raise Refused(f"depends on {what}, which may change when it is read", where=where)
        if isinstance(value, types.MappingProxyType):
            raise Refused(f"depends on {what}, which can change unseen", where=where)
        if not isinstance(value, (tuple, frozenset)):
            self.items.append(Items(value, held, what))
        if type(value) not in _CONTAINERS and type(value).__module__ != "collections":
            if isinstance(value, (tuple, frozenset)) and not hasattr(value, "__dict__"):
                self.note_class(type(value))  # for example a named tuple
            else:
                self._note_object(value, what, where)
        for item in held:
            self.note_value(item, what, where)

    def _note_object(self, value: Any, what: str, where: str) -> None:
        """Notes an object with its own dictionary: a config, a callable, a namespace."""
        kind = type(value)
        if kind.__module__.split(".")[0] == "torch" and not isinstance(value, nn.Module):
            if callable(value):
                raise Refused(
                    f"calls {what}, a {kind.__name__}, which cannot be inspected", where=where
                )
            raise Refused(f"depends on {what}, which can change unseen", where=where)
        own = getattr(value, "__dict__", None)
        slots = [b for b in kind.__mro__ if b.__dict__.get("__slots__")]
        if type(own) is not dict or slots or isinstance(value, (weakref.ref, types.GeneratorType)):
            raise Refused(
                f"depends on {what}, a {kind.__name__}, which can change unseen", where=where
            )
        made_in_python = is_made_in_python(kind) and not is_standard_librarys(kind)
        if not made_in_python and kind is not types.SimpleNamespace:
            raise Refused(
                f"depends on {what}, a {kind.__name__}, which cannot be inspected", where=where
            )
        self.kinds.append(ObjectKind(value, kind, own, what))
        self.note_class(kind)
        self._note_attributes(value, what, where)

    def _note_attributes(self, value: Any, what: str, where: str) -> None:
        kind, own = type(value), value.__dict__
        names: Iterable[str] = sorted(self.names)
        # C code compares namespaces, and writes one as text, so it may read all attributes.
        whole = reads_by_hand(kind) or kind is types.SimpleNamespace
        if whole and not isinstance(value, nn.Module):
            # The class decides in code what a name gives, so all attributes may be read.
            self.items.append(Items(own, items_of(own), what))
            names = sorted(own)
        for name in names:
            if isinstance(value, nn.Module) and name in BOOKKEEPING:
                continue
            if name in own:
                if self.note_entry(None, "", own, name, own[name], f"{what}.{name}"):
                    self.note_value(own[name], f"{what}.{name}", self.where(name) or where)
            elif looked_up(kind, name) is not ABSENT or name in self.may_miss:
                self.note_entry(None, "", own, name, ABSENT, f"{what}.{name}")

    def _note_namespace(self, module: types.ModuleType, what: str, where: str) -> None:
        """Notes what a Python module has under the names in the code."""
        file = getattr(module, "__file__", None) or ""
        top = module.__name__.split(".")[0]
        if top in ("torch", "numpy", *PURE_MODULES):
            return
        if top in sys.stdlib_module_names or (file and is_library(file)):
            raise Refused(f"depends on {module.__name__}, which cannot be watched", where=where)
        for name in sorted(self.names):
            if name not in module.__dict__:
                if name in self.may_miss:
                    self.note_entry(None, "", module.__dict__, name, ABSENT, f"{what}.{name}")
            else:
                value = module.__dict__[name]
                named = f"{module.__name__}.{name}"
                if self.note_entry(None, "", module.__dict__, name, value, named):
                    self.note_value(value, named, self.where(name) or where)

    # ---- functions ----

    def _runs(self, value: Any) -> bool:
        """Whether the value is, or wraps, a function that ran."""
        return any(f.__code__ in self._codes for f in functions_in(value))

    def note_function(self, value: Any, what: str, where: str) -> None:
        """Notes a function, method or descriptor: what it wraps, and its state if it ran."""
        if isinstance(value, (functools._lru_cache_wrapper, functools.cached_property)):
            if is_installed_cache(value):
                return
            raise Refused(f"calls {what}, which remembers its results", where=where)
        if hasattr(value, "registry") and hasattr(value, "dispatch"):
            raise Refused(f"calls {what}, which dispatches on types", where=where)
        if isinstance(value, property) and not is_function(value.fget):
            raise Refused(f"depends on {what}, whose getter cannot be inspected", where=where)
        if isinstance(value, functools.partialmethod):
            self._note_container(value.args, what, where)
            self._note_container(value.keywords, what, where)
        if isinstance(value, types.MethodType):
            if not isinstance(value.__self__, nn.Module) or value.__self__ not in self._paths:
                self.note_value(value.__self__, what, where)
            value = value.__func__
        for function in functions_in(value):
            if id(function) in self._explained_functions:
                continue
            self._explained_functions.add(id(function))
            self._keep.append(function)
            code = function.__code__
            if code not in self._codes:
                if not is_library(code.co_filename):
                    continue
            else:
                self._explain(code)
                defaults, kwdefaults = function.__defaults__, function.__kwdefaults__
                self.functions.append(FunctionFact(function, code, defaults, kwdefaults, what))
            self._note_free(function, what, where)
            if code in self._codes:
                self._note_state(function, what, where)

    def _note_state(self, function: types.FunctionType, what: str, where: str) -> None:
        """Notes defaults and attributes of a function that ran."""
        by_name, own = function.__kwdefaults__, function.__dict__
        for default in (*(function.__defaults__ or ()), *(by_name or {}).values()):
            self.note_value(default, f"a default of {what}", where)
        if by_name is not None:
            self.items.append(Items(by_name, items_of(by_name), f"the defaults of {what}"))
        self.kinds.append(ObjectKind(function, types.FunctionType, own, what))
        for name in sorted(self.names - {"__wrapped__"}):
            if name in own:
                self.note_entry(None, "", own, name, own[name], f"{what}.{name}")
                self.note_value(own[name], f"{what}.{name}", where)
            elif name in self._texts:
                self.note_entry(None, "", own, name, ABSENT, f"{what}.{name}")

    def _note_free(self, function: types.FunctionType, what: str, where: str) -> None:
        names = function.__code__.co_freevars
        for name, cell in zip(names, function.__closure__ or (), strict=True):
            if name == "__class__" or id(cell) in self._seen:
                continue
            contents = contents_of(cell)
            self._seen.add(id(cell))
            self._keep.append(cell)
            named = f"{name}, a free variable of {function.__name__}"
            if function.__code__ in self._codes:
                self.cells.append(ClosureCell(cell, contents, named))
            if is_function(contents) or function.__code__ in self._codes:
                self.note_value(contents, named, where or self.where(name))

    def _explain(self, code: types.CodeType) -> None:
        """Marks a code object, and those inside it (lambdas, comprehensions, classes), as found."""
        self.explained.add(code)
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self._explain(constant)

    def where(self, name: str) -> str:
        """The line of the model's code that has this name."""
        for code in self._codes:
            if is_users(code.co_filename) and name in names_of(code).lines:
                return place_of_name(code, name)
        return ""


def place_of_name(code: types.CodeType, name: str) -> str:
    return place_of_line(code, line_of(code, name))
