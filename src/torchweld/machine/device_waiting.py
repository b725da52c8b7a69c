"""Waits until a GPU has done what it was given. A timed region begins and ends with it.

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
    """Returns when nothing is queued on the current GPU; at once if none is in use."""
    if gpu_in_use():
        torch.cuda.synchronize()
