"""Tells which modules are built alike, so that one trace holds for all of them.

In: a module. Out: a hashable key, equal for modules that are built alike. The key has everything
that could make two instances of a class compute differently: plain settings by value, other objects
by identity, tensors by shape and type, and the same for every module inside. It is valid while the
model exists; files have `Chain.structure` instead.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn

# Attributes of every module; hooks are checked elsewhere.
_COMMON = frozenset(nn.Module().__dict__)


def structure_key(module: nn.Module) -> Hashable:
    tensors: dict[int, int] = {}  # tied tensors have the same number

    def tensor_key(tensor: Tensor | None) -> Hashable:
        if tensor is None:
            return None
        number = tensors.setdefault(id(tensor), len(tensors))
        kind = (tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.device)
        return number, kind, tensor.requires_grad

    def key(inner: nn.Module) -> Hashable:
        settings = [
            (name, _value_key(value))
            for name, value in sorted(inner.__dict__.items())
            if name not in _COMMON
        ]
        own = [
            (name, tensor_key(tensor))
            for name, tensor in [*inner._parameters.items(), *inner._buffers.items()]
        ]
        children = [
            (name, None if child is None else key(child)) for name, child in inner._modules.items()
        ]
        return type(inner), inner.training, tuple(settings), tuple(own), tuple(children)

    return key(module)


def _value_key(value: Any) -> Hashable:
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype, torch.device)):
        return type(value), value
    if isinstance(value, (list, tuple)):
        return type(value), tuple(_value_key(item) for item in value)
    return id(value)
