"""Reads a module of a model again: what it depends on, and whether it still computes its block.

Everything runs on a copy of the module's structure, so that other threads may be calling it.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from torchweld.core.errors import CannotCloneError
from torchweld.welds.cloning.model_clone import structural_clone
from torchweld.welds.finding.block_rereading import differences, reread, signatures_of
from torchweld.welds.found_blocks import Block, Refusal
from torchweld.welds.guarding.block_validity import facts_for
from torchweld.welds.guarding.dependency_facts import Facts
from torchweld.welds.guarding.guard import Guard
from torchweld.welds.refusal_reasons import Refused
from torchweld.welds.weld_marks import plain_class


def guard_of(module: nn.Module, block: Block) -> Guard:
    """A guard on everything the module reads in the block's calls; Refused if there can be none."""
    return Guard(module, facts_of_block(module, block))


def facts_of_block(module: nn.Module, block: Block) -> Facts:
    try:
        clone = structural_clone(module)
    except CannotCloneError as error:
        raise Refused(str(error)) from error
    with torch.inference_mode(False):
        return facts_for(
            clone.model,
            signatures_of(block, clone.model),
            live=lambda inner: clone.live_of.get(inner, inner),
            kind_of=plain_class,
        )


def read_again(module: nn.Module, block: Block) -> tuple[Guard, Block] | str:
    """A guard for a module that was copied or loaded, and the block as it is now; or why it is not
    what it was."""
    try:
        guard = guard_of(module, block)
        with torch.inference_mode(False):
            now = reread(structural_clone(module).model, replace(block, path=""))
    except Refused as refused:
        return refused.reason
    if isinstance(now, Refusal):
        return now.reason
    changed = next(differences(now, replace(block, path="")), "")
    if not changed and block.calls and now.dropout != block.dropout:
        changed = f"drops out with {_listed(now.dropout)} and not with {_listed(block.dropout)}"
    return changed or (guard, now)


def _listed(probabilities: tuple[float, ...]) -> str:
    return ", ".join(map(str, probabilities)) or "nothing"
