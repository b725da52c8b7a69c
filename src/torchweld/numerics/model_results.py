"""Runs a whole model, and gives what is compared: floating outputs, in training gradients too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from torchweld.core.errors import TorchweldError
from torchweld.core.model_inputs import Workload

Results = dict[str, Tensor]


def results(model: nn.Module, workload: Workload, training: bool) -> Results:
    """The floating outputs by name, in training with the gradient of every parameter.

    Gradients that are there are dropped first: a backward would add to them.
    """
    for parameter in model.parameters() if training else ():
        parameter.grad = None
    with torch.random.fork_rng(devices=[]), torch.set_grad_enabled(training):
        torch.manual_seed(0)
        outputs = floating(workload.try_on(model))
        found = {f"output {i}": tensor.detach().clone() for i, tensor in enumerate(outputs)}
        if training:
            backward(outputs)
            for name, parameter in model.named_parameters():
                if parameter.grad is not None:
                    found[f"grad {name}"] = parameter.grad
                    parameter.grad = None
    return found


def step_of(model: nn.Module, workload: Workload, training: bool) -> Callable[[], Any]:
    """One step: forward, in training with the backward."""

    def infer() -> Any:
        with torch.no_grad():
            return workload.run(model)

    def train() -> Any:
        for parameter in model.parameters():
            parameter.grad = None
        output = workload.run(model)
        backward(floating(output))
        return output

    return train if training else infer


def backward(outputs: Sequence[Tensor]) -> None:
    """Runs the backward from a weighted sum of the outputs: no two elements count alike."""
    wanted = [tensor for tensor in outputs if tensor.requires_grad]
    if not wanted:
        raise TorchweldError("no output of the model requires a gradient, so there is no backward")
    torch.autograd.backward(wanted, [_weights_like(tensor) for tensor in wanted])


def _weights_like(tensor: Tensor) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(3)
    drawn = torch.randn(tensor.shape, generator=generator, dtype=torch.float64, device="cpu")
    return drawn.to(tensor.device, tensor.dtype)


def floating(value: Any) -> list[Tensor]:
    """The floating tensors of whatever a model returns, each once."""
    found: dict[int, Tensor] = {}
    for leaf in tree_leaves(_opened(value)):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            found.setdefault(id(leaf), leaf)
    return list(found.values())


def _opened(value: Any) -> Any:
    """Mappings and sequences of any class as plain ones, which is what pytree looks into."""
    if isinstance(value, Tensor):
        return value
    if hasattr(value, "items") and callable(value.items):
        return [_opened(item) for _, item in value.items()]
    if isinstance(value, (list, tuple)):
        return [_opened(item) for item in value]
    return value
