"""Welding modules in place, and undoing it exactly. Nothing else changes a model.

In: a model and decisions about blocks of it. Out: the same model; each block's module has a class
of its own that runs the fused op where the decision covers a call, and the original code elsewhere.
Parameters, buffers, names and hooks stay where they are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from torchweld.core.argument_checks import check_model, check_number, check_whole, misfit
from torchweld.core.blocks import parse_spec
from torchweld.core.errors import TorchweldError
from torchweld.core.interrupt_safety import Apart
from torchweld.ops.backends import Form, backend_named
from torchweld.ops.backends.backend import device_of
from torchweld.welds.found_blocks import Block, Refusal
from torchweld.welds.guarding.welded_structure import Structure, inside, release, steps_of
from torchweld.welds.refusal_reasons import Refused
from torchweld.welds.swapping.call_stats import ModelStats, Stats
from torchweld.welds.swapping.guard_making import guard_of
from torchweld.welds.swapping.joint import Joint
from torchweld.welds.swapping.original_code import WeldedModel
from torchweld.welds.swapping.safety_net import Checking
from torchweld.welds.swapping.tensor_binding import place_of
from torchweld.welds.swapping.welded_class import Welded, welded_class
from torchweld.welds.weld_decisions import Decision
from torchweld.welds.weld_marks import KEY, PLAN_KEY, plain_class

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
    """Whatever is raised, an interrupt too, leaves the model welded as it was.

    Of a function whose first argument is `model`.
    """

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        root = _plain_root(args[0] if args else kwargs.get("model"))
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
    _swap(_all_prepared(_plain_root(model), _listed(decisions)), [])
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
    """As `weld`, and undoes all that the decisions do not name; notes the plan it was done by.

    Everything is prepared first: whoever calls the model meanwhile meets the original code, or what
    was welded before, or what is welded now.
    """
    root = _plain_root(model)
    prepared = _all_prepared(root, decisions)
    named = {id(one.module) for one in prepared}
    others = [m for m in root.modules() if isinstance(m, Welded) and id(m) not in named]
    _refuse_odd(others)
    _swap(prepared, others)
    if plan is None:
        root.__dict__.pop(PLAN_KEY, None)
    else:
        root.__dict__[PLAN_KEY] = plan
    return model


def why_not(model: nn.Module, decisions: Iterable[Decision]) -> tuple[Refusal, ...]:
    """Why `weld` would not carry out decisions, one by one; () if it would. Welds nothing."""
    with Apart() as apart:  # where no interrupt can leave the tracer halfway
        _, refused = apart(_prepared, _plain_root(model), decisions)
    return tuple(refused)


class _Prepared(NamedTuple):
    module: nn.Module
    kind: type
    joint: Joint


def _all_prepared(root: nn.Module, decisions: Iterable[Decision]) -> list[_Prepared]:
    """What is to be welded; raises with everything that is wrong."""
    with Apart() as apart:
        prepared, refused = apart(_prepared, root, decisions)
    if refused:
        raise TorchweldError(
            "nothing was welded, because decisions do not fit the model:",
            *(f"  {one.path or 'the model'}: {one.reason}" for one in refused),
        )
    return prepared


def _prepared(
    root: nn.Module, decisions: Iterable[Decision]
) -> tuple[list[_Prepared], list[Refusal]]:
    prepared: list[_Prepared] = []
    refused: list[Refusal] = []
    paths: dict[int, str] = {}
    shared = WeldedModel.of(root)
    for decision in decisions:
        block, found = decision.block, _prepare(root, decision, shared)
        if isinstance(found, _Prepared):
            if (first := paths.get(id(found.module))) is None:
                paths[id(found.module)] = block.path
                prepared.append(found)
                continue
            found = [f"is the same module as {first or 'the model'}; decide about it once"]
        refused += [Refusal(path=block.path, kind=block.kind, reason=why) for why in found]
    return prepared, [*refused, *_unlike_groups(prepared)]


def _unlike_groups(prepared: Sequence[_Prepared]) -> Iterator[Refusal]:
    """Members of a group read the same input, so it has to be one that all of them take."""
    first: dict[str, Joint] = {}
    for joint in (one.joint for one in prepared if one.joint.decision.in_group):
        block = joint.decision.block
        other = first.setdefault(block.group, joint)
        if (block.in_features, joint.dtype, joint.device) != (
            other.decision.block.in_features,
            other.dtype,
            other.device,
        ):
            reason = f"does not take the input of {other.name}, which is in its group"
            yield Refusal(path=block.path, kind=block.kind, reason=reason)


def _swap(welded: Sequence[_Prepared], undone: Sequence[nn.Module]) -> None:
    """Swaps module by module. Each runs one code or the other at every moment, never a mixture."""
    before = [m.__dict__.get(KEY) for m in (*(one.module for one in welded), *undone)]
    for module, kind, joint in welded:
        set_face(module, kind, joint)
    for module in undone:
        release(module)
    for joint_before in before:
        if joint_before is not None:
            joint_before.drop_copies()


def _plain_root(model: Any) -> nn.Module:
    """The model itself, or what torch.compile has wrapped."""
    check_model("torchweld", model)
    inner = model._modules.get("_orig_mod")
    return model if inner is None else _plain_root(inner)


def _prepare(root: nn.Module, decision: Decision, shared: WeldedModel) -> _Prepared | list[str]:
    """Everything that is needed to weld, or all that is in the way."""
    block = decision.block
    module = inside(root, steps_of(block.path))
    if module is None:
        return ["there is no module at this path"]
    problems = decision.problems() + _class_problems(module, block)
    for path in block.covers:
        problems += _inner_problems(path, inside(module, steps_of(path)))
    tensors, missing = _tensors_of(module, block)
    problems += missing or _tensor_problems(tensors, block)
    if problems:
        return problems
    device = device_of(tensors[0])
    problems = _backend_problems(decision, tensors, device)
    try:
        kind = welded_class(plain_class(type(module)))
        _try_class(module, kind)
        holders = (path.rpartition(".")[0] for path in block.tensors)
        structure = Structure.of(module, filter(None, [*block.covers, *holders]))
        joint = Joint(decision, structure, device.type, shared)
        joint.watch_over(module, guard_of(module, block))
    except (TypeError, TorchweldError, Refused) as error:
        problems.append(str(error))
    if problems:
        return problems
    return _Prepared(module, kind, joint)


def _class_problems(module: nn.Module, block: Block) -> list[str]:
    kind = plain_class(type(module))
    found = []
    if kind.__name__ != block.kind.rpartition(".")[2]:
        found.append(f"it is a {kind.__name__}, and the decision is about a {block.kind}")
    if "forward" in module.__dict__:
        found.append("it has a forward of its own (module.forward = …), which would not be called")
    if isinstance(module, torch.jit.ScriptModule):
        found.append("it is a ScriptModule, whose code is not Python's any more")
    return found + [
        f"{kind.__name__} has a {method} of its own; copies would not be welded"
        for method in ("__reduce__", "__reduce_ex__", "__deepcopy__")
        if getattr(kind, method, None) is not getattr(object, method, None)
    ]


def _inner_problems(path: str, module: nn.Module | None) -> list[str]:
    if module is None:
        return [f"there is no module {path} inside it"]
    return [f"{path} has a forward of its own"] if "forward" in module.__dict__ else []


def _tensors_of(module: nn.Module, block: Block) -> tuple[list[Tensor], list[str]]:
    found: list[Tensor] = []
    missing = []
    for path in block.tensors:
        place = place_of(module, path)
        tensor = None if place is None else place.holder[place.name]
        if tensor is None:
            missing.append(f"{path} is none of its parameters or buffers")
        else:
            found.append(tensor)
    return found, missing


def _tensor_problems(tensors: Sequence[Tensor], block: Block) -> list[str]:
    try:
        shape = Form.of("chain", parse_spec(block.form), tensors)
    except TorchweldError as error:
        return [str(error)]
    found = []
    sizes, expected = (shape.K, shape.sizes[-1][1]), (block.in_features, block.out_features)
    if sizes != expected:
        found.append(f"its weights make {sizes[0]} → {sizes[1]}, not {expected[0]} → {expected[1]}")
    dtypes = sorted({str(t.dtype).removeprefix("torch.") for t in tensors})
    if dtypes != [block.dtype]:
        found.append(f"its weights are {', '.join(dtypes)}, not {block.dtype}")
    devices = sorted({str(t.device) for t in tensors})
    if len(devices) > 1:
        found.append(f"its weights are on {', '.join(devices)}; move them to one device")
    return found


def _backend_problems(
    decision: Decision, tensors: Sequence[Tensor], device: torch.device
) -> list[str]:
    shape = Form.of("chain", parse_spec(decision.block.form), tensors)
    found: dict[str, None] = {}
    for choice in decision.choices:
        reasons = backend_named(choice.backend).unsupported_reasons(
            shape, (), tensors[0].dtype, device, choice.mode
        )
        found |= dict.fromkeys(f"backend {choice.backend}: {reason}" for reason in reasons)
    return list(found)


def _try_class(module: nn.Module, kind: type) -> None:
    """Raises TypeError if the module cannot take the class: `__slots__` are in the way."""
    own = type(module)
    # Tried on an empty instance that no thread calls, unless __del__ would run for it.
    probe = module if hasattr(own, "__del__") else object.__new__(own)
    object.__setattr__(probe, "__class__", kind)
    object.__setattr__(probe, "__class__", own)


# ---- undoing ----


@all_or_nothing
def undo(model: nn.Module, paths: Iterable[str] | None = None) -> nn.Module:
    """Gives welded modules their own class and `__dict__` back, in place: all of them in `model`,
    or those at `paths`."""
    wanted = None if paths is None else _wanted(paths)
    found = {p: m for p, m in _plain_root(model).named_modules() if isinstance(m, Welded)}
    if wanted is not None and (unknown := sorted(wanted - found.keys())):
        raise TorchweldError(
            f"nothing was undone: {', '.join(unknown)} is not welded; welded are: "
            f"{', '.join(found) or 'none'}"
        )
    welded = [m for p, m in found.items() if wanted is None or p in wanted]
    _refuse_odd(welded)
    _swap([], welded)
    if wanted is None:
        _plain_root(model).__dict__.pop(PLAN_KEY, None)
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
        for path, module in _plain_root(model).named_modules()
        if isinstance(module, Welded) and module._torchweld is not None
    }


def welded_paths(model: nn.Module) -> list[str]:
    """Where welded modules stand, in the order of `named_modules`; "" is the model itself."""
    return list(_joints(model))


def decisions_of(model: nn.Module) -> list[Decision]:
    """What the welded modules in `model` were welded by."""
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
    """From now on compares calls of each welded module with the original, by the numerical rule.

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
