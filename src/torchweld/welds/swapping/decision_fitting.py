"""Whether decisions fit a model: what welding swaps in, or everything that is in the way.

In: a model and decisions about blocks of it. Out: a `Prepared` for each decision, or the reasons
why it cannot be carried out. Nothing is changed here; `swap.py` does that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from torchweld.core.blocks import parse_spec
from torchweld.core.errors import TorchweldError
from torchweld.core.interrupt_safety import Apart
from torchweld.ops.backends import Form, backend_named
from torchweld.ops.backends.backend import device_of
from torchweld.welds.found_blocks import Block, Refusal
from torchweld.welds.guarding.welded_structure import Structure, inside, steps_of
from torchweld.welds.refusal_reasons import Refused
from torchweld.welds.swapping.guard_making import guard_of
from torchweld.welds.swapping.joint import Joint
from torchweld.welds.swapping.original_code import WeldedModel
from torchweld.welds.swapping.tensor_binding import place_of
from torchweld.welds.swapping.welded_class import welded_class
from torchweld.welds.weld_decisions import Decision
from torchweld.welds.weld_marks import checked_root, plain_class


def why_not(model: nn.Module, decisions: Iterable[Decision]) -> tuple[Refusal, ...]:
    """Why `weld` would not carry out decisions, one by one; () if it would. Welds nothing."""
    with Apart() as apart:  # where no interrupt can leave the tracer halfway
        _, refused = apart(_prepared, checked_root(model), decisions)
    return tuple(refused)


class Prepared(NamedTuple):
    """A module, and what welding gives it."""

    module: nn.Module
    kind: type
    joint: Joint


def all_prepared(root: nn.Module, decisions: Iterable[Decision]) -> list[Prepared]:
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
) -> tuple[list[Prepared], list[Refusal]]:
    prepared: list[Prepared] = []
    refused: list[Refusal] = []
    paths: dict[int, str] = {}
    shared = WeldedModel.of(root)
    for decision in decisions:
        block, found = decision.block, _prepare(root, decision, shared)
        if isinstance(found, Prepared):
            if (first := paths.get(id(found.module))) is None:
                paths[id(found.module)] = block.path
                prepared.append(found)
                continue
            found = [f"is the same module as {first or 'the model'}; decide about it once"]
        refused += [Refusal(path=block.path, kind=block.kind, reason=why) for why in found]
    return prepared, [*refused, *_unlike_groups(prepared)]


def _unlike_groups(prepared: Sequence[Prepared]) -> Iterator[Refusal]:
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


# ---- one decision ----


def _prepare(root: nn.Module, decision: Decision, shared: WeldedModel) -> Prepared | list[str]:
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
    return Prepared(module, kind, joint)


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
