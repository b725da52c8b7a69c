"""Finds what a module's result depends on besides its arguments and tensors, as facts to compare.

In: a module and the functions that ran when it was called (`executed_code`). Out: `Facts`. Every
name in the bytecode of these functions is looked up on every object they can reach: the modules of
the block, globals, free variables and defaults, and the objects that those lead to. So nothing that
was read is missed, whatever variables it went through. An attribute that was not read counts too if
its name occurs in the code. A module is refused if it depends on something that can change unseen:
tensors and arrays that are not parameters or buffers, objects without a dictionary, functions that
were reached in a way that cannot be watched.
"""

from __future__ import annotations

import builtins
import collections
import enum
import functools
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from torch import Tensor, nn

from torchweld.welds.guarding.bytecode_names import line_of, names_of
from torchweld.welds.guarding.dependency_facts import (
    ABSENT,
    INHERITED,
    NAMELESS,
    PRESENT,
    ClassNames,
    ClosureCell,
    Entry,
    Facts,
    FunctionFact,
    Items,
    ModulePart,
    Name,
    ObjectKind,
    Tie,
    contents_of,
    items_of,
    looked_up,
    meaning,
)
from torchweld.welds.guarding.executed_code import Ran, is_library, is_users
from torchweld.welds.guarding.held_functions import (
    functions_in,
    homes,
    is_function,
    is_installed_cache,
)
from torchweld.welds.guarding.questions_asked import TABLES_OF_TENSORS, asked_modes, asks_sizes
from torchweld.welds.guarding.unchanging_values import (
    BUILT_IN,
    PURE_MODULES,
    is_constant,
    is_made_in_python,
    is_standard_librarys,
    reads_by_hand,
)
from torchweld.welds.refusal_reasons import Refused, place_of_line

# More facts, or items in a container, would take too long to compare at every call.
MOST_FACTS, MOST_ITEMS = 400, 256

_CONTAINERS = (list, dict, set, frozenset, tuple, collections.deque)
# Names that torch itself looks up on a module at every call.
_ALWAYS = ("forward", "__call__", "_call_impl", "__getattr__", "__getattribute__")
_BOOKKEEPING = frozenset(nn.Module().__dict__)


def facts_of(
    module: nn.Module,
    ran: Sequence[Ran],
    called: frozenset[str] = frozenset(),
    kind_of: Callable[[type], type] = lambda kind: kind,
) -> Facts:
    """Everything that `ran`, recorded while `module` was called, can have read.

    called:  names of the C functions that were called
    kind_of: gives the original class of a module's class, which may be a welded one
    """
    return _Closure(module, ran, called, kind_of).facts()


