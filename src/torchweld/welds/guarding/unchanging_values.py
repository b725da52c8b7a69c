"""Which values cannot change, and which code is known to be pure.

A fact about such a value would say nothing, so `reached_objects.py` notes none. Everything else is
compared at every call, or cannot be welded.
"""

from __future__ import annotations

import collections
import logging
import sys
import types
from typing import Any

import numpy as np
import torch
from torch.utils._contextlib import _DecoratorContextManager

from torchweld.welds.guarding.dependency_facts import looked_up

_EXACT = frozenset(
    [
        *(int, float, complex, bool, str, bytes, type(None), type(...), range, slice),
        *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format),
        *(type(NotImplemented), types.GenericAlias, types.UnionType),
    ]
)
_CONSTANTS = (
    *(torch.finfo, torch.iinfo, np.generic, np.dtype, np.ufunc),
    *(logging.Logger, logging.LoggerAdapter),
)
# Modules of Python's library whose functions depend on their arguments alone.
PURE_MODULES = frozenset(
    [
        *("abc", "builtins", "cmath", "collections", "contextlib", "copy", "dataclasses"),
        *("decimal", "enum", "fractions", "functools", "inspect", "itertools", "logging"),
        *("math", "numbers", "operator", "re", "string", "textwrap", "types", "typing"),
        *("warnings", "__future__"),
    ]
)
BUILT_IN = (
    *(types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType),
    *(types.MethodWrapperType, types.ClassMethodDescriptorType, types.GetSetDescriptorType),
    *(torch._ops.OpOverload, torch._ops.OpOverloadPacket, torch._ops._OpNamespace),
    type(collections.namedtuple("_", "field").field),  # type: ignore[attr-defined]
    _DecoratorContextManager,  # no_grad and similar, which have no settings
)
_HEAP_TYPE = 1 << 9  # flag of a class made by Python code


def is_constant(value: Any) -> bool:
    """Whether a value is immutable. Instances of a subclass are not: they may have attributes."""
    if type(value).__module__ == "typing":
        return True
    return type(value) in _EXACT or isinstance(value, _CONSTANTS)


def is_standard_librarys(kind: type) -> bool:
    """Whether a class is of Python's library, whose methods are not inspected."""
    top = kind.__module__.split(".")[0]
    return top in sys.stdlib_module_names and top not in ("__main__", "builtins")


def is_made_in_python(kind: type) -> bool:
    """Whether Python code made a class, which may give it other attributes later."""
    return bool(kind.__flags__ & _HEAP_TYPE)


def reads_by_hand(kind: type) -> bool:
    """Whether a class looks up its attributes with Python code."""
    own = [looked_up(kind, name) for name in ("__getattribute__", "__getattr__")]
    return any(isinstance(method, types.FunctionType) for method in own)
