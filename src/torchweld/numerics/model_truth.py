"""What a model would give without rounding, and with other rounding.

In: a model and a workload. Out: a `ModelTruth`. For the exact results the model runs in float64,
module by module: a module's parameters are widened while it runs, so that no second model is in
memory. For other rounding it runs a few times with every weight off by one unit in its last place.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from torchweld.core.model_inputs import Workload, first_line
from torchweld.core.passing_exceptions import is_interrupt
from torchweld.numerics.dropped_values import drew_alike
from torchweld.numerics.model_results import Results, backward, floating

# Runs with weights off in their last place; in training each run keeps a whole model's gradients.
JITTERED_RUNS, JITTERED_TRAINING_RUNS = 4, 2

_PIECE = 1 << 20  # elements


@dataclass(frozen=True, kw_only=True)
class ModelTruth:
    """What `results` would be without rounding (None, and why), and with other rounding."""

    exact: Results | None = None
    jittered: tuple[Results, ...] = ()
    why_not_exact: str = ""


def truth_of(model: nn.Module, workload: Workload, training: bool) -> ModelTruth:
    """Runs the model in float64, if it can and draws the same random numbers, and with jitter."""
    why, exact = _why_not_exact(model), None
    jittered: list[Results] = []
    try:
        for run in range(JITTERED_TRAINING_RUNS if training else JITTERED_RUNS):
            jitter = functools.partial(_jittered, run=run)
            jittered.append(_changed_results(model, workload, training, jitter))
    except Exception as error:  # a model that does not accept other tensors
        if is_interrupt(error):
            raise
    _give_memory_back()
    if not why:
        try:
            exact = _changed_results(model, workload, training, _wide)
            narrow = next((n for n, t in exact.items() if t.dtype != torch.float64), None)
            if narrow is not None:
                why, exact = f"{narrow} stays {exact[narrow].dtype} in float64", None
            elif training and _drops_out(model) and not drew_alike(exact, jittered):
                why, exact = "dropout draws other random numbers in float64", None
        except Exception as error:  # the user's model, in a dtype that it was not made for
            if is_interrupt(error):
                raise
            why = f"it does not run in float64: {first_line(error)}"
    _give_memory_back()
    return ModelTruth(exact=exact, jittered=tuple(jittered), why_not_exact=why)


def _give_memory_back() -> None:
    """Frees what malloc keeps of changed weights: a quarter of GPT-2's size. glibc only."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _why_not_exact(model: nn.Module) -> str:
    if any(p.dtype == torch.float64 for p in model.parameters()):
        return "the model is in float64 already"
    return ""


def _changed_results(
    model: nn.Module, workload: Workload, training: bool, change: Callable[[Tensor], Tensor]
) -> Results:
    """`results` of the model with every floating parameter, buffer and input changed."""
    with _changed(model, change, keep=training) as kept:
        with torch.random.fork_rng(devices=[]), torch.set_grad_enabled(training):
            torch.manual_seed(0)
            outputs = floating(_changed_call(workload, model, change))
            found = {f"output {i}": t.detach().clone() for i, t in enumerate(outputs)}
            if training:
                backward(outputs)
        for name, tensor in kept().items():
            if tensor.grad is not None:
                found[f"grad {name}"] = tensor.grad
    return found


def _wide(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _jittered(tensor: Tensor, run: int) -> Tensor:
    """Off by about one unit in the last place, up or down."""
    if not tensor.is_floating_point():
        return tensor
    eps = torch.finfo(tensor.dtype).eps
    generator = torch.Generator("cpu").manual_seed(1000 * run + tensor.numel())
    found = tensor.detach().clone(memory_format=torch.contiguous_format)
    # All at once, a large weight would be in memory five times.
    for piece in torch.split(found.view(-1), _PIECE):
        drawn = torch.rand(piece.shape, generator=generator, device="cpu")
        signs = (drawn < 0.5).to(piece) * 2 - 1
        piece *= 1 + signs * eps
    return found


def _drops_out(model: nn.Module) -> bool:
    """Whether a module in it is a dropout, or has a number of that name."""
    values = [
        value
        for module in model.modules()
        for name, value in vars(module).items()
        if "drop" in name or (name == "p" and isinstance(module, nn.modules.dropout._DropoutNd))
    ]
    return any(isinstance(value, float) and value > 0 for value in values)


def _changed_call(workload: Workload, model: nn.Module, change: Callable[[Tensor], Tensor]) -> Any:
    if workload.inputs is None:
        return workload.run(model)
    given = workload.inputs
    args, kwargs = tree_map_only(Tensor, change, (given.args, given.kwargs))
    return model(*args, **kwargs)


@contextmanager
def _changed(
    model: nn.Module, change: Callable[[Tensor], Tensor], keep: bool
) -> Iterator[Callable[[], dict[str, Tensor]]]:
    """Inside, each module has changed parameters and buffers while its forward runs.

    With `keep` they stay for the backward; the yielded function gives them by name.
    """
    names = {id(p): name for name, p in model.named_parameters()}
    kept: dict[int, Tensor] = {}
    handles = []
    stack: list[tuple[nn.Module, dict[str, Any], dict[str, Any]]] = []

    def other(tensor: Tensor | None) -> Tensor | None:
        if tensor is None or not tensor.is_floating_point():
            return tensor
        if not keep:
            return change(tensor.detach())
        if id(tensor) not in kept:
            kept[id(tensor)] = change(tensor.detach()).requires_grad_(tensor.requires_grad)
        return kept[id(tensor)]

    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        stack.append((module, module._parameters, module._buffers))
        # Plain dictionaries of plain tensors: nothing of the module's own is written to.
        module._parameters = {n: other(p) for n, p in module._parameters.items()}  # type: ignore[misc]
        module._buffers = {n: other(b) for n, b in module._buffers.items()}
        return None

    def after(module: nn.Module, args: Any, result: Any) -> None:
        _restore(stack.pop())

    for module in model.modules():
        if _own_floats(module):
            handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            handles.append(module.register_forward_hook(after, always_call=True))
    try:
        yield lambda: {names[key]: tensor for key, tensor in kept.items() if key in names}
    finally:
        for handle in handles:
            handle.remove()
        while stack:
            _restore(stack.pop())


def _restore(saved: tuple[nn.Module, dict[str, Any], dict[str, Any]]) -> None:
    module, parameters, buffers = saved
    module._parameters = parameters
    module._buffers = buffers


def _own_floats(module: nn.Module) -> bool:
    own = [*module._parameters.values(), *module._buffers.values()]
    return any(tensor is not None and tensor.is_floating_point() for tensor in own)
