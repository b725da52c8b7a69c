"""The tensors among an op's arguments, from the fields "Input Dims", "Input type", "Input Strides".

Each has one entry per argument. Steps repeat the same few shapes thousands of times, so tensors are
made once and reused.
"""

from __future__ import annotations

import marshal
from typing import Any

from torchweld.core.record_fields import MOST_INT
from torchweld.profiles.profile import Tensor

# "Input type" -> dtype. "Scalar" and "" are missing: they have no shape and are not tensors.
DTYPES = {
    "float": "float32",
    "double": "float64",
    "c10::Half": "float16",
    "c10::BFloat16": "bfloat16",
    **dict.fromkeys(("long", "long int"), "int64"),
    "int": "int32",
    **dict.fromkeys(("short", "short int"), "int16"),
    **dict.fromkeys(("char", "signed char"), "int8"),
    "unsigned char": "uint8",
    "bool": "bool",
    "c10::complex<float>": "complex64",
    "c10::complex<double>": "complex128",
    "c10::Float8_e4m3fn": "float8_e4m3fn",
    "c10::Float8_e5m2": "float8_e5m2",
}

# The other way round; of several names, the one that torch writes today.
TYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

Inputs = tuple[Tensor | None, ...]


class InputReader:
    """Calling it with the "args" of an op gives the op's inputs; () where no tensor is told of."""

    def __init__(self) -> None:
        self.unreadable = 0  # ops whose shapes make no sense
        self._known: dict[bytes, Inputs] = {}

    def __call__(self, arguments: Any) -> Inputs:
        shapes = arguments["Input Dims"]
        types = arguments.get("Input type")
        strides = arguments.get("Input Strides")
        try:
            # The quickest way to a key for lists of lists. Version 2 writes equal values equally.
            key = marshal.dumps((shapes, types, strides), 2)
            found = self._known.get(key)
            if found is None:
                found = self._known[key] = _inputs(shapes, types, strides)
        except (TypeError, ValueError):
            self.unreadable += 1
            return ()
        return found


def _inputs(shapes: Any, types: Any, strides: Any) -> Inputs:
    found: list[Tensor | None] = []
    types = types or [""] * len(shapes)
    strides = strides or [None] * len(shapes)
    for shape, type_, stride in zip(shapes, types, strides, strict=True):
        if shape and isinstance(shape[0], list):  # a list of tensors, whose type is not told
            each = stride if stride and len(stride) == len(shape) else [None] * len(shape)
            found += [_tensor(a, "", b) for a, b in zip(shape, each, strict=True)]
        elif shape or type_ in DTYPES:
            found.append(_tensor(shape, DTYPES.get(type_, ""), stride))
        else:
            found.append(None)
    return tuple(found) if any(tensor is not None for tensor in found) else ()


def _tensor(shape: Any, dtype: str, strides: Any) -> Tensor:
    if not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(shape)
    known = isinstance(strides, list) and len(strides) == len(shape)
    if known and not all(type(step) is int and abs(step) <= MOST_INT for step in strides):
        raise ValueError(strides)
    found = Tensor(shape=tuple(shape), dtype=dtype, strides=tuple(strides) if known else None)
    for problem in found.problems():
        raise ValueError(problem)
    return found
