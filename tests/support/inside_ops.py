"""What the ops of torchweld do inside: a dispatch mode that stays on within their Python kernels.

torch takes a mode off while an op runs that the mode has seen. `InsideOps` calls the op's kernel
for CPUs itself, with the mode on again, so that `made` sees every op below.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class InsideOps(TorchDispatchMode):
    """Override `made`. `ours`: the ops of torchweld that ran."""

    def __init__(self) -> None:
        super().__init__()
        self.ours: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "torchweld":
            self.ours.append(func.name())
            with self:
                return func._op_dk(torch._C.DispatchKey.CPU, *args, **kwargs)
        return self.made(func, args, kwargs, func(*args, **kwargs))

    def made(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
        """Called after an op that is not torchweld's; returns what the caller gets."""
        return result


def memory_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
