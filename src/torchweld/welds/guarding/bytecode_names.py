"""Lists what a piece of Python code can read, from its bytecode: attributes, globals and texts.

In: a code object. Out: its `Names`. Names in branches that were not taken count too. Names do not
cover an attribute whose name is computed; `constant_calls` are the calls of `getattr` and `hasattr`
whose name is a constant in the code.
"""

from __future__ import annotations

import dis
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType
from typing import Any

_ATTRIBUTES = frozenset(["LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "IMPORT_FROM"])
_GLOBALS = frozenset(["LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"])
_CALLS = frozenset(["CALL", "CALL_FUNCTION"])
_BY_NAME = frozenset(["getattr", "hasattr"])
# Instructions between a function and its call that do not change the stack.
_SILENT = frozenset(["CACHE", "PRECALL", "EXTENDED_ARG", "NOP", "RESUME", "KW_NAMES"])


@dataclass(frozen=True, kw_only=True)
class Names:
    """The names in a code object; nested functions have their own `Names`."""

    attributes: frozenset[str]
    texts: frozenset[str]  # constants that are identifiers, as getattr takes them
    globals: tuple[str, ...]
    imports: tuple[str, ...]
    stored_globals: tuple[str, ...]  # set or deleted by the code
    stored_free: tuple[str, ...]  # free variables that it sets or deletes
    stored_attributes: tuple[tuple[str, int], ...]  # set or deleted, with their lines
    asks_class: str  # "type" or "__class__" if it does more with a class than read attributes
    handles: bool  # whether it catches exceptions; one could be of a missing attribute
    lines: dict[str, int]  # the first line of each name
    constant_calls: frozenset[int]  # offsets of calls of getattr and hasattr with a constant name
    passes_getattr: bool  # whether it passes getattr or hasattr on instead of calling it

    @property
    def read(self) -> frozenset[str]:
        """Every name under which an attribute may be read."""
        return self.attributes | self.texts


@functools.lru_cache(maxsize=8192)
def names_of(code: CodeType) -> Names:
    attributes: set[str] = set()
    texts: set[str] = set()
    lines: dict[str, int] = {}
    found: dict[str, list[str]] = {"globals": [], "imports": [], "stored": [], "free": []}
    stored: list[tuple[str, int]] = []
    line = code.co_firstlineno
    for instruction in dis.get_instructions(code):
        start = instruction.starts_line
        if isinstance(start, int) and not isinstance(start, bool):
            line = start
        elif start:  # Python 3.13 has a flag here, and the line elsewhere
            line = getattr(instruction, "line_number", None) or line
        name, value = instruction.opname, instruction.argval
        if name in _ATTRIBUTES:
            attributes.add(value)
        elif name in _GLOBALS:
            found["globals"].append(value)
        elif name == "IMPORT_NAME":
            found["imports"].append(value)
        elif name in ("STORE_GLOBAL", "DELETE_GLOBAL"):
            found["stored"].append(value)
        elif name in ("STORE_ATTR", "DELETE_ATTR"):
            attributes.add(value)
            stored.append((value, line))
        elif name in ("STORE_DEREF", "DELETE_DEREF") and value in code.co_freevars:
            found["free"].append(value)
        if isinstance(value, str):
            lines.setdefault(value, line)
    for text in _texts(code.co_consts):
        texts.add(text)
        lines.setdefault(text, code.co_firstlineno)
    return Names(
        attributes=frozenset(attributes),
        texts=frozenset(texts),
        globals=tuple(dict.fromkeys(found["globals"])),
        imports=tuple(dict.fromkeys(found["imports"])),
        stored_globals=tuple(dict.fromkeys(found["stored"])),
        stored_attributes=tuple(stored),
        stored_free=tuple(dict.fromkeys(found["free"])),
        asks_class=_asks_class(code),
        handles=_handles(code),
        lines=lines,
        constant_calls=_calls_by_name(code)[0],
        passes_getattr=_calls_by_name(code)[1],
    )


def _texts(constants: tuple[Any, ...]) -> Iterator[str]:
    for constant in constants:
        if isinstance(constant, str) and constant.isidentifier():
            yield constant
        elif isinstance(constant, (tuple, frozenset)):
            yield from _texts(tuple(constant))


def _handles(code: CodeType) -> bool:
    if hasattr(code, "co_exceptiontable"):
        return bool(code.co_exceptiontable)
    return any(i.opname in ("SETUP_FINALLY", "SETUP_WITH") for i in dis.get_instructions(code))


def _asks_class(code: CodeType) -> str:
    """Finds `type(x) is …` and similar; `type(x).name` only reads an attribute."""
    asked = ""  # how a class was just loaded, if one was
    waiting = False  # whether `type` was loaded and not called yet
    for instruction in dis.get_instructions(code):
        name, value = instruction.opname, instruction.argval
        if name in _SILENT or name == "PUSH_NULL":
            continue
        if asked:
            if name not in _ATTRIBUTES:
                return asked
            asked = ""
        if name in _GLOBALS and value == "type":
            if waiting:
                return "type"
            waiting = True
        elif waiting and name in _CALLS:
            waiting, asked = False, "type"
        elif name in _ATTRIBUTES and value == "__class__":
            asked = "__class__"
    return "type" if waiting else asked


def _calls_by_name(code: CodeType) -> tuple[frozenset[int], bool]:
    """Offsets of the calls `getattr(…, "name")`, and whether a `getattr` is loaded but not called.

    The stack is followed within straight-line code.
    """
    if not _BY_NAME & set(code.co_names):
        return frozenset(), False
    found: set[int] = set()
    loaded = calls = 0
    stack: list[Any] = []  # constant texts, _Function for getattr or hasattr, None
    for instruction in dis.get_instructions(code):
        name = instruction.opname
        if instruction.is_jump_target:  # other paths lead here: texts are not certain
            stack = [item if isinstance(item, _Function) else None for item in stack]
        if name in _SILENT:
            continue
        if name in _CALLS:
            count = instruction.arg or 0
            called = stack[-count - 1 : len(stack) - count] if len(stack) > count else []
            text = stack[-count + 1] if count >= 2 and len(stack) >= count else None
            if called and isinstance(called[0], _Function):
                calls += 1
                if isinstance(text, str):
                    found.add(instruction.offset)
        effect = _effect(instruction)
        if effect <= 0:
            del stack[max(0, len(stack) + effect - 1) :]
            stack.append(None)
        else:
            stack += [None] * effect
        if name == "LOAD_CONST":
            stack[-1] = instruction.argval
        elif name in _GLOBALS and instruction.argval in _BY_NAME:
            stack[-1] = _Function()
            loaded += 1
    return frozenset(found), loaded > calls


class _Function:
    """Marks `getattr` or `hasattr` on the stack."""


def _effect(instruction: dis.Instruction) -> int:
    if instruction.opname == "CALL":  # Python 3.11 counts part of its effect for PRECALL
        return -(instruction.arg or 0) - 1
    takes = instruction.opcode >= dis.HAVE_ARGUMENT
    return dis.stack_effect(instruction.opcode, instruction.arg if takes else None, jump=False)


def line_of(code: CodeType, name: str) -> int:
    """The first line that has a name, or the first line of the code."""
    return names_of(code).lines.get(name, code.co_firstlineno)
