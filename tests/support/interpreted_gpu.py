"""Triton's interpreter in place of a GPU: the ops of all ways take CPU tensors.

The interpreter multiplies and rounds bfloat16 wrongly, and says nothing. `right_bf16` replaces the
two functions that do so; `test_interpreter.py` proves that both are wrong before and right after.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch
import triton.language as tl
from torch.utils._python_dispatch import _disable_current_modes
from triton.runtime import interpreter

from torchweld.ops.backends import gpu_backends
from torchweld.ops.gpu import gpu_launches, gpu_ops, gpu_support


def _bf16_bits(values: Any) -> Any:
    """fp32 as bfloat16, rounded to nearest even by torch."""
    with _disable_current_modes():  # this is the device, whose work no mode of a test sees
        rounded = torch.from_numpy(numpy.ascontiguousarray(values)).bfloat16()
        return rounded.view(torch.int16).numpy().view(numpy.uint16).reshape(values.shape)


def _widened(handle: Any) -> Any:
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    bits = numpy.ascontiguousarray(handle.data).view(numpy.uint16).astype(numpy.uint32) << 16
    return interpreter.TensorHandle(bits.view(numpy.float32), tl.float32)


@contextmanager
def right_bf16() -> Iterator[None]:
    convert, dot = interpreter._convert_float, interpreter.InterpreterBuilder.create_dot

    def right_convert(values: Any, source: Any, target: Any, *rest: Any) -> Any:
        if source == tl.float32 and target == tl.bfloat16:
            return _bf16_bits(numpy.ascontiguousarray(values).view(numpy.float32))
        return convert(values, source, target, *rest)

    def right_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(self, _widened(a), _widened(b), *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_convert_float", right_convert)
        patch.setattr(interpreter.InterpreterBuilder, "create_dot", right_dot)
        yield


@contextmanager
def standing_in() -> Iterator[None]:
    """Inside, CPU tensors reach the ops of all ways, and their backends serve the CPU."""
    assert gpu_support.interpreted(), "TRITON_INTERPRET=1 must be set before Triton is imported"
    library = torch.library.Library("torchweld", "IMPL")
    gpu_ops.register_ways(library, "CPU")
    gpu_launches.forget()
    # Both sides of a `where` are computed, and numpy warns of the one that is not taken.
    quiet = numpy.errstate(all="ignore")
    with pytest.MonkeyPatch.context() as patch, right_bf16(), quiet:
        patch.setattr(gpu_support, "device_problems", lambda: ())
        patch.setattr(gpu_support, "has_cuda_kernels", lambda: False)  # they take no CPU tensors
        for backend in gpu_backends.BACKENDS:
            able = replace(backend.abilities, devices=("cuda", "cpu"))
            patch.setattr(backend, "abilities", able)
        try:
            yield
        finally:
            library._destroy()
