"""Says why a module is not a chain: the `Refused` exception, ops in words, and source lines."""

from __future__ import annotations

import inspect
import os
import re
import sys
import traceback
from types import CodeType, FrameType, TracebackType
from typing import Any

import torch
from torch import nn

_TORCH = os.path.dirname(torch.__file__) + os.sep
_OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep
_EXAMPLES = os.path.join(_OURS, "models") + os.sep
_FRAME = re.compile(r'File "(.*)", line (\d+)')

# Common ops in words, as messages show them.
_WORDS = {
    "layer_norm": "a layer norm",
    "native_layer_norm": "a layer norm",
    "rms_norm": "an RMS norm",
    "group_norm": "a group norm",
    "batch_norm": "a batch norm",
    "instance_norm": "an instance norm",
    "softmax": "a softmax",
    "log_softmax": "a log-softmax",
    "scaled_dot_product_attention": "attention",
    "topk": "a choice of the largest values",
    "sort": "a sort",
    "embedding": "an embedding",
    "embedding_bag": "an embedding",
    "conv1d": "a convolution",
    "conv2d": "a convolution",
    "conv3d": "a convolution",
    "convolution": "a convolution",
    "cat": "a concatenation",
    "mean": "a mean",
    "var": "a variance",
    "sum": "a sum",
    "cumsum": "a running sum",
    "prelu": "an activation with weights of its own",
    "bmm": "a product of two activations",
    "einsum": "a product that is not a Linear",
}


class Refused(Exception):  # noqa: N818
    """Raised if a module is not a chain; becomes a refusal with a reason, an op and a line."""

    # Whether the module has any product; None if it was not traced.
    multiplies: bool | None = None

    def __init__(self, reason: str, op: str = "", where: str = "") -> None:
        super().__init__(reason)
        self.reason, self.op, self.where = reason, op, where


def op_name(target: Any) -> str:
    """The name of an op without its overload, as `aten.layer_norm`; else the name of the target."""
    schema = getattr(target, "_schema", None)
    if schema is not None:
        return str(schema.name).replace("::", ".")
    return getattr(target, "__name__", None) or str(target)


def in_words(op: str) -> str:
    """An op in words, to start a sentence with; unknown ops keep their names."""
    return _WORDS.get(op.rpartition(".")[2].removesuffix("_"), op)


def is_ours(file: str) -> bool:
    """Whether a file belongs to torchweld, except its built-in models."""
    return file.startswith(_OURS) and not file.startswith(_EXAMPLES)


def source_of(stack_trace: str | None) -> str:
    """The innermost line of the model's code in a formatted stack trace, as "modeling.py:212"."""
    frames = [f for f in _FRAME.findall(stack_trace or "") if not is_ours(f[0])]
    own = [frame for frame in frames if not frame[0].startswith(_TORCH)]
    return _place(*(own or frames)[-1]) if frames else ""


def raised_at(error: BaseException) -> str:
    """The innermost line of the model's code that an exception passed through."""
    trace: TracebackType | None = error.__traceback__
    lines = [(f.filename, f.lineno or 0) for f in traceback.extract_tb(trace)]
    own = [line for line in lines if not line[0].startswith(_TORCH) and not is_ours(line[0])]
    return _place(*own[-1]) if own else ""


def called_from() -> str:
    """The innermost line of the model's code that is running now."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_TORCH) and not is_ours(file):
            return _place(file, frame.f_lineno)
        frame = frame.f_back
    return ""


def defined_at(module: nn.Module) -> str:
    """The line where the module's forward is defined."""
    code: CodeType | None = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return "" if code is None else _place(code.co_filename, code.co_firstlineno)


def place_of_line(code: CodeType, line: int) -> str:
    return _place(code.co_filename, line)


def _place(file: str, line: int | str) -> str:
    return f"{os.path.basename(file)}:{line}"
