"""The CUDA kernels run on the host here, on CPU tensors; with `make gpu-test` on a GPU."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
from tests.support.gpu_device import on_real_gpu, real_gpu
from tests.support.helpers import ISAS

from torchweld.ops.gpu import gpu_support

collect_ignore_glob: list[str] = []
ON_HOST = ("backend", "capture", "compiles", "selftest")  # and kernels compiled for other GPUs
if not ISAS:  # their gradients are the compiled op's
    collect_ignore_glob.append("test_*.py")
if on_real_gpu():
    others = [f"test_cuda_{name}.py" for name in ON_HOST]
    collect_ignore_glob += others if gpu_support.has_cuda_kernels() else ["test_*.py"]
elif shutil.which("g++") is None:
    collect_ignore_glob.append("test_*.py")


@pytest.fixture
def cuda_on_host(one_thread: None) -> Iterator[None]:
    """The way `cuda`: on the host, or on a GPU, where tensors that a test makes are then."""
    if on_real_gpu():
        from tests.support.cuda_on_host import forget, launched

        forget()
        with real_gpu(launched):
            yield
        return
    from tests.support.cuda_on_host import standing_in

    with standing_in():
        yield
