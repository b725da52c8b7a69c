"""Whether a plan fits a model: where it was made, and what each of its blocks computes.

A plan is plain data, and may have been changed since, by anybody. So what it says of a block is
compared with what the model itself gives when it is read again; the hash that the plan carries
decides nothing alone.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Literal

import torch
from torch import nn

from torchweld.core.errors import TorchweldError
from torchweld.core.records import RecordError, from_plain, to_plain
from torchweld.machine import hardware
from torchweld.machine.fingerprint import taken_here
from torchweld.plans.plan import Plan, Planned, PlannedGroup
from torchweld.plans.tuning import Group, Key, verify_choice
from torchweld.welds.decisions import Decision, Ranges
from torchweld.welds.finding.rereading import Rereader, differences
from torchweld.welds.found_blocks import Block
from torchweld.welds.marks import plain_root

OnMismatch = Literal["raise", "verify", "skip"]


def structure_of(model: nn.Module) -> str:
    """A hash of names, shapes and types; the same in every process."""
    root = plain_root(model)
    lines = [
        f"{name} {tuple(tensor.shape)} {tensor.dtype}"
        for name, tensor in [*root.named_parameters(), *root.named_buffers()]
    ]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def fitting(root: nn.Module, plan: Plan, on_mismatch: OnMismatch) -> list[Decision]:
    """The decisions that are to be carried out; raises if there is a mismatch that may not be."""
    elsewhere = mismatches(root, plan)
    decisions, changed = read_again(root, plan)
    if on_mismatch == "raise" and (elsewhere or changed):
        listed = [*elsewhere, *(f"{path or 'the model'}: {why}" for path, why in changed.items())]
        raise TorchweldError(
            f"the plan does not fit: {'; '.join(listed)}; plan again, or give "
            'on_mismatch="verify" or "skip"'
        )
    if on_mismatch == "verify" and (elsewhere or changed):
        decisions = [d for d in decisions if _right(root, d)]
    return decisions


def mismatches(model: nn.Module, plan: Plan) -> list[str]:
    """What differs between here and where the plan was made."""
    found = []
    if plan.fingerprint != hardware.fingerprint():
        found += _elsewhere(plan)
    if plan.torch != torch.__version__:
        found.append(f"it was made for torch {plan.torch}, this is {torch.__version__}")
    if plan.structure != structure_of(model):
        found.append(f"it was made for another {plan.model}: names, shapes or types differ")
    return found


def _elsewhere(plan: Plan) -> list[str]:
    """How the machine and its set-up differ, as far as the plan says; torch is compared apart."""
    there, here = plan.made_on, taken_here()
    if there is not None and there.key == plan.fingerprint:
        words = replace(there, torch=here.torch).since(here)
        if words or there.torch == plan.torch != here.torch:
            return [f"it was {one}" for one in words]
    return ["it was made on another machine, or for other threads or kernels"]


def read_again(model: nn.Module, plan: Plan) -> tuple[list[Decision], dict[str, str]]:
    """Decisions about blocks as the model itself gives them; of the others, by path, what differs.

    Where a block is valid, and what it depends on, is taken from the model alone.
    """
    rereader = Rereader(model)
    fit: list[Decision] = []
    changed: dict[str, str] = {}
    in_group: dict[str, Ranges] = {}
    for group in plan.groups:
        if wrong := _damage(group):
            changed[f"group {group.name}"] = wrong
        elif group.welded:
            in_group[group.name] = group.by_rows()
    for one in plan.planned:
        if one.welded or one.block.group in in_group:
            found = _fit(rereader, plan.training, one, in_group.get(one.block.group, ()))
            if isinstance(found, Decision):
                fit.append(found)
            else:
                changed[one.block.path] = found
    return [d for d in fit if d.block.path not in changed], changed


def _damage(record: Planned | PlannedGroup) -> str:
    """What is wrong with a record, which is plain data: anybody can have changed it."""
    try:
        from_plain(type(record), to_plain(record), "it")
    except RecordError as error:
        return str(error)
    return ""


def _fit(rereader: Rereader, training: bool, one: Planned, in_group: Ranges) -> Decision | str:
    """What to do with a planned block, or what differs from what the model gives."""
    block = one.block
    if wrong := _damage(one):
        return wrong
    now = rereader.read(block)
    if not isinstance(now, Block):
        return now.reason
    for what in differences(now, block):
        return what
    for name, words in _ALSO.items():
        here, there = getattr(now, name), getattr(block, name)
        if here != there:
            shown = [", ".join(map(str, v)) or "nothing" for v in (here, there)]
            return f"{words} is {shown[0][:200]} in the model, and {shown[1][:200]} in the plan"
    beside = {other.name for domain in now.valid for other in domain.beside}
    if odd := [name for name in block.ignores if name not in beside]:
        return f"is not known to do without its argument {odd[0]}"
    if now.structure != block.structure:
        return f"computes {now.form} on other shapes, or in another way"
    decision = Decision(block=now, by_rows=one.by_rows(), training=training, in_group=in_group)
    return next(iter(decision.problems()), "") or decision


# What a block of a plan has besides, and one made by hand need not have.
_ALSO = {"dropout": "its dropout", "covers": "what is inside it"}


def _right(model: nn.Module, decision: Decision) -> bool:
    block = decision.block
    rows = block.calls[0].rows
    key = Key(block.form, (), block.dtype, rows, True, decision.training)
    group = Group(key=key, blocks=[block], calls=[block.calls[0]])
    choices = {*decision.choices, *(choice for _, _, choice in decision.in_group if choice)}
    return all(verify_choice(model, group, choice).verified for choice in choices)
