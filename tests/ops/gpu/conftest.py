"""The ways of a GPU run in Triton's interpreter here; with `make gpu-test` on a GPU."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
from tests.support.gpu_device import on_real_gpu, real_gpu
from tests.support.helpers import ISAS

collect_ignore_glob: list[str] = []
if not ISAS:  # their gradients are the compiled op's
    collect_ignore_glob.append("test_*.py")
if on_real_gpu():  # about the interpreter, its memory, and kernels compiled for other GPUs
    collect_ignore_glob += ["test_interpreter.py", "test_overruns.py", "test_compiled_kernels.py"]


@pytest.fixture
def gpu(one_thread: None) -> Iterator[None]:
    """A GPU, or what stands in for it: tensors that a test makes are there."""
    if on_real_gpu():
        with real_gpu():
            yield
        return
    from tests.support.interpreted_gpu import standing_in

    with standing_in():
        yield


@pytest.fixture
def default_way() -> Iterator[None]:
    """`chain` and its training on CPU tensors are what they are on a GPU."""
    if on_real_gpu():
        yield
        return
    from torchweld.ops.gpu import gpu_ops

    library = torch.library.Library("torchweld", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch tells that the kernels for CPUs are set aside
        gpu_ops.register_default(library, "CPU")
    try:
        yield
    finally:
        library._destroy()
