"""Packed copies of weights: creating them, dropping them, and how much memory they take.

A module that packs keeps a `Pack`; a compiled graph finds it by its number. The copy exists for
inference only. The first call in eval mode with gradients off creates it, and `train()` drops it.
Every call compares it with the weights: storage, version counter, shape, strides, and a sample of
16 elements per tensor. An edit of few elements that autograd does not see (`w.data[0, 0] = 1`, a
write through numpy or by another process) escapes all of these. It is found within 1,000 calls, in
proportion more above 16 MB, because each call also compares the next part of the weights
(rolling_check.h); `repack` makes it count at once. With `packing=False` there is no copy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling

from torchweld import ops
from torchweld.core.argument_checks import check_model

# New in torch 2.7.
exporting: Callable[[], bool] = getattr(torch.compiler, "is_exporting", lambda: False)


def compiling_for_here() -> bool:
    """Whether a graph is being made for this process, which is where the copies are."""
    return is_dynamo_compiling() and not exporting()


def new_pack() -> Any:
    """An empty `Pack` for the compiled forward; None without compiled kernels."""
    return None if ops.compiled is None else ops.compiled.Pack()


def _packs(model: nn.Module) -> list[Any]:
    found = (module.__dict__.get("_pack") for module in model.modules())
    return [pack for pack in found if pack is not None]


def _joints(model: nn.Module) -> list[Any]:
    """The state of the welded modules in `model`."""
    found = (module.__dict__.get("_torchweld") for module in model.modules())
    return [joint for joint in found if joint is not None]


def repack(model: nn.Module) -> nn.Module:
    """Drop every packed copy in `model`; the next call in inference creates it again."""
    check_model("repack", model, scripted=True)
    for pack in _packs(model):
        pack.clear()
    for joint in _joints(model):
        joint.drop_copies()
    return model


def packed_bytes(model: nn.Module) -> int:
    """The memory of all packed copies in `model` now, in bytes."""
    check_model("packed_bytes", model, scripted=True)
    packs = sum(int(pack.nbytes) for pack in _packs(model))
    return packs + sum(int(joint.copied_bytes) for joint in _joints(model))
