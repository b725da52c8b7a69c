"""What was launched, newest last: tests ask which kernel really ran."""

from __future__ import annotations

from collections import deque
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

MOST_KEPT = 256
_launched: deque[str] = deque(maxlen=MOST_KEPT)


def launched() -> list[str]:
    """The names of the last kernels, up to MOST_KEPT, and none before the last `forget`."""
    return list(_launched)


def forget() -> None:
    _launched.clear()


def note(name: str) -> None:
    _launched.append(name)


def on_device_of(tensor: Tensor) -> AbstractContextManager[Any]:
    """Triton launches on the current device and its current stream: they are the tensor's."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()
