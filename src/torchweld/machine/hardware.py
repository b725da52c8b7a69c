"""What this machine is: its CPU, caches, memory, and how many threads torch would use on it."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass

import torch

from torchweld.machine.cpu_identity import Caches, identify

# Flags that decide which kernels can run, or that readers of a benchmark want to know.
FLAGS_OF_INTEREST = (
    *("sse4_2", "avx", "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl"),
    *("avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "amx_int8", "amx_fp16"),
    *("asimd", "fphp", "asimdhp", "bf16", "i8mm", "sve", "sve2"),
)


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """This machine as the running process sees it."""

    cpu_model: str
    cpu_vendor: str | None
    machine: str
    instruction_sets: tuple[str, ...]
    cores: int
    cpus_allowed: int
    threads: int
    caches: Caches
    memory_bytes: int | None
    torch_version: str


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None


def hardware() -> Hardware:
    """This machine, and how many threads torch would use on it now."""
    cpu, caches = identify()
    logical = os.cpu_count() or 1
    affinity = getattr(os, "sched_getaffinity", None)
    return Hardware(
        cpu_model=cpu.model or platform.processor() or platform.machine(),
        cpu_vendor=cpu.vendor,
        machine=platform.machine(),
        instruction_sets=tuple(flag for flag in FLAGS_OF_INTEREST if flag in cpu.flags),
        cores=cpu.cores or logical,
        cpus_allowed=len(affinity(0)) if affinity else logical,
        threads=torch.get_num_threads(),
        caches=caches,
        memory_bytes=_memory_bytes(),
        torch_version=torch.__version__,
    )
