"""Waits until GPUs have done what they were given. A timed region begins and ends with it.

Calls on CUDA tensors return when their kernels are queued. A clock that is read then has timed the
host alone.
"""

from __future__ import annotations

import torch


def gpu_in_use() -> bool:
    """Whether this process has put anything on a GPU. Asking starts no driver."""
    in_use: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return in_use


def wait_for_gpu() -> None:
    """Returns when nothing is queued on any GPU of this process; at once if none is in use."""
    if gpu_in_use():
        wait_for_all_gpus()


def wait_for_all_gpus() -> None:
    """Waits for the current GPU, and for every other one that has been used.

    A model may be on another GPU than the current one, which is each thread's own; torch would
    wait for the current one alone.
    """
    for index in _used_gpus():
        torch.cuda.synchronize(index)
    torch.cuda.synchronize()


def _used_gpus() -> list[int]:
    """Those with a context of this process. Waiting for another one would make it a context."""
    has_context = getattr(torch._C, "_cuda_hasPrimaryContext", None)  # torch with CUDA has it
    if has_context is None:
        return []
    current = torch.cuda.current_device()
    return [i for i in range(torch.cuda.device_count()) if i != current and has_context(i)]
