"""The CUDA kernels on the host: their source built by g++, as ops that take CPU tensors.

`csrc/cuda/cuda_on_host.h` stands in for CUDA, and the glue is built against the torch that is
installed. Objects are kept in `build/` and compiled again only when a file or a command changed.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from torchweld.ops.backends import gpu_backends
from torchweld.ops.gpu import gpu_support

ROOT = Path(__file__).parents[2]
CSRC = ROOT / "csrc"
CUDA = CSRC / "cuda"
# Without optimisation: compiling takes longer than the tests do.
KERNEL_FLAGS = ["-std=c++17", "-O0", "-fPIC", "-Wall", "-Wextra", "-Werror", f"-I{CSRC}"]


@functools.cache
def setup_script() -> Any:
    """setup.py as a module: it knows how torch's headers are found, and what is up to date."""
    spec = importlib.util.spec_from_file_location("torchweld_setup", ROOT / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def built_library() -> Path:
    """The ops `cuda_saving` and `cuda_backward` for CPU tensors."""
    setup = setup_script()
    folder = ROOT / "build" / f"cuda-on-host-torch{torch.__version__}"
    folder.mkdir(parents=True, exist_ok=True)
    headers = Path(torch.__file__).parent / "include"
    glue = [
        *("-std=c++20", "-O0", "-fPIC", "-Wall", "-Wextra", "-Wno-missing-field-initializers"),
        "-DTORCHWELD_CUDA_ON_HOST",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
        *(f"-I{CSRC}", f"-I{ROOT / 'src' / 'torchweld'}"),
        *("-isystem", str(headers)),
        *("-isystem", str(headers / "torch" / "csrc" / "api" / "include")),
    ]
    compiler = shutil.which("g++")
    assert compiler, "g++ is needed to build the CUDA kernels for the host"
    objects = []
    for source, flags in (
        (CSRC / "torch_glue" / "cuda_ops.cpp", glue),
        (CUDA / "launch_log.cpp", KERNEL_FLAGS),
        (CUDA / "cuda_kernels.cu", [*KERNEL_FLAGS, "-x", "c++"]),
    ):
        target = folder / f"{source.stem}.o"
        setup.compile_object([compiler, *flags], source, target, source.name)
        objects.append(target)
    library = folder / "cuda_on_host.so"
    made = library.stat().st_mtime_ns if library.exists() else 0
    if any(one.stat().st_mtime_ns > made for one in objects):
        link = [compiler, "-shared", *map(str, objects), "-o", str(library)]
        setup.run_compiler(
            [*link, f"-L{headers.parent / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch"],
            "linking the CUDA kernels for the host",
        )
    return library


@functools.cache
def loaded() -> None:
    torch.ops.load_library(str(built_library()))


def launched() -> list[str]:
    names: list[str] = torch.ops.torchweld.cuda_launched()
    return names


def forget() -> None:
    torch.ops.torchweld.forget_cuda_launches()


@contextlib.contextmanager
def standing_in() -> Iterator[None]:
    """Inside, CPU tensors reach the way `cuda`, and its backend serves the CPU."""
    assert sys.platform == "linux"
    loaded()
    forget()
    backend = next(one for one in gpu_backends.BACKENDS if one.name == "cuda")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_support, "device_problems", lambda: ())
        patch.setattr(gpu_support, "has_cuda_kernels", lambda: True)
        able = replace(backend.abilities, devices=("cuda", "cpu"))
        patch.setattr(backend, "abilities", able)
        yield
