"""Tensors between pages that nobody may touch: an overrun ends the process, at either end.

A tensor begins at the first byte after one guard, or ends at the last byte before the other. So
whatever reads or writes beyond it has to be tried with both.
"""

from __future__ import annotations

import ctypes
import mmap
from typing import Any, Literal

import torch
from tests.support.inside_ops import InsideOps, memory_of
from torch import Tensor
from torch.utils import _pytree as pytree

End = Literal["first", "last"]
_NONE = 0  # PROT_NONE
_LIBC = ctypes.CDLL(None, use_errno=True)


def _protect(address: int, length: int) -> None:
    if _LIBC.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(length), _NONE):
        raise OSError(ctypes.get_errno(), "mprotect")


def guarded(tensor: Tensor, end: End) -> Tensor:
    """A copy with the same strides: a guard before its first byte, or after its last."""
    if not tensor.numel():
        return tensor
    page = mmap.PAGESIZE
    extent = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    used = extent * tensor.element_size()
    whole = -(-used // page) * page
    memory = mmap.mmap(-1, whole + 2 * page)
    first = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    _protect(first, page)
    _protect(first + page + whole, page)
    offset = page if end == "first" else page + whole - used
    flat = torch.frombuffer(memory, dtype=tensor.dtype, count=extent, offset=offset)
    made = flat.as_strided(tensor.shape, tensor.stride())
    made.copy_(tensor.detach())
    return made.requires_grad_(tensor.requires_grad)


class Guarded(InsideOps):
    """Inside, every tensor that an op makes lies between guards, within torchweld's ops too."""

    def __init__(self, end: End) -> None:
        super().__init__()
        self.end, self.count = end, 0

    def made(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
        given = {memory_of(t) for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)}

        def moved(one: Any) -> Any:
            if not isinstance(one, Tensor) or memory_of(one) in given:
                return one  # a view, or what was written into
            self.count += 1
            return guarded(one, self.end)

        return pytree.tree_map(moved, result)
