"""What a GPU is and what drives it: what a reader of a report has to know of it."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass

import torch

from torchweld.core.number_text import size
from torchweld.core.record_fields import Count

# nvidia-smi asks every GPU of the machine, which takes long.
SMI_SECONDS = 20.0


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
