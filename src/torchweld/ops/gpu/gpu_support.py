"""Whether Triton kernels can run here, and why not.

Everything is said, nothing is guessed: a version of Triton that was not tested is a reason too.
"""

from __future__ import annotations

import functools

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
    if ".".join(version.split(".")[:2]) in TESTED_TRITON:
        return []
    return [f"Triton {version} was not tested with these kernels; use {' or '.join(TESTED_TRITON)}"]


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
