"""What a module's own code asks of sizes while it runs on symbols instead of numbers.

A symbol notes the conditions that were decided on it, and no others. Three things escape it, so
they are watched here:

- a comparison whose answer is an object that nobody asks for its truth: `(n == 3) is True`
- text made of a size, its hash, or an attribute that an int has: `getattr(n, "real", 4)`
- code that goes another way since a symbol is no int: `isinstance(n, int) and n == 3`. So what runs
  is followed instruction by instruction, and must be what runs on numbers.
"""

from __future__ import annotations

import dis
import functools
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FrameType, FunctionType
from typing import Any

import mpmath
import sympy  # type: ignore[import-untyped]
import torch
import torch.utils.checkpoint

from torchweld.welds.guarding.executed_code import (
    is_installed,
    is_library,
    is_users,
    no_collection,
)
from torchweld.welds.refusal_reasons import is_ours

SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)


def _codes(*names: str) -> frozenset[CodeType]:
    """The code of the methods that symbols have under these names; by default of all methods."""
    methods = [
        method
        for kind in SYMBOLS
        for name, method in vars(kind).items()
        if isinstance(method, FunctionType) and (not names or name in names)
    ]
    return frozenset(method.__code__ for method in methods)


_TEXTS = _codes("__repr__", "__str__", "__format__", "__hash__", "_sympy_")
_METHODS = _codes()
_TRUTH = torch.SymBool.__bool__.__code__

# Packages that run inside of symbols. They count as torch.
_FOLDERS = tuple(os.path.dirname(str(one.__file__)) + os.sep for one in (torch, sympy, mpmath))
# Parts of torch that only pass calls on to the model's code.
_PASSING = (
    os.path.dirname(str(torch.nn.__file__)) + os.sep,
    str(torch.utils._contextlib.__file__),
    str(torch.utils.checkpoint.__file__),
)


def _is_models(frame: FrameType) -> bool:
    """Whether a frame runs code of the model.

    Generated code and code of installed packages belong to whoever calls them: torch makes classes
    and writes logs while it adds conditions on symbols.
    """
    file = frame.f_code.co_filename
    if file.startswith((*_FOLDERS, "<frozen ")) or not is_users(file):
        return False
    if not file.startswith("<") and not is_installed(file):
        return True
    caller = frame.f_back
    while caller is not None and _passes_on(caller.f_code.co_filename):
        caller = caller.f_back
    return caller is None or is_ours(caller.f_code.co_filename) or _is_models(caller)


def _passes_on(file: str) -> bool:
    return file.startswith(_PASSING) or (is_library(file) and not file.startswith(_FOLDERS))


# Builtins that answer for a symbol otherwise than for an int, without another way being taken.
_TELLING = frozenset(map(id, (getattr, hasattr, callable, id, vars, dir)))


class SizeQuestions:
    """The questions that code asked about sizes while this watched.

    `escaped`: a size was made text, was compared without a decision, or may have been asked for an
    attribute. `steps`: every instruction of
    the model's code that ran. `compared_identity`: two objects were compared by `is`, neither of
    them a constant; equal sizes may be one object or two.
    """

    def __init__(self) -> None:
        self.steps: list[tuple[CodeType, int]] = []
        self.compared_identity = False
        self._written = self._told = False
        self._undecided: dict[int, torch.SymBool] = {}

    @property
    def escaped(self) -> bool:
        return self._written or self._told or bool(self._undecided)

    @contextmanager
    def watching(self) -> Iterator[None]:
        profiled, traced = sys.getprofile(), sys.gettrace()
        with no_collection():
            sys.setprofile(self._on_symbol)
            sys.settrace(self._on_call)
            try:
                yield
            finally:
                sys.settrace(traced)
                sys.setprofile(profiled)

    # ---- symbols ----

    def _on_symbol(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "c_call":
            self._told |= id(argument) in _TELLING and _is_models(frame)
            return
        code = frame.f_code
        if code not in _METHODS:
            return
        if event == "call":
            if code is _TRUTH:
                self._undecided.pop(id(frame.f_locals["self"]), None)
            elif code in _TEXTS and not _asked_by_torch(frame):
                self._written = True
        elif isinstance(argument, torch.SymBool) and not _asked_by_torch(frame):
            self._undecided[id(argument)] = argument  # kept, so that its id stays its own

    # ---- the path ----

    def _on_call(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not _is_models(frame):
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        return self._on_step

    def _on_step(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "opcode":
            at = frame.f_lasti
            self.steps.append((frame.f_code, at))
            self.compared_identity |= at in _identity_comparisons(frame.f_code)
        return self._on_step


def _asked_by_torch(method: FrameType) -> bool:
    caller = method.f_back
    return caller is not None and caller.f_code.co_filename.startswith(_FOLDERS)


@functools.lru_cache(maxsize=1024)
def _identity_comparisons(code: CodeType) -> frozenset[int]:
    """Offsets at which code compares by `is`, except with a constant (None, True, a number)."""
    found, constant = [], False
    for one in dis.get_instructions(code):
        if one.opname == "IS_OP" and not constant:
            found.append(one.offset)
        if one.opname not in ("CACHE", "EXTENDED_ARG"):
            constant = one.opname in ("LOAD_CONST", "LOAD_SMALL_INT")
    return frozenset(found)
