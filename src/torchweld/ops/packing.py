"""Packed copies of weights: whether there are any, how much they cost, and making them anew.

A module that packs keeps a `Pack`; a compiled graph has its number, and finds it by that. The copy
exists for inference only: it is made by the first call in eval mode with gradients off, is dropped
by `train()`, and is compared at every call with the weights as they are: the same storage, version
counter, shape and strides, and a sample of 16 elements of each tensor. What escapes all of these,
an edit of few elements behind autograd's back (`w.data[0, 0] = 1`, a write through numpy or by
another process), is met within 1,000 calls by a rolling look at all of the weights (csrc/rolling.h;
in proportion above 16 MB); `repack` makes it count at once. `packing=False` keeps no copy and
cannot be stale.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling

from torchweld import ops
from torchweld.core.arguments import check_model

# New in torch 2.7.
exporting: Callable[[], bool] = getattr(torch.compiler, "is_exporting", lambda: False)


def compiling_for_here() -> bool:
    """Whether a graph is being made that will run in this process, where the copies are."""
    return is_dynamo_compiling() and not exporting()


def new_pack() -> Any:
    """An empty `Pack` to give to the compiled forward; None without compiled kernels."""
    return None if ops.compiled is None else ops.compiled.Pack()


def _packs(model: nn.Module) -> list[Any]:
    found = (module.__dict__.get("_pack") for module in model.modules())
    return [pack for pack in found if pack is not None]


def _joints(model: nn.Module) -> list[Any]:
    """What welded modules keep beside their weights."""
    found = (module.__dict__.get("_torchweld") for module in model.modules())
    return [joint for joint in found if joint is not None]


def repack(model: nn.Module) -> nn.Module:
    """Forget every packed copy in `model`; the next call in inference makes them anew."""
    check_model("repack", model, scripted=True)
    for pack in _packs(model):
        pack.clear()
    for joint in _joints(model):
        joint.drop_copies()
    return model


def packed_bytes(model: nn.Module) -> int:
    """Memory that packed copies in `model` take now, in bytes."""
    check_model("packed_bytes", model, scripted=True)
    packs = sum(int(pack.nbytes) for pack in _packs(model))
    return packs + sum(int(joint.copied_bytes) for joint in _joints(model))
