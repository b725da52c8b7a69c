"""Welds a model by a plan that was kept: no tuning, and what does not fit is left out and named."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import nn

from torchweld.core.errors import TorchweldError
from torchweld.plans.block_calls import module_of
from torchweld.plans.plan import Plan
from torchweld.plans.plan_fitting import read_again
from torchweld.welds.decisions import Decision
from torchweld.welds.finding.rereading import reread
from torchweld.welds.found_blocks import Refusal
from torchweld.welds.swapping.faces import Face, faces
from torchweld.welds.swapping.original_code import untold
from torchweld.welds.swapping.swap import undo, weld


@dataclass(kw_only=True)
class Fit:
    """Decisions of a plan that fit the model, and for each that does not, why: by path."""

    decisions: list[Decision] = field(default_factory=list)
    unfit: dict[str, Refusal] = field(default_factory=dict)


def fit_of(model: nn.Module, plan: Plan) -> Fit:
    """The model is unwelded, and stays so. Where the plan was made does not matter here."""
    found = Fit()
    decisions, changed = read_again(model, plan)
    for decision in plan.decisions:
        path = decision.block.path
        if path in changed:
            now = reread(model, decision.block)  # which has the op and the line too
            refused = now if isinstance(now, Refusal) else None
            found.unfit[path] = refused or _refusal(decision, changed[path])
    for decision in decisions:
        path = decision.block.path
        try:
            weld(model, [decision])
        except TorchweldError as error:
            found.unfit[path] = _refusal(decision, str(error).rpartition("\n")[2].strip())
        else:
            undo(model, [path])
            found.decisions.append(decision)
    return found


def _refusal(decision: Decision, reason: str) -> Refusal:
    return Refusal(path=decision.block.path, kind=decision.block.kind, reason=reason)


@contextmanager
def both_faces(model: nn.Module, fit: Fit) -> Iterator[tuple[Face, Face]]:
    """The model's own face and the welded one, which is shown; afterwards it is unwelded."""
    modules = [module_of(model, decision.block) for decision in fit.decisions]
    # Original code that runs is counted, and is for the gate to report.
    with untold(), faces(model, modules, [fit.decisions]) as (original, welded):
        welded.show()
        yield original, welded
