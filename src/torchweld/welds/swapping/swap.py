"""Welds modules in place, and undoes it exactly. Nothing else changes a model.

In: a model and decisions about blocks of it, which `decision_fitting.py` has checked. Out: the same
model; each block's module has another class. It runs the fused op where the decision covers a call,
and the original code elsewhere. Parameters, buffers, names and hooks stay where they are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

from torch import nn

from torchweld.core.argument_checks import check_number, check_whole, misfit
from torchweld.core.errors import TorchweldError
from torchweld.welds.guarding.welded_structure import release
from torchweld.welds.swapping.call_stats import ModelStats, Stats
from torchweld.welds.swapping.decision_fitting import Prepared, all_prepared
from torchweld.welds.swapping.joint import Joint
from torchweld.welds.swapping.safety_net import Checking
from torchweld.welds.swapping.welded_class import Welded
from torchweld.welds.weld_decisions import Decision
from torchweld.welds.weld_marks import KEY, PLAN_KEY, checked_root, plain_class

# ---- swapping ----


def set_face(module: nn.Module, kind: type, joint: Joint | None) -> None:
    """Gives a module a class and what welding keeps in it.

    In this order, so that nobody who calls it meanwhile meets a welded class without its joint.
    """
    if joint is not None:
        module.__dict__[KEY] = joint
    object.__setattr__(module, "__class__", kind)
    if joint is None:
        module.__dict__.pop(KEY, None)


P = ParamSpec("P")
T = TypeVar("T")


def all_or_nothing(function: Callable[P, T]) -> Callable[P, T]:
    """Decorates a function of `model`: if it raises, the model is welded as it was before.

    That holds for interrupts too.
    """

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        root = checked_root(args[0] if args else kwargs.get("model"))
        faces = [(m, type(m), m.__dict__.get(KEY)) for m in root.modules()]
        plan = root.__dict__.get(PLAN_KEY)
        try:
            return function(*args, **kwargs)
        except BaseException:
            for module, kind, joint in faces:
                if type(module) is not kind or module.__dict__.get(KEY) is not joint:
                    set_face(module, kind, joint)
            if plan is not None:
                root.__dict__[PLAN_KEY] = plan
            else:
                root.__dict__.pop(PLAN_KEY, None)
            raise

    return wrapped


# ---- welding ----


@all_or_nothing
def weld(model: nn.Module, decisions: Iterable[Decision]) -> nn.Module:
    """Welds the modules that `decisions` name, in place, and returns the model.

    A block that is welded already is welded anew; others stay as they are. If any decision does not
    fit the model, a TorchweldError lists everything that is wrong, and nothing is changed.
    """
    _swap(all_prepared(checked_root(model), _listed(decisions)), [])
    return model


def _listed(decisions: Iterable[Decision]) -> list[Decision]:
    allowed = "a list of tw.Decision, as plan.decisions is"
    if isinstance(decisions, (str, bytes, nn.Module)) or not isinstance(decisions, Iterable):
        raise misfit("weld", "decisions", decisions, allowed)
    found = list(decisions)
    for one in found:
        if not isinstance(one, Decision):
            raise misfit("weld", "one of the decisions", one, allowed)
    return found


@all_or_nothing
def reweld(model: nn.Module, decisions: Iterable[Decision], plan: object = None) -> nn.Module:
    """Does what `weld` does, undoes all that the decisions do not name, and keeps the plan.

    Everything is prepared first: whoever calls the model meanwhile meets the original code, or what
    was welded before, or what is welded now.
    """
    root = checked_root(model)
    prepared = all_prepared(root, decisions)
    named = {id(one.module) for one in prepared}
    others = [m for m in root.modules() if isinstance(m, Welded) and id(m) not in named]
    _refuse_odd(others)
    _swap(prepared, others)
    if plan is None:
        root.__dict__.pop(PLAN_KEY, None)
    else:
        root.__dict__[PLAN_KEY] = plan
    return model


def _swap(welded: Sequence[Prepared], undone: Sequence[nn.Module]) -> None:
    """Swaps module by module. Each runs one code or the other at every moment, never a mixture."""
    before = [m.__dict__.get(KEY) for m in (*(one.module for one in welded), *undone)]
    for module, kind, joint in welded:
        set_face(module, kind, joint)
    for module in undone:
        release(module)
    for joint_before in before:
        if joint_before is not None:
            joint_before.drop_copies()


# ---- undoing ----


@all_or_nothing
def undo(model: nn.Module, paths: Iterable[str] | None = None) -> nn.Module:
    """Gives welded modules their own class and `__dict__` back, in place: all of them in `model`,
    or those at `paths`."""
    wanted = None if paths is None else _wanted(paths)
    found = {p: m for p, m in checked_root(model).named_modules() if isinstance(m, Welded)}
    if wanted is not None and (unknown := sorted(wanted - found.keys())):
        raise TorchweldError(
            f"nothing was undone: {', '.join(unknown)} is not welded; welded are: "
            f"{', '.join(found) or 'none'}"
        )
    welded = [m for p, m in found.items() if wanted is None or p in wanted]
    _refuse_odd(welded)
    _swap([], welded)
    if wanted is None:
        checked_root(model).__dict__.pop(PLAN_KEY, None)
    return model


def _refuse_odd(welded: Sequence[nn.Module]) -> None:
    """Raises if another tool derived a class from a welded one."""
    odd = [m for m in welded if issubclass(plain_class(type(m)), Welded)]
    if odd:
        listed = ", ".join(sorted({type(m).__name__ for m in odd}))
        raise TorchweldError(
            f"nothing was undone: after welding, another tool made modules {listed}; take that "
            "back first (parametrize.remove_parametrizations, say)"
        )


def _wanted(paths: Iterable[str]) -> set[str]:
    allowed = "paths of welded modules in a list, or None for all of them"
    if isinstance(paths, (str, bytes)) or not isinstance(paths, Iterable):
        raise misfit("undo", "paths", paths, allowed)
    wanted = list(paths)
    for path in wanted:
        if not isinstance(path, str):
            raise misfit("undo", "one of the paths", path, allowed)
    return set(wanted)


# ---- looking, and switching ----


def is_welded(module: nn.Module) -> bool:
    """Whether this very module, not one inside it, is welded."""
    return isinstance(module, Welded) and module._torchweld is not None


def _joints(model: nn.Module) -> dict[str, Joint]:
    return {
        path: module._torchweld
        for path, module in checked_root(model).named_modules()
        if isinstance(module, Welded) and module._torchweld is not None
    }


def welded_paths(model: nn.Module) -> list[str]:
    """Where welded modules stand, in the order of `named_modules`; "" is the model itself."""
    return list(_joints(model))


def decisions_of(model: nn.Module) -> list[Decision]:
    """The decisions by which the modules in `model` were welded."""
    return [joint.decision for joint in _joints(model).values()]


def stats(model: nn.Module) -> ModelStats:
    """Path of each welded module -> what became of its calls; to be printed, or looked into."""
    return ModelStats(
        {
            path: Stats(
                originals=dict(joint.counts),
                changes=tuple(joint.said),
                checked=joint.checked,
                copied_bytes=joint.copied_bytes,
                fused=joint.telling.fused or joint.membership.calls > 0,
                gathered=joint.membership.calls,
                apart=joint.membership.stopped,
            )
            for path, joint in _joints(model).items()
        }
    )


@contextmanager
def disabled(model: nn.Module) -> Iterator[None]:
    """Inside, the welded modules of `model` run their original code, in all threads."""
    paused: list[Joint] = []
    try:
        for joint in _joints(model).values():
            joint.pause()
            paused.append(joint)
        yield
    finally:
        for joint in paused:
            joint.resume()


def check_calls(
    model: nn.Module, *, first: int | None = None, sample: float | None = None
) -> nn.Module:
    """Compares calls of each welded module with the original, from now on, by the numerical rule.

    `first=n`: the next n calls; `sample=p`: each call with probability p, until `first=0` ends it.
    A module that disagrees is undone, with a warning, and the call gives the original's result.
    Calls that the decision does not cover are not counted; nor are those inside compiled graphs.
    """
    if (first is None) == (sample is None):
        raise TorchweldError("give either first=<number of calls> or sample=<share of calls>")
    if first is not None:
        check_whole("check_calls", "first", first, least=0)
    if sample is not None:
        check_number("check_calls", "sample", sample, above=0, most=1)
    for joint in _joints(model).values():
        joint.check(Checking(first=first or 0, sample=sample or 0.0) if first != 0 else None)
    return model
