"""Watches a call of a GPU's way for what would break the capture of a CUDA graph.

What waits for the device, reads values, or makes as many of them as values say cannot be captured.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tests.support.helpers import CHAINS, random_tensors
from tests.support.inside_ops import InsideOps
from torch import Tensor

from torchweld.core.blocks import format_spec
from torchweld.ops.gpu.kernel_tiles import Tile
from torchweld.ops.gpu.tile_tuning import forcing

# Ops that wait for the device, or that make as many values as others say.
WAITING = (
    *("_local_scalar_dense", "is_nonzero", "item", "equal", "nonzero", "masked_select"),
    *("unique", "_unique2", "unique_dim", "unique_consecutive", "bincount", "repeat_interleave"),
    *("record_stream", "_pin_memory", "allclose", "_to_cpu", "lift_fresh", "lift_fresh_copy"),
)


class Watched(InsideOps):
    """The ops below ours that wait, or that take a tensor to another device."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()
        self.waiting: list[str] = []

    def made(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
        name = func._schema.name.partition("::")[2]
        self.seen.add(name)
        if name in WAITING or (name == "_to_copy" and kwargs.get("device") is not None):
            self.waiting.append(name)
        return result


def run_watched(way: str, spec: str, x: Tensor, tensors: Sequence[Tensor]) -> Watched:
    """A call and its backward, from what was saved and from what is computed again."""
    leaves = [t.detach().requires_grad_() for t in (x, *tensors)]
    with Watched() as watched, forcing(Tile(rows=16, columns=32, depth=32)):
        for recompute in (False, True):
            y = torch.ops.torchweld.chain_way(leaves[0], leaves[1:], spec, way, recompute)
            torch.autograd.grad(y, leaves, torch.ones_like(y))
    return watched


def assert_nothing_waits(way: str) -> None:
    """Checks forward and backward of all forms of chains."""
    for forms in CHAINS:
        sizes = (*(7, 9, 6, 5)[: len(forms)], 4)
        tensors = random_tensors(sizes, forms, torch.bfloat16)
        watched = run_watched(way, format_spec(forms), torch.randn(3, 7).bfloat16(), tensors)
        assert watched.waiting == []
        assert f"torchweld::{way}_backward" in watched.ours
        assert {"new_empty", "empty", "mm"} & watched.seen  # it looked inside
