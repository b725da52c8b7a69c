"""Records which Python code runs when a module is called, and which C functions it calls.

In: a call. Out: `executed(call)` gives a `Ran` for every function of the model's code that ran, and
of `torch.nn.modules`, because attributes of its modules are settings of a model too. torch's other
code and Python's library are trusted. Nothing is replaced: `sys.setprofile` observes this thread
alone. A call that depends on something that cannot be watched is Refused, with its line.
"""

from __future__ import annotations

import builtins
import gc
import os
import sys
import sysconfig
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torchweld.welds.guarding.bytecode_names import names_of
from torchweld.welds.refusal_reasons import Refused, is_ours, place_of_line

_TORCH = os.path.dirname(torch.__file__) + os.sep
_MODULES = os.path.dirname(nn.modules.__file__) + os.sep
_MODULE = os.path.join(_MODULES, "module.py")
_LIBRARY = tuple(
    {path + os.sep for path in map(sysconfig.get_path, ("stdlib", "platstdlib")) if path}
)
_INSTALLED = tuple(
    {path + os.sep for path in map(sysconfig.get_path, ("purelib", "platlib")) if path}
)


def is_library(file: str) -> bool:
    """Whether a file belongs to torch or to Python itself, which are trusted."""
    if file.startswith(_TORCH):
        return not file.startswith(_MODULES) or file == _MODULE
    if file.startswith(_INSTALLED):
        return False
    return file.startswith((*_LIBRARY, "<frozen "))


def is_installed(file: str) -> bool:
    """Whether a file belongs to an installed package."""
    return file.startswith(_INSTALLED)


def is_users(file: str) -> bool:
    """Whether a file belongs to the model's code: not to torch, to Python, or to torchweld."""
    return not file.startswith(_TORCH) and not is_ours(file) and not is_library(file)


@dataclass(frozen=True, eq=False)
class Ran:
    """A function that ran."""

    code: types.CodeType
    globals: dict[str, Any]
    free: dict[str, Any]  # values of its free variables
    first: Any  # its first argument: for a method, the object that it belongs to


@dataclass(frozen=True, eq=False)
class Executed:
    ran: list[Ran]
    called: frozenset[str]  # names of the C functions that the model's code called


@contextmanager
def no_collection() -> Iterator[None]:
    """No garbage is collected inside: finalizers and callbacks of a collection would run in a call
    that is being watched, and are not part of it."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def executed(call: Callable[[], object]) -> Executed:
    watch = _CodeWatch()
    before = sys.getprofile()
    with no_collection():
        sys.setprofile(watch.event)
        try:
            call()
        finally:
            sys.setprofile(before)
    if watch.refused is not None:
        raise watch.refused
    return Executed(list(watch.ran.values()), frozenset(watch.called))


def stored_names(call: Callable[[], object], ran: list[Ran]) -> tuple[str, str] | None:
    """An attribute that the model's code sets in this call, and its line; None if there is none."""
    stores = {
        (one.code, line): name
        for one in ran
        if is_users(one.code.co_filename)
        for name, line in names_of(one.code).stored_attributes
    }
    if not stores:
        return None
    met: list[tuple[types.CodeType, int]] = []
    codes = {code for code, _ in stores}

    def trace(frame: types.FrameType, event: str, _: Any) -> Any:
        if frame.f_code not in codes:
            return None
        if (frame.f_code, frame.f_lineno) in stores:
            met.append((frame.f_code, frame.f_lineno))
        return trace

    before = sys.gettrace()
    with no_collection():
        sys.settrace(trace)
        try:
            call()
        finally:
            sys.settrace(before)
    if not met:
        return None
    code, line = met[0]
    return stores[met[0]], place_of_line(code, line)


