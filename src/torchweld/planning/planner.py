"""`tw.plan`, `tw.apply`, `tw.fuse`, `tw.plan_of`: find, tune, weld.

plan: model and inputs in, `Plan` out, the model as it was. apply: model and plan in, the model
welded in place. fuse: both.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn

from torchweld import hardware
from torchweld.decisions import Decision
from torchweld.discovery.finding import find
from torchweld.discovery.found import Blocks
from torchweld.errors import TorchweldError
from torchweld.inputs import as_workloads
from torchweld.names import known
from torchweld.planning.plan import Plan, Planned, Whole
from torchweld.planning.tuning import Group, Key, tune, verify_choice
from torchweld.planning.whole import measure_whole
from torchweld.swap import undo, weld

Progress = Callable[[str, float], None]
OnMismatch = Literal["raise", "verify", "skip"]
_PLAN = "_torchweld_plan"

BUDGET_S = 60.0
QUICK_S = 10.0
# Of the budget, for the whole model before and after.
WHOLE_SHARE = 0.3


def plan(
    model: nn.Module,
    inputs: Any,
    *,
    training: bool = False,
    force: bool = False,
    quick: bool = False,
    budget_s: float | None = None,
    progress: Progress | None = None,
) -> Plan:
    """What of the model is worth welding on these inputs: found, verified, measured.

    The model is left as it was. `force` welds all that verifies and times nothing. `quick` takes
    about ten seconds instead of a minute; `budget_s` sets the time for measuring. `progress` is
    called with what is being done and how far it is (0 to 1).
    """
    say = progress or (lambda doing, share: None)
    budget_s = budget_s if budget_s is not None else QUICK_S if quick else BUDGET_S
    workloads = as_workloads(inputs)
    undo(model)
    with _mode(model, training):
        say("finding blocks", 0.0)
        blocks = find(model, inputs)
        tuned = tune(
            model,
            blocks,
            training=training,
            force=force,
            budget_s=budget_s * (1 - WHOLE_SHARE),
            progress=lambda doing, share: say(f"tuning {doing}", 0.1 + 0.6 * share),
        )
        made = _plan_of(model, blocks, tuned, training, force)
        whole: list[Whole] = []
        if made.decisions and not force:
            each_s = budget_s * WHOLE_SHARE / len(workloads)
            for i, workload in enumerate(workloads):
                say(f"the whole model, {workload.name}", 0.7 + 0.3 * i / len(workloads))
                whole.append(
                    measure_whole(
                        model,
                        made.decisions,
                        tuned,
                        workload,
                        training=training,
                        budget_s=each_s,
                    )
                )
    copied = sum(
        max((t.best.copied_bytes for t in one.tunings if t.best is not None), default=0)
        for one in tuned
    )
    say("done", 1.0)
    return replace(made, whole=tuple(whole), copied_bytes=copied)


def _plan_of(
    model: nn.Module, blocks: Blocks, tuned: list[Planned], training: bool, force: bool
) -> Plan:
    return Plan(
        model=type(getattr(model, "_orig_mod", model)).__name__,
        structure=structure_of(model),
        training=training,
        fingerprint=hardware.fingerprint(),
        torch=torch.__version__,
        planned=tuple(tuned),
        refused=blocks.refused,
        forced=force,
        notices=blocks.notices,
    )


@contextmanager
def _mode(model: nn.Module, training: bool) -> Iterator[None]:
    """Inside, the model is in train or eval mode; gradients and random numbers are kept."""
    modes = [(module, module.training) for module in model.modules()]
    grads = [(parameter, parameter.grad) for parameter in model.parameters()]
    buffers = [(b, b.detach().clone()) for b in model.buffers()] if training else []
    try:
        with torch.random.fork_rng():
            model.train(training)
            yield
    finally:
        for module, mode in modes:
            module.training = mode
        for parameter, grad in grads:
            parameter.grad = grad
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


def structure_of(model: nn.Module) -> str:
    """A hash of names, shapes and types; the same in every process."""
    root = getattr(model, "_orig_mod", model)
    lines = [
        f"{name} {tuple(tensor.shape)} {tensor.dtype}"
        for name, tensor in [*root.named_parameters(), *root.named_buffers()]
    ]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def apply(model: nn.Module, plan: Plan, on_mismatch: OnMismatch = "raise") -> nn.Module:
    """Weld a model as planned, in place; nothing is measured.

    If the plan was made on another machine, for another torch or another model, "raise" refuses,
    "verify" checks the numbers of every block again and leaves out what fails, and "skip" leaves
    out the blocks that do not fit the model.
    """
    known(on_mismatch, ("raise", "verify", "skip"), "on_mismatch")
    differences = mismatches(model, plan)
    decisions = list(plan.decisions)
    if differences:
        if on_mismatch == "raise":
            raise TorchweldError(
                f"the plan does not fit: {'; '.join(differences)}; plan again, or give "
                'on_mismatch="verify" or "skip"'
            )
        decisions = [d for d in decisions if _fits(model, d)]
        if on_mismatch == "verify":
            decisions = [d for d in decisions if _right(model, d)]
    weld(model, decisions)
    model.__dict__[_PLAN] = plan
    return model


def mismatches(model: nn.Module, plan: Plan) -> list[str]:
    """What differs between here and where the plan was made."""
    found = []
    if plan.fingerprint != hardware.fingerprint():
        found.append("it was made on another machine, or for other threads or kernels")
    if plan.torch != torch.__version__:
        found.append(f"it was made for torch {plan.torch}, this is {torch.__version__}")
    if plan.structure != structure_of(model):
        found.append(f"it was made for another {plan.model}: names, shapes or types differ")
    return found


def _fits(model: nn.Module, decision: Decision) -> bool:
    try:
        weld(model, [decision])
    except TorchweldError:
        return False
    return True


def _right(model: nn.Module, decision: Decision) -> bool:
    block = decision.block
    key = Key(block.form, (), block.dtype, block.calls[0].rows, True)
    group = Group(key=key, blocks=[block], calls=[block.calls[0]])
    return all(
        verify_choice(model, group, choice, decision.training).verified
        for choice in decision.choices
    )


def fuse(
    model: nn.Module,
    inputs: Any,
    *,
    training: bool = False,
    quick: bool = False,
    budget_s: float | None = None,
    progress: Progress | None = None,
) -> nn.Module:
    """Plan and apply in one step; `tw.plan_of(model)` says what was done and why."""
    made = plan(model, inputs, training=training, quick=quick, budget_s=budget_s, progress=progress)
    return apply(model, made)


def plan_of(model: nn.Module) -> Plan | None:
    """The plan that a model was welded by, None if there is none."""
    found = model.__dict__.get(_PLAN)
    return found if isinstance(found, Plan) else None
