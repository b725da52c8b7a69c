"""Bytes that autograd keeps of a forward for its backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


def saved_bytes(forward: Callable[[], object], parameters: Iterable[Tensor]) -> int:
    """Bytes of all that is kept: each storage once, those of parameters left out."""
    own = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    found: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.enable_grad(), saved_tensors_hooks(pack, lambda tensor: tensor):
        output = forward()  # held until all is counted: the address of freed memory is used again
    total = sum(found.values())
    del output
    return total