class _Closure:
    def __init__(
        self,
        module: nn.Module,
        ran: Sequence[Ran],
        called: frozenset[str],
        kind_of: Callable[[type], type],
    ) -> None:
        self._ran, self._called, self._kind_of = ran, called, kind_of
        self._codes = {one.code for one in ran}
        named = [names_of(code) for code in self._codes]
        self._texts = frozenset(text for one in named for text in one.texts)
        self._names = frozenset(name for one in named for name in one.read)
        # Names that may be missing without an error: a function that ran may catch the error.
        self._may_miss = self._names if any(one.handles for one in named) else self._texts
        self._paths = {inner: path for path, inner in module.named_modules()}
        self._explained: set[types.CodeType] = set()
        self._explained_functions: set[int] = set()
        self._seen: set[Any] = set()  # ids of visited objects, and keys of entries
        self._keep: list[Any] = []  # keeps objects alive, so that ids stay unique
        self._parts: list[ModulePart] = []
        self._entries: list[Entry] = []
        self._items: list[Items] = []
        self._kinds: list[ObjectKind] = []
        self._classes: dict[type, ClassNames] = {}
        self._functions: list[FunctionFact] = []
        self._cells: list[ClosureCell] = []
        self._switched: list[str] = []

    def facts(self) -> Facts:
        modes = asked_modes(self._codes, self._called)
        for module, path in self._paths.items():
            self._module(module, path)
        for one in self._ran:
            self._ran_one(one)
        self._check_explained()
        found = Facts(
            parts=tuple(self._parts),
            entries=tuple(self._entries),
            items=tuple(self._items),
            kinds=tuple(self._kinds),
            classes=tuple(self._classes.values()),
            functions=tuple(self._functions),
            cells=tuple(self._cells),
            modes=modes,
            switched=tuple(self._switched),
            ties=tuple(self._ties()),
            asks_sizes=asks_sizes(self._codes, self._called),
        )
        if len(self._entries) + len(self._items) > MOST_FACTS:
            raise Refused(f"depends on more than {MOST_FACTS} things that can change")
        return found

    # ---- functions that ran ----

    def _ran_one(self, one: Ran) -> None:
        names = names_of(one.code)
        users = is_users(one.code.co_filename)
        for name in (*names.stored_globals, *self._stored_outside(one.code)):
            raise Refused(f"sets {name}, which outlives the call", where=_place(one.code, name))
        owner = one.first
        if owner is not None and not isinstance(owner, Tensor) and not is_constant(owner):
            kind = owner if isinstance(owner, type) else self._kind_of(type(owner))
            self._method(kind, one.code)
            if isinstance(owner, type) and users:
                self._class(owner)
        if not users:
            return
        for name in names.globals:
            self._global(one, name)
        for name in names.imports:
            known, where = sys.modules.get(name), _place(one.code, name)
            if known is None:
                raise Refused(f"imports {name}, which cannot be watched", where=where)
            self._entry(None, "", sys.modules, name, known, f"module {name}")
            self._value(known, f"module {name}", where)

    def _stored_outside(self, code: types.CodeType) -> list[str]:
        """Free variables the code sets that belong to no function that ran."""
        around = {
            name for other in self._codes if code in other.co_consts for name in other.co_cellvars
        }
        return [name for name in names_of(code).stored_free if name not in around]

    def _method(self, kind: type, code: types.CodeType) -> None:
        """Notes the method of a class that has this code."""
        if (kind, code) in self._seen:
            return
        self._seen.add((kind, code))
        for base, name in homes(kind, code):
            self._class(base, (name,))
            self._class(kind, (name,))
            self._function(base.__dict__[name], f"{base.__name__}.{name}", "")

    def _global(self, one: Ran, name: str) -> None:
        where, space = _place(one.code, name), one.globals
        home = space.get("__name__", "?")
        what = f"global {name} of {home}"
        value = space.get(name, ABSENT)
        if not self._entry(None, "", space, name, value, what):
            return
        if value is not ABSENT:
            self._value(value, what, where)
        else:
            found = vars(builtins).get(name, ABSENT)
            self._entry(None, "", vars(builtins), name, found, f"builtin {name}")
            self._value(found, f"builtin {name}", where)

    def _ties(self) -> Iterator[Tie]:
        """Names of tied tensors: a block has one name per tensor; the others have to stay tied."""
        first: dict[int, Name] = {}
        for module, path in self._paths.items():
            for table in ("_parameters", "_buffers"):
                for key, tensor in module.__dict__[table].items():
                    if tensor is not None:
                        name = Name(path, table, key)
                        known = first.setdefault(id(tensor), name)
                        if known != name:
                            yield Tie(known, name, f"{path}.{key}" if path else key)

    # ---- modules of the block ----

    def _module(self, module: nn.Module, path: str) -> None:
        what, own, kind = path or NAMELESS, module.__dict__, self._kind_of(type(module))
        children = tuple(
            (name, None if child is None else self._paths[child])
            for name, child in module._modules.items()
        )
        self._parts.append(ModulePart(path, kind, children))
        self._class(kind)
        if path:  # a forward set on the block's own module replaces the welded one, or calls it
            self._entry(path, "__dict__", None, "forward", ABSENT, f"{what}.forward")
        if "training" in self._names:
            self._switched.append(path)
        for table in ("_parameters", "_buffers") if TABLES_OF_TENSORS & self._names else ():
            held = own[table]
            self._items.append(Items(held, items_of(held), f"the {table.strip('_')} of {what}"))
        by_hand = looked_up(kind, "__getattr__") is not nn.Module.__getattr__
        for name in sorted(self._names - _BOOKKEEPING - {"forward"}):
            named = f"{path}.{name}" if path else name
            if name in own:
                if self._entry(path, "__dict__", None, name, own[name], named):
                    self._value(own[name], named, self._where(name))
                continue
            in_class = looked_up(kind, name) is not ABSENT
            kept = next((t for t in ("_parameters", "_buffers") if name in own[t]), None)
            if kept is not None:
                state = None if own[kept][name] is None else PRESENT
                self._entry(path, kept, None, name, state, named)
            missing = kept is None and name not in module._modules and not in_class
            may_miss = name in self._may_miss or by_hand
            if not missing or may_miss:
                self._entry(path, "__dict__", None, name, ABSENT, named)
            if missing and may_miss:
                for table in ("_parameters", "_buffers"):
                    self._entry(path, table, None, name, ABSENT, named)

    def _entry(
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
        self._entries.append(Entry(path, table, holder, key, value, what))
        return True

    # ---- classes ----

    def _class(self, kind: type, more: Iterable[str] = ()) -> None:
        """Notes what a class has under the names in the code, and under names Python looks up."""
        known = self._classes.get(kind)
        if known is not None and all(name in known.names for name in more):
            return
        if not is_made_in_python(kind):
            return
        meta: type = type(kind)
        if meta is not type and is_made_in_python(meta):
            self._class(meta)
        names = {name: meaning(kind, name) for name in (*_ALWAYS, *more)}
        # Missing names too: a name added to a class later may hide the value that was read.
        names |= {name: meaning(kind, name) for name in self._names}
        for base in kind.__mro__:
            if is_made_in_python(base) and not base.__module__.startswith("torch."):
                special = [n for n in base.__dict__ if n.startswith("__") and n.endswith("__")]
                names |= {name: meaning(kind, name) for name in special}
        fresh = {n: v for n, v in names.items() if known is None or n not in known.names}
        merged = names if known is None else {**known.names, **names}
        self._classes[kind] = ClassNames(kind, merged, f"class {kind.__name__}")
        for name, value in fresh.items():
            if name in self._names and not (name.startswith("__") and name.endswith("__")):
                self._attribute(kind, name, value)
            elif self._runs(value):
                self._function(value, f"{kind.__name__}.{name}", "")

    def _attribute(self, kind: type, name: str, value: Any) -> None:
        """Notes a class attribute that may have been read."""
        what, where = f"{kind.__name__}.{name}", self._where(name)
        home = next((b for b in kind.__mro__ if name in b.__dict__), kind)
        if home.__module__ == "builtins" or home.__module__.split(".")[0] == "torch":
            if self._runs(value):
                self._function(value, what, where)
            return
        if isinstance(value, (types.MemberDescriptorType,)):
            raise Refused(f"depends on {what}, which can change unseen", where=where)
        self._value(value, what, where)

    # ---- values ----

    def _value(self, value: Any, what: str, where: str) -> None:
        """Notes the value of an attribute, a global or a free variable."""
        if value is ABSENT or value is INHERITED or is_constant(value):
            return
        if isinstance(value, BUILT_IN):
            owner = getattr(value, "__self__", None)  # for `table.get` it is the table
            if owner is not None and not isinstance(owner, (types.ModuleType, type)):
                self._value(owner, what, where)
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
            self._namespace(value, what, where)
        elif isinstance(value, enum.Enum):
            self._class(type(value))
            self._kinds.append(ObjectKind(value, type(value), value.__dict__, what))
            self._object_entries(value, what, where)
            self._value(value._value_, what, where)
        elif isinstance(value, type):
            if value.__module__ != "builtins" and value.__module__.split(".")[0] != "torch":
                self._class(value)
        elif isinstance(value, functools.partial):
            self._value(value.func, what, where)
            self._container(value.args, what, where)
            self._container(value.keywords, what, where)
            self._object_entries(value, what, where)
        elif is_function(value):
            self._function(value, what, where)
        elif isinstance(value, (*_CONTAINERS, types.MappingProxyType)):
            self._container(value, what, where)
        else:
            self._object(value, what, where)

    def _container(self, value: Any, what: str, where: str) -> None:
        if len(value) > MOST_ITEMS:
            raise Refused(f"depends on {what}, which holds {len(value)} things", where=where)
        held = items_of(value)
        if hasattr(value, "__missing__"):
            raise Refused(f"depends on {what}, which may change when it is read", where=where)
        if isinstance(value, types.MappingProxyType):
            raise Refused(f"depends on {what}, which can change unseen", where=where)
        if not isinstance(value, (tuple, frozenset)):
            self._items.append(Items(value, held, what))
        if type(value) not in _CONTAINERS and type(value).__module__ != "collections":
            if isinstance(value, (tuple, frozenset)) and not hasattr(value, "__dict__"):
                self._class(type(value))  # for example a named tuple
            else:
                self._object(value, what, where)
        for item in held:
            self._value(item, what, where)

    def _object(self, value: Any, what: str, where: str) -> None:
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
        self._kinds.append(ObjectKind(value, kind, own, what))
        self._class(kind)
        self._object_entries(value, what, where)

    def _object_entries(self, value: Any, what: str, where: str) -> None:
        kind, own = type(value), value.__dict__
        names: Iterable[str] = sorted(self._names)
        # C code compares namespaces, and writes one as text, so it may read all attributes.
        whole = reads_by_hand(kind) or kind is types.SimpleNamespace
        if whole and not isinstance(value, nn.Module):
            # The class decides in code what a name gives, so all attributes may be read.
            self._items.append(Items(own, items_of(own), what))
            names = sorted(own)
        for name in names:
            if isinstance(value, nn.Module) and name in _BOOKKEEPING:
                continue
            if name in own:
                if self._entry(None, "", own, name, own[name], f"{what}.{name}"):
                    self._value(own[name], f"{what}.{name}", self._where(name) or where)
            elif looked_up(kind, name) is not ABSENT or name in self._may_miss:
                self._entry(None, "", own, name, ABSENT, f"{what}.{name}")

    def _namespace(self, module: types.ModuleType, what: str, where: str) -> None:
        """Notes what a Python module has under the names in the code."""
        file = getattr(module, "__file__", None) or ""
        top = module.__name__.split(".")[0]
        if top in ("torch", "numpy", *PURE_MODULES):
            return
        if top in sys.stdlib_module_names or (file and is_library(file)):
            raise Refused(f"depends on {module.__name__}, which cannot be watched", where=where)
        for name in sorted(self._names):
            if name not in module.__dict__:
                if name in self._may_miss:
                    self._entry(None, "", module.__dict__, name, ABSENT, f"{what}.{name}")
            else:
                value = module.__dict__[name]
                named = f"{module.__name__}.{name}"
                if self._entry(None, "", module.__dict__, name, value, named):
                    self._value(value, named, self._where(name) or where)

    # ---- functions ----

    def _runs(self, value: Any) -> bool:
        """Whether the value is, or wraps, a function that ran."""
        return any(f.__code__ in self._codes for f in functions_in(value))

    def _function(self, value: Any, what: str, where: str) -> None:
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
            self._container(value.args, what, where)
            self._container(value.keywords, what, where)
        if isinstance(value, types.MethodType):
            if not isinstance(value.__self__, nn.Module) or value.__self__ not in self._paths:
                self._value(value.__self__, what, where)
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
                self._functions.append(FunctionFact(function, code, defaults, kwdefaults, what))
            self._free(function, what, where)
            if code in self._codes:
                self._function_state(function, what, where)

    def _function_state(self, function: types.FunctionType, what: str, where: str) -> None:
        """Notes defaults and attributes of a function that ran."""
        by_name, own = function.__kwdefaults__, function.__dict__
        for default in (*(function.__defaults__ or ()), *(by_name or {}).values()):
            self._value(default, f"a default of {what}", where)
        if by_name is not None:
            self._items.append(Items(by_name, items_of(by_name), f"the defaults of {what}"))
        self._kinds.append(ObjectKind(function, types.FunctionType, own, what))
        for name in sorted(self._names - {"__wrapped__"}):
            if name in own:
                self._entry(None, "", own, name, own[name], f"{what}.{name}")
                self._value(own[name], f"{what}.{name}", where)
            elif name in self._texts:
                self._entry(None, "", own, name, ABSENT, f"{what}.{name}")

    def _free(self, function: types.FunctionType, what: str, where: str) -> None:
        names = function.__code__.co_freevars
        for name, cell in zip(names, function.__closure__ or (), strict=True):
            if name == "__class__" or id(cell) in self._seen:
                continue
            contents = contents_of(cell)
            self._seen.add(id(cell))
            self._keep.append(cell)
            named = f"{name}, a free variable of {function.__name__}"
            if function.__code__ in self._codes:
                self._cells.append(ClosureCell(cell, contents, named))
            if is_function(contents) or function.__code__ in self._codes:
                self._value(contents, named, where or self._where(name))

    def _explain(self, code: types.CodeType) -> None:
        """Marks a code object, and those inside it (lambdas, comprehensions, classes), as found."""
        self._explained.add(code)
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self._explain(constant)

    def _check_explained(self) -> None:
        """Refused if a function ran that no fact leads to: it could be replaced unseen."""
        for one in self._ran:
            code = one.code
            if code in self._explained or not is_users(code.co_filename):
                continue
            raise Refused(
                f"runs {code.co_name}, which was reached in a way that cannot be watched",
                where=place_of_line(code, code.co_firstlineno),
            )

    def _where(self, name: str) -> str:
        """The line of the model's code that has this name."""
        for code in self._codes:
            if is_users(code.co_filename) and name in names_of(code).lines:
                return _place(code, name)
        return ""


def _place(code: types.CodeType, name: str) -> str:
    return place_of_line(code, line_of(code, name))
