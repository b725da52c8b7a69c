"""Blocks that compute the same on weights of the same shape, which are tried together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import nn

from torchweld.core.number_text import counted
from torchweld.plans.block_calls import set_up_of_tensors, tensors_of
from torchweld.welds.found_blocks import Block, Call


@dataclass(frozen=True)
class AlikeKey:
    """What blocks have in common that are tried together.

    device: the GPU, its driver and Triton; else the kind of device
    """

    form: str
    shapes: tuple[tuple[int, ...], ...]
    dtype: str
    device: str
    rows: int
    contiguous: bool
    training: bool
    dropout: tuple[float, ...] = ()  # in training


@dataclass(kw_only=True)
class AlikeBlocks:
    """Blocks of one key, with a call of each."""

    key: AlikeKey
    blocks: list[Block]
    calls: list[Call]

    @property
    def name(self) -> str:
        count = f" × {len(self.blocks)}" if len(self.blocks) > 1 else ""
        return f"{self.blocks[0].path or 'the model'}{count}, {counted(self.key.rows, 'row')}"


def alike_blocks(model: nn.Module, blocks: Sequence[Block], training: bool) -> list[AlikeBlocks]:
    """All calls of all blocks, by key, in the order of the model."""
    found: dict[AlikeKey, AlikeBlocks] = {}
    for block in blocks:
        tensors = tensors_of(model, block)
        shapes = tuple(tuple(tensor.shape) for tensor in tensors)
        device = set_up_of_tensors(tensors)
        by_rows: dict[tuple[int, bool], list[Call]] = {}
        for call in block.calls:
            if call.rows > 0:
                by_rows.setdefault((call.rows, call.contiguous), []).append(call)
        for (rows, contiguous), calls in by_rows.items():
            dropout = block.dropout if training else ()
            key = AlikeKey(
                form=block.form, shapes=shapes, dtype=block.dtype, device=device, rows=rows,
                contiguous=contiguous, training=training, dropout=dropout,
            )  # fmt: skip
            one = found.setdefault(key, AlikeBlocks(key=key, blocks=[], calls=[]))
            one.blocks.append(block)
            one.calls.append(replace(calls[0], count=sum(call.count for call in calls)))
    return list(found.values())
