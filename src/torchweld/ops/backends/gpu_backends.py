"""Backends of a GPU: one row for each way to run a chain there (`ops/gpu/gpu_ways.py`).

cublas         products by torch, one Triton kernel for bias, activation and gate: what
               `torch.ops.torchweld.chain` does by itself on such a device
triton         a Triton kernel per layer, forward and backward
triton-narrow  one Triton kernel for a whole chain of widths up to 256
cuda           CUDA C++, if torchweld was built with it: one kernel for a chain of widths up to 256,
               forward and backward; for others what cublas does, without Triton

ROCm's devices are "cuda" to torch, and Triton serves them too. Dropout inside a block is drawn by
another generator than eager's there, so plans do not weld it; `FusedMLP` applies it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from torchweld.machine import kernel_build
from torchweld.ops.backends.abilities import Abilities, BackendMode
from torchweld.ops.backends.backend import (
    Backend,
    Form,
    Runner,
    check_build,
    mode_of,
    plain_reasons,
)
from torchweld.ops.gpu import gpu_support, gpu_ways

_MODES = (
    BackendMode(name="natural", planned=("inference", "training")),
    BackendMode(name="recompute", recomputes=True, planned=("training",)),
)
MOST_NARROW_LAYERS = 12  # kMostLayers of csrc/cuda/cuda_kernels.h
ALWAYS_NARROW = 128  # the widest layer for which 99 KB of shared memory do: what GeForce cards have
ENOUGH_SHARED = 163 << 10  # an A100's, for the widest
_DTYPES = ("float32", "bfloat16", "float16")


class WayRunner:
    """A chain in one way; gradients by the op's autograd."""

    copied_bytes = 0

    def __init__(self, block: Form, tensors: Sequence[Tensor], way: str, recompute: bool) -> None:
        self._tensors, self._spec = list(tensors), block.spec
        self._way, self._recompute = way, recompute

    def __call__(self, x: Tensor) -> Tensor | list[Tensor]:
        op = torch.ops.torchweld.chain_way.default
        y: Tensor = op(x, self._tensors, self._spec, self._way, self._recompute)
        return y


class GpuBackend:
    """One way. `narrow`: for widths up to `gpu_ways.MOST_NARROW` alone."""

    def __init__(
        self, name: str, way: str, *, needs: str, narrow: bool = False,
        kernels: Callable[[Form], dict[str, int] | None] | None = None,
    ) -> None:  # fmt: skip
        self.name, self._way, self._narrow, self._kernels = name, way, narrow, kernels
        self.abilities = Abilities(
            devices=("cuda",),
            dtypes=_DTYPES,
            modes=_MODES,
            needs=needs,
            trains=True,
            deterministic=True,
            in_graphs=way == gpu_ways.DEFAULT_WAY,
        )

    def unavailable(self) -> list[str]:
        return [*gpu_support.device_problems(), *self._kernel_problems()]

    def _kernel_problems(self) -> list[str]:
        return [*gpu_support.triton_problems(), *gpu_support.extension_problems()]

    def expected_kernels(self, block: Form) -> dict[str, int] | None:
        """What `torchweld bench --device cuda` holds it to."""
        return None if self._kernels is None else self._kernels(block)

    def unsupported_reasons(
        self,
        block: Form,
        shapes: Sequence[Sequence[int]],
        dtype: torch.dtype,
        device: torch.device,
        mode: str | None = None,
    ) -> list[str]:
        mode_of(self, mode)
        reasons = plain_reasons(self, block, dtype, device)
        if not gpu_support.device_problems():  # else the reasons have them
            reasons += gpu_support.device_reasons(device)
        if block.kind != "chain":
            reasons.append("it runs chains; torch's products serve groups")
        if self._narrow:
            reasons += _width_problems(block)
        return reasons

    def build(self, block: Form, tensors: Sequence[Tensor], mode: str | None = None) -> Runner:
        mode = check_build(self, block, tensors, mode)
        return WayRunner(block, tensors, self._way, recompute=mode == "recompute")


class CudaBackend(GpuBackend):
    """The kernels of csrc/cuda. Chains that are not narrow have torch's products."""

    def __init__(self) -> None:
        super().__init__(
            "cuda", "cuda", needs="an NVIDIA GPU, and torchweld built with nvcc",
            kernels=_cuda_kernels,
        )  # fmt: skip

    def unavailable(self) -> list[str]:
        found = super().unavailable()
        if found:
            return found
        each = [_architecture_problem(i) for i in range(torch.cuda.device_count())]
        return [] if None in each else [why for why in each if why is not None]

    def unsupported_reasons(
        self,
        block: Form,
        shapes: Sequence[Sequence[int]],
        dtype: torch.dtype,
        device: torch.device,
        mode: str | None = None,
    ) -> list[str]:
        reasons = super().unsupported_reasons(block, shapes, dtype, device, mode)
        if not self.unavailable() and device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            why = _architecture_problem(index)
            reasons += [why] if why is not None else []
        return reasons

    def _kernel_problems(self) -> list[str]:
        problems = gpu_support.extension_problems()
        if not problems and not gpu_support.has_cuda_kernels():
            info = kernel_build.build_info()
            why = f": {info.cuda.reason}" if info is not None and info.cuda.reason else ""
            problems = [
                f"torchweld was built without its CUDA kernels{why}; build it where torch has CUDA "
                "and nvcc is found"
            ]
        return problems


def _architecture_problem(index: int) -> str | None:
    info = kernel_build.build_info()
    if info is None or not info.cuda.architectures:
        return None
    return gpu_support.architecture_problem(index, info.cuda.architectures)


def _width_problems(block: Form) -> list[str]:
    widest = max(block.K, *(N for _, N in block.sizes))
    most = gpu_ways.MOST_NARROW
    return [f"a layer is {widest} wide; it takes up to {most}"] if widest > most else []


def _pointwise_kernels(block: Form) -> dict[str, int]:
    """A product for each weight; one kernel more where there is an activation or a gate."""
    after = sum(form.activation != "identity" or form.gate != "none" for form in block.forms)
    products = sum(2 if form.gate == "separate" else 1 for form in block.forms)
    return {"gemm": products, **({"pointwise": after} if after else {})}


def _cuda_kernels(block: Form) -> dict[str, int] | None:
    """One kernel for a narrow chain, as long as its description is an argument (csrc/cuda).

    None where the GPU's shared memory decides: an A100 has enough for the widest.
    """
    if _width_problems(block) or len(block.forms) > MOST_NARROW_LAYERS:
        return _pointwise_kernels(block)
    widest = max(block.K, *(N for _, N in block.sizes))
    if widest > ALWAYS_NARROW and gpu_support.shared_memory() < ENOUGH_SHARED:
        return None
    return {"gemm": 1}


_TRITON = "a GPU, and Triton"
BACKENDS: tuple[Backend, ...] = (
    GpuBackend("cublas", "pointwise", needs=_TRITON, kernels=_pointwise_kernels),
    GpuBackend(
        "triton", "epilogue", needs=_TRITON, kernels=lambda block: {"gemm": len(block.forms)}
    ),
    GpuBackend(
        "triton-narrow", "narrow", needs=_TRITON, narrow=True, kernels=lambda _: {"gemm": 1}
    ),
    CudaBackend(),
)
