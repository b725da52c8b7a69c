"""Leaving a model as it was: one way for everything that runs somebody's model.

`put_back` is for runs of a whole model, `in_mode` and `attributes_put_back` for single modules that
are called or traced on their own. Each restores on the way out, whatever happens inside.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

_ABSENT = object()


@contextmanager
def put_back(
    model: nn.Module, training: bool, optimizer: torch.optim.Optimizer | None = None
) -> Iterator[None]:
    """Inside, the model is in train or eval mode and has no gradients; then all is put back.

    That is modes, gradients and random numbers; in training also buffers; with an optimizer also
    its state and all parameters.
    """
    grads = [(parameter, parameter.grad) for parameter in model.parameters()]
    tensors = {id(buffer): buffer for buffer in model.buffers()} if training else {}
    state: dict[str, Any] | None = None
    if optimizer is not None:
        stepped = [p for group in optimizer.param_groups for p in group["params"]]
        tensors |= {id(p): p for p in (*stepped, *model.parameters())}
        state = copy.deepcopy(optimizer.state_dict())
    values = [(tensor, tensor.detach().clone()) for tensor in tensors.values()]
    put_random_numbers_back = random_numbers()
    try:
        with _modes_put_back(model):
            for parameter, _ in grads:
                parameter.grad = None
            model.train(training)
            yield
    finally:
        put_random_numbers_back()
        for parameter, grad in grads:
            parameter.grad = grad
        with torch.no_grad():
            for tensor, before in values:
                tensor.copy_(before)
        if optimizer is not None and state is not None:
            optimizer.load_state_dict(state)


def random_numbers() -> Callable[[], None]:
    """A function that puts torch's generators back to their present state, any number of times."""
    state = torch.get_rng_state()
    in_use: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    on_gpu = torch.cuda.get_rng_state_all() if in_use else []

    def restore() -> None:
        torch.set_rng_state(state)
        if on_gpu:
            torch.cuda.set_rng_state_all(on_gpu)

    return restore


@contextmanager
def in_mode(module: nn.Module, training: bool) -> Iterator[None]:
    """Inside, a module that is in the other mode is switched to this one, with all it holds."""
    with _modes_put_back(module):
        if module.training != training:
            for inner in module.modules():
                inner.training = training  # a train() of its own may do more than that
        yield


@contextmanager
def _modes_put_back(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


# ---- attributes ----


@contextmanager
def forwards_replaced(forwards: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Inside, each module runs the given code in place of its own `forward`; hooks still run."""
    before = [(module, module.__dict__.get("forward", _ABSENT)) for module in forwards]
    try:
        for module, forward in forwards.items():
            module.__dict__["forward"] = forward
        yield
    finally:
        for module, own in before:
            if own is _ABSENT:
                module.__dict__.pop("forward", None)
            else:
                module.__dict__["forward"] = own


@contextmanager
def attributes_put_back(module: nn.Module) -> Iterator[Callable[[], list[str]]]:
    """Afterwards each module inside has the attributes that it had, hooks among them.

    Lists, dicts and sets hold what they held. Yields a function that names changed attributes.
    """
    before = {name: (inner, _attributes(inner)) for name, inner in module.named_modules()}

    def changed() -> list[str]:
        return [
            f"{name}.{attribute}" if name else attribute
            for name, (inner, attributes) in before.items()
            for attribute in _changed(inner, attributes)
        ]

    try:
        yield changed
    finally:
        for inner, attributes in before.values():
            _restore(inner, attributes)


def _attributes(module: nn.Module) -> dict[str, Any]:
    """The instance's attributes; lists, dicts and sets with a copy of what they hold now."""
    kept = {}
    for name, value in module.__dict__.items():
        kept[name] = (value, value.copy() if isinstance(value, (list, dict, set)) else None)
    return kept


def _changed(module: nn.Module, before: dict[str, Any]) -> list[str]:
    """Names of new and changed attributes; numbers and texts are compared by value."""
    names = [name for name in module.__dict__ if name not in before]
    for name, (value, held) in before.items():
        now = module.__dict__.get(name, _ABSENT)
        if isinstance(value, (bool, int, float, str)):
            same = type(now) is type(value) and now == value
        else:
            same = now is value and (held is None or _same_items(value, held))
        names += [] if same else [name]
    return names


def _restore(module: nn.Module, before: dict[str, Any]) -> None:
    for name in [name for name in module.__dict__ if name not in before]:
        del module.__dict__[name]
    for name, (value, held) in before.items():
        module.__dict__[name] = value
        if held is None or _same_items(value, held):
            continue
        if isinstance(value, list):
            value[:] = held
        else:
            value.clear()
            value.update(held)


def _same_items(value: Any, held: Any) -> bool:
    if len(value) != len(held):
        return False
    if isinstance(value, dict):
        pairs = zip(value.items(), held.items(), strict=True)
        return all(a is c and b is d for (a, b), (c, d) in pairs)
    if isinstance(value, list):
        return all(a is b for a, b in zip(value, held, strict=True))
    return {id(item) for item in value} == {id(item) for item in held}
