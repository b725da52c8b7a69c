"""Whether Triton kernels can run here, and why not.

Everything is said, nothing is guessed: a version of Triton that was not tested is a reason too.
"""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Sequence

import torch

from torchweld.machine import kernel_build
from torchweld.machine.gpu_identity import triton_version

# The Triton that torch 2.13 pins, and the newest. Kernels are compiled and interpreted with both.
TESTED_TRITON = ("3.7", "3.9")
# bfloat16 products and asynchronous copies need it (NVIDIA's compute capability).
LEAST_CAPABILITY = (8, 0)


def triton_problems() -> list[str]:
    """Why Triton cannot be used, wherever; empty if it can."""
    version = triton_version()
    if version is None:
        return ["Triton is not installed; pip install triton"]
    if ".".join(version.split(".")[:2]) not in TESTED_TRITON:
        tested = " or ".join(TESTED_TRITON)
        return [f"Triton {version} was not tested with these kernels; use {tested}"]
    return compiler_problems()


def compiler_problems() -> list[str]:
    """Why Triton cannot build what launches its kernels. Its interpreter launches nothing."""
    if os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y"):
        return []
    named = os.environ.get("CC")
    if named is not None:
        if shutil.which(named) is not None:
            return []
        return [f"Triton needs a C compiler, and CC={named!r} is no program; set or unset CC"]
    if any(shutil.which(name) is not None for name in ("gcc", "clang")):
        return []
    return ["Triton needs a C compiler, and there is no gcc or clang; install one, or set CC"]


def interpreted() -> bool:
    """Whether Triton runs kernels on CPU tensors, by its interpreter (TRITON_INTERPRET=1)."""
    if triton_version() is None:
        return False
    import triton

    return bool(triton.knobs.runtime.interpret)


def extension_problems() -> list[str]:
    problem = kernel_build.build_problem()
    return [] if problem is None else [f"gradients need torchweld's compiled part: {problem}"]


def serves_cuda() -> bool:
    """Whether CUDA tensors get Triton kernels. Looks for no device: that would start its driver."""
    built = torch.version.cuda is not None or torch.version.hip is not None
    return built and not triton_problems()


def has_cuda_kernels() -> bool:
    """Whether the kernels of csrc/cuda were built in."""
    found: bool = torch._C._dispatch_has_kernel_for_dispatch_key("torchweld::cuda_saving", "CUDA")
    return found


def absence() -> str:
    """Why torch has no GPU, and what to do; "" if it has one, whatever its age."""
    if torch.version.cuda is None and torch.version.hip is None:
        return f"torch {torch.__version__} is built without CUDA and ROCm"
    if not torch.cuda.is_available():
        return "torch finds no GPU; see nvidia-smi, or rocm-smi"
    return ""


@functools.cache
def device_problems() -> tuple[str, ...]:
    """Why no GPU can be used; empty if one can."""
    if why := absence():
        return (why,)
    each = [age_problem(i) for i in range(torch.cuda.device_count())]
    return () if None in each else tuple(why for why in each if why is not None)


def device_reasons(device: torch.device) -> list[str]:
    """Why this GPU cannot be used, where another one can."""
    if device.type != "cuda" or absence():
        return []
    why = age_problem(torch.cuda.current_device() if device.index is None else device.index)
    return [] if why is None else [why]


def shared_memory() -> int:
    """Bytes that a block can have on the current GPU; 0 if torch finds none."""
    if absence():
        return 0
    found = torch.cuda.get_device_properties()
    return int(getattr(found, "shared_memory_per_block_optin", 0))


@functools.cache
def age_problem(index: int) -> str | None:
    """Why this GPU is too old. ROCm's have other numbers; Triton knows them."""
    if torch.version.hip is not None:
        return None
    found = torch.cuda.get_device_capability(index)
    if found >= LEAST_CAPABILITY:
        return None
    has, needed = (".".join(map(str, pair)) for pair in (found, LEAST_CAPABILITY))
    return f"cuda:{index} has compute capability {has}; these kernels need {needed}"


def architecture_problem(index: int, built: Sequence[str]) -> str | None:
    """Why the CUDA kernels, built for these architectures, do not run on this GPU."""
    has = torch.cuda.get_device_capability(index)
    if any(_covers(name, has) for name in built):
        return None
    version = ".".join(map(str, has))
    return (
        f"torchweld's CUDA kernels were built for {', '.join(built)}, and cuda:{index} has compute "
        f'capability {version}; build torchweld again with TORCH_CUDA_ARCH_LIST="{version}"'
    )


def _covers(name: str, capability: tuple[int, int]) -> bool:
    """Whether what was built under nvcc's name for an architecture runs on this capability.

    sm_80 runs on its generation from there on, PTX (compute_80) on all later ones too. Of what is
    specific, sm_90a runs on that architecture alone, sm_100f on its family.
    """
    kind, _, rest = name.partition("_")
    digits = rest.rstrip("af")
    major, minor = int(digits[:-1]), int(digits[-1])
    if rest.endswith("a"):
        return capability == (major, minor)
    if kind == "compute" and not rest.endswith("f"):
        return capability >= (major, minor)
    return capability[0] == major and capability[1] >= minor
