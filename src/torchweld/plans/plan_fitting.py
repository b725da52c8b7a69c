"""Whether a plan fits a model: where it was made, and what each of its blocks computes.

A plan is plain data that anybody may have changed. So the model is traced again, and what the plan
says of each block is compared with that. The hash that the plan carries is never enough.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import nn

from torchweld.core.errors import TorchweldError
from torchweld.core.records import RecordError, from_plain, to_plain
from torchweld.machine import fingerprint
from torchweld.machine.fingerprint import taken_here
from torchweld.plans.block_calls import gpus_of
from torchweld.plans.choice_verifying import verify_choice
from torchweld.plans.plan import Plan, Planned, PlannedGroup, structure_of
from torchweld.welds.finding.block_rereading import Rereader, differences
from torchweld.welds.found_blocks import Block, Refusal
from torchweld.welds.swapping.decision_fitting import why_not
from torchweld.welds.weld_decisions import Decision, Ranges

OnMismatch = Literal["raise", "verify", "skip"]


@dataclass(frozen=True, kw_only=True)
class Fit:
    """The decisions of a plan that fit a model, with blocks as the model has them.

    refused: why the others do not fit
    """

    decisions: tuple[Decision, ...]
    refused: tuple[Refusal, ...]

    def without(self, refused: Sequence[Refusal]) -> Fit:
        paths = {one.path for one in refused}
        fit = tuple(d for d in self.decisions if d.block.path not in paths)
        return Fit(decisions=fit, refused=(*self.refused, *refused))


def fit_plan(model: nn.Module, plan: Plan) -> Fit:
    """What can be welded in this model, wherever the plan was made. The model is not welded."""
    fit = compare_blocks(model, plan)
    return fit.without(why_not(model, fit.decisions))


def fit_here(model: nn.Module, plan: Plan, on_mismatch: OnMismatch) -> Fit:
    """What `tw.apply` welds. With "raise", an error lists everything that differs."""
    elsewhere = mismatches(model, plan)
    if on_mismatch == "raise":  # `reweld` itself refuses what cannot be welded
        fit = compare_blocks(model, plan)
        if differs := [*elsewhere, *(f"{r.path or 'the model'}: {r.reason}" for r in fit.refused)]:
            raise TorchweldError(
                f"the plan does not fit: {'; '.join(differs)}; plan again, or give "
                'on_mismatch="verify" or "skip"'
            )
        return fit
    fit = fit_plan(model, plan)
    if on_mismatch == "verify" and (elsewhere or fit.refused):
        return fit.without([bad for d in fit.decisions if (bad := _wrong(model, d)) is not None])
    return fit


def mismatches(model: nn.Module, plan: Plan) -> list[str]:
    """What differs between here and where the plan was made."""
    found = []
    gpus = gpus_of(model)
    if plan.fingerprint != fingerprint.key_here(gpus):
        found += _elsewhere(plan, gpus)
    if plan.torch != torch.__version__:
        found.append(f"it was made for torch {plan.torch}, this is {torch.__version__}")
    if plan.structure != structure_of(model):
        found.append(f"it was made for another {plan.model}: names, shapes or types differ")
    return found


def _elsewhere(plan: Plan, gpus: Sequence[str]) -> list[str]:
    """How machine and setup differ, as far as the plan says. Torch is compared elsewhere."""
    there, here = plan.made_on, taken_here(gpus=gpus)
    if there is not None and there.key == plan.fingerprint:
        words = replace(there, torch=here.torch).since(here)
        if words or there.torch == plan.torch != here.torch:
            return [f"it was {one}" for one in words]
    return ["it was made on another machine, or for other threads or kernels"]


def compare_blocks(model: nn.Module, plan: Plan) -> Fit:
    """The plan's blocks, compared with the model, which is traced again.

    Which calls a block is valid for, and what it depends on, is taken from the model alone.
    """
    rereader = Rereader(model)
    in_group: dict[str, Ranges] = {}
    refused: list[Refusal] = []
    for group in plan.groups:
        if wrong := _damage(group):
            refused.append(Refusal(path=group.name, kind="group", reason=wrong))
        elif group.welded:
            in_group[group.name] = group.by_rows()
    found = [
        _compared(rereader, plan.training, one, in_group.get(one.block.group, ()))
        for one in plan.planned
        if one.welded or one.block.group in in_group
    ]
    fit = Fit(decisions=tuple(one for one in found if isinstance(one, Decision)), refused=())
    return fit.without([*refused, *(one for one in found if isinstance(one, Refusal))])


def _damage(record: Planned | PlannedGroup) -> str:
    """What is wrong with a record, which anybody can have changed; "" if nothing is."""
    try:
        from_plain(type(record), to_plain(record), "it")
    except RecordError as error:
        return str(error)
    return ""


def _compared(
    rereader: Rereader, training: bool, one: Planned, in_group: Ranges
) -> Decision | Refusal:
    """The decision about a planned block, or what differs between the plan and the model."""
    block = one.block
    if wrong := _damage(one):
        return _refusal(block, wrong)
    now = rereader.read(block)
    if isinstance(now, Refusal):
        return now
    decision = Decision(block=now, by_rows=one.by_rows(), training=training, in_group=in_group)
    for what in (*_differences(now, block), *decision.problems()):
        return _refusal(block, what)
    return decision


def _refusal(block: Block, reason: str) -> Refusal:
    return Refusal(path=block.path, kind=block.kind, reason=reason)


def _differences(now: Block, block: Block) -> Iterator[str]:
    yield from differences(now, block)
    for name, words in _ALSO.items():
        here, there = getattr(now, name), getattr(block, name)
        if here != there:
            shown = [", ".join(map(str, v)) or "nothing" for v in (here, there)]
            yield f"{words} is {shown[0][:200]} in the model, and {shown[1][:200]} in the plan"
    beside = {other.name for domain in now.valid for other in domain.beside}
    if odd := [name for name in block.ignores if name not in beside]:
        yield f"is not known to do without its argument {odd[0]}"
    if now.structure != block.structure:
        yield f"computes {now.form} on other shapes, or in another way"


# Fields that a plan's block always has, and a block made by hand need not have.
_ALSO = {"dropout": "its dropout", "covers": "what is inside it"}


def _wrong(model: nn.Module, decision: Decision) -> Refusal | None:
    """Why the block's numbers are not right here; None if they are."""
    block = decision.block
    in_group = (choice for _, _, choice in decision.in_group if choice is not None)
    for choice in dict.fromkeys((*decision.choices, *in_group)):
        found = verify_choice(model, block, block.calls[0], choice, decision.training)
        if not found.verified:
            return _refusal(block, found.reason)
    return None
