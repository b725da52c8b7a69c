"""What one step is: inference, training, or a callable.

In: a model with inputs, or a workload. Out: a `Step` that can be run again and again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torchweld.core.errors import TorchweldError
from torchweld.core.model_inputs import as_workloads, tensors_in
from torchweld.core.model_state import put_back
from torchweld.profiles.recording.module_instrument import Roots

Loss = Callable[[Any], Tensor]


@dataclass(frozen=True, kw_only=True)
class Step:
    """`run` is timed; `prepare` runs before it and is not."""

    run: Callable[[], object]
    prepare: Callable[[], None]
    roots: Roots
    what: str
    inputs: str
    training: bool
    keep: Callable[[], Any]  # gives a context after which everything is as it was


def model_step(
    model: nn.Module,
    inputs: Any,
    training: bool,
    loss: Loss | None,
    optimizer: torch.optim.Optimizer | None,
) -> Step:
    """A step of a model: forward, and in training loss, backward and the optimizer."""
    if not training and (loss is not None or optimizer is not None):
        raise TorchweldError("loss and optimizer belong to a training step: give training=True too")
    workloads = as_workloads(inputs)

    def infer() -> None:
        with torch.no_grad():
            for workload in workloads:
                workload.try_on(model)

    def train() -> None:
        if optimizer is not None:
            optimizer.zero_grad()
        for workload in workloads:
            output = workload.try_on(model)
            scalar = (default_loss if loss is None else loss)(output)
            scalar.backward()  # type: ignore[no-untyped-call]
        if optimizer is not None:
            optimizer.step()

    def prepare() -> None:
        if training and optimizer is None:
            for parameter in model.parameters():
                parameter.grad = None

    return Step(
        run=train if training else infer,
        prepare=prepare,
        roots=[("", model)],
        what=type(getattr(model, "_orig_mod", model)).__name__,
        inputs="; ".join(workload.name for workload in workloads),
        training=training,
        keep=lambda: put_back(model, training, optimizer),
    )


def workload_step(workload: Callable[[], object]) -> Step:
    """A step of a workload: the call itself, as the user wrote it."""
    return Step(
        run=workload,
        prepare=lambda: None,
        roots=modules_of(workload),
        what=getattr(workload, "__qualname__", None) or type(workload).__name__,
        inputs="",
        training=False,
        keep=nullcontext,
    )


def default_loss(output: Any) -> Tensor:
    """The sum of all floating tensors of an output that have a gradient to give."""
    terms = [
        tensor.sum()
        for tensor in tensors_in(output)
        if tensor.is_floating_point() and tensor.requires_grad
    ]
    if not terms:
        raise TorchweldError(
            "no floating output of the model requires a gradient, so there is nothing to train on; "
            "give loss=, a function from the model's output to a scalar tensor"
        )
    return functools.reduce(torch.add, terms)


def modules_of(workload: Any) -> list[tuple[str, nn.Module]]:
    """The models that a callable holds or names: what it is bound to, closes over or reads."""
    found: dict[str, nn.Module] = {}

    def add(name: str, value: Any) -> None:
        if isinstance(value, nn.Module) and all(value is not other for other in found.values()):
            found[name] = value

    pending, seen = [workload], set()
    while pending:
        value = pending.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, functools.partial):
            pending.append(value.func)
            for i, item in enumerate(value.args):
                add(f"argument{i}", item)
            for name, item in value.keywords.items():
                add(name, item)
            continue
        owner = getattr(value, "__self__", None)
        if isinstance(owner, nn.Module):
            add("model", owner)
        elif owner is not None and hasattr(owner, "__dict__"):
            for name, item in vars(owner).items():
                add(name, item)
        function = getattr(value, "__func__", value)
        code = getattr(function, "__code__", None)
        if code is None:
            if hasattr(value, "__dict__"):
                for name, item in vars(value).items():
                    add(name, item)
            continue
        cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
        named = [(name, cell.cell_contents) for name, cell in cells if _is_full(cell)]
        named += [
            (name, function.__globals__[name])
            for name in code.co_names
            if name in function.__globals__
        ]
        for name, item in named:
            add(name, item)
            if hasattr(item, "__code__") or isinstance(item, functools.partial):
                pending.append(item)
    inside = {id(m) for model in found.values() for m in model.modules() if m is not model}
    outer = [(name, model) for name, model in found.items() if id(model) not in inside]
    return [("", outer[0][1])] if len(outer) == 1 else outer


def _is_full(cell: Any) -> bool:
    try:
        return bool(cell.cell_contents is not None)
    except ValueError:
        return False
