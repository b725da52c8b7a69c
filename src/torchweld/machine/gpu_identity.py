"""What a GPU is and what drives it: for readers of a report, and for what is only true there."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import importlib.util
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from torchweld.core.number_text import size
from torchweld.core.record_fields import Count

# nvidia-smi asks every GPU of the machine, which takes long.
SMI_SECONDS = 20.0
# The names that Triton is installed by; ROCm's builds of torch bring the later ones.
_TRITON_PACKAGES = ("triton", "triton-rocm", "pytorch-triton-rocm")


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One device of this process; "" and 0 for what is not known.

    capability: "8.0" of NVIDIA's, "gfx942" of AMD's
    runtime:    the CUDA or ROCm that torch was built with
    driver:     as nvidia-smi has it
    """

    name: str
    capability: str = ""
    memory_bytes: Count = 0
    processors: Count = 0
    runtime: str = ""
    driver: str = ""

    @property
    def words(self) -> str:
        """`NVIDIA A100, compute capability 8.0, 40 GB, CUDA 13.0, driver 580.65`."""
        capability = self.capability
        if capability[:1].isdigit():
            capability = f"compute capability {capability}"
        memory = size(self.memory_bytes) if self.memory_bytes else ""
        driver = f"driver {self.driver}" if self.driver else ""
        return ", ".join(filter(None, (self.name, capability, memory, self.runtime, driver)))


def gpu_here(device: torch.device) -> Gpu:
    """The device with this number; the current one without."""
    index = torch.cuda.current_device() if device.index is None else device.index
    found = torch.cuda.get_device_properties(index)
    if torch.version.hip is not None:
        capability, runtime = str(getattr(found, "gcnArchName", "")), f"ROCm {torch.version.hip}"
    else:
        capability, runtime = f"{found.major}.{found.minor}", f"CUDA {torch.version.cuda}"
    return Gpu(
        name=found.name,
        capability=capability,
        memory_bytes=found.total_memory,
        processors=found.multi_processor_count,
        runtime=runtime,
        driver=driver_version(),
    )


def driver_version() -> str:
    """The version of NVIDIA's driver; "" if nvidia-smi is missing or does not answer."""
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(
            asked, capture_output=True, text=True, timeout=SMI_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    lines = done.stdout.split("\n")
    return lines[0].strip()


@functools.cache
def triton_version() -> str | None:
    """The installed Triton's version. Not imported for this if it can be helped: that is slow."""
    if importlib.util.find_spec("triton") is None:
        return None
    for name in _TRITON_PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    import triton

    return str(triton.__version__)


def set_up_of(device: torch.device) -> str:
    """What the speed of kernels depends on: `NVIDIA A100 (8.0), driver API 13000, Triton 3.7.1`.

    Quick, and asks no other program. torch and its CUDA are not in it.
    """
    found = torch.cuda.get_device_properties(device)
    arch = str(getattr(found, "gcnArchName", "") or f"{found.major}.{found.minor}")
    driver = _driver_api()
    version = triton_version()
    parts = (
        f"{found.name} ({arch})",
        f"driver API {driver}" if driver else "",  # ROCm's is part of torch's
        f"Triton {version}" if version is not None else "no Triton",
    )
    return ", ".join(filter(None, parts))


def _driver_api() -> str:
    """What CUDA says of its driver; "" for ROCm."""
    version = getattr(torch._C, "_cuda_getDriverVersion", None)
    return str(version()) if version is not None and torch.version.hip is None else ""


def set_ups_of(tensors: Iterable[Tensor]) -> tuple[str, ...]:
    """The GPUs that these tensors are on, each kind once; none starts no driver."""
    devices = {tensor.device for tensor in tensors if tensor.device.type == "cuda"}
    return tuple(sorted({set_up_of(device) for device in devices}))