class _CodeWatch:
    def __init__(self) -> None:
        self.ran: dict[tuple[types.CodeType, int], Ran] = {}
        self.refused: Refused | None = None
        self.called: set[str] = set()
        self._library: dict[str, bool] = {}  # whether a file belongs to a library, by name

    def event(self, frame: types.FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if code.co_name == "<module>":  # a library evaluates the name of a type
            return
        if event == "call":
            if not self._is_library(frame):
                self._note(frame, code)
        elif event == "c_call" and not self._is_library(frame):
            if is_users(code.co_filename):
                self.called.add(getattr(argument, "__name__", ""))
            reason = _why_not(argument, frame)
            if reason and self.refused is None:
                self.refused = Refused(reason, where=place_of_line(code, frame.f_lineno))

    def _note(self, frame: types.FrameType, code: types.CodeType) -> None:
        known = frame.f_locals
        first = known.get(code.co_varnames[0]) if code.co_argcount else None
        if (code, id(first)) not in self.ran:
            free = {name: known[name] for name in code.co_freevars if name in known}
            self.ran[code, id(first)] = Ran(code, frame.f_globals, free, first)

    def _is_library(self, frame: types.FrameType) -> bool:
        file = frame.f_code.co_filename
        if file.startswith("<"):  # made by exec, like a dataclass's __init__: see its module
            home = str(frame.f_globals.get("__name__", "")).split(".")[0]
            return home == "torch" or (home in sys.stdlib_module_names and home != "__main__")
        known = self._library.get(file)
        if known is None:
            known = is_library(file) or is_ours(file)
            self._library[file] = known
        return known


# ---- C functions ----

_BUILTINS = frozenset(
    [
        *("abs", "all", "any", "bin", "callable", "chr", "divmod", "format", "hash", "hex"),
        *("isinstance", "issubclass", "iter", "len", "max", "min", "next", "oct", "ord", "pow"),
        *("repr", "round", "sorted", "sum", "__build_class__", "super"),
    ]
)
_LIBRARIES = frozenset(
    [
        *("math", "cmath", "operator", "_operator", "itertools", "_functools", "functools"),
        *("_collections", "collections", "_abc", "copyreg", "_struct", "binascii"),
    ]
)
_PLAIN_TYPES = (
    *(int, float, complex, bool, str, bytes, bytearray, list, tuple, dict, set, frozenset, range),
    *(slice, type(None), types.MappingProxyType, types.GeneratorType, types.CodeType, type),
    *(torch.Size, torch.dtype, torch.device, types.FunctionType, types.CellType, property),
)


def _why_not(function: Any, frame: types.FrameType) -> str:
    """Why the result may depend on something a C function reads unwatched; "" if it cannot."""
    name = getattr(function, "__qualname__", None) or repr(function)
    owner = getattr(function, "__self__", None)
    module = getattr(function, "__module__", None)
    if isinstance(owner, types.ModuleType):
        module = owner.__name__
    if module == "builtins" or owner is builtins:
        if name in ("getattr", "hasattr"):
            if frame.f_lasti in names_of(frame.f_code).constant_calls:
                return ""
            return f"reads an attribute whose name is computed ({name})"
        return "" if name in _BUILTINS else f"calls {name}, which cannot be watched"
    if module is not None and module.split(".")[0] in ("torch", *_LIBRARIES):
        return ""
    kind = getattr(function, "__objclass__", None) or (owner if isinstance(owner, type) else None)
    kind = kind or type(owner)
    if issubclass(kind, (Tensor, torch._C.TensorBase, *_PLAIN_TYPES)):
        if name.rpartition(".")[2] in ("__getattribute__", "__setattr__", "__delattr__"):
            return f"calls {name}, which takes computed names"
        return ""
    if owner is None and kind is type(None):
        return f"calls {name}, which cannot be inspected"
    if kind.__module__.split(".")[0] in ("torch", *_LIBRARIES, "typing", "enum", "types"):
        return ""
    if kind is object and name.rpartition(".")[2] in ("__init__", "__new__", "__init_subclass__"):
        return ""
    what = f"{module}.{name}" if module else name
    return f"calls {what}, which cannot be inspected"
