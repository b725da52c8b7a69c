"""A step of training as a call that can be timed: of a block, or of a whole model.

In: what is called, its leaves, a `TrainingStep`. Out: a `StepCall`. A block gets one gradient of
its output, drawn beforehand; the loss of a model is the mean square of its outputs, whose gradient
is as dense as a real loss's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchweld.bench.training_step import TrainingStep
from torchweld.numerics.model_results import floating

# A step of the optimizer takes as long as any, and the weights stay: all steps do the same work.
LEARNING_RATE = 0.0


@dataclass(frozen=True, kw_only=True)
class StepCall:
    """One step, again and again.

    call:    the step; gives the output of a block, the loss of a model
    forward: its first part; what it gives keeps alive what was saved for the backward
    leaves:  what gets gradients
    """

    call: Callable[[], Tensor]
    forward: Callable[[], Tensor]
    leaves: tuple[Tensor, ...]


def block_step(
    function: Callable[[Tensor], Tensor],
    x: Tensor,
    tensors: Sequence[Tensor],
    gradient: Tensor,
    step: TrainingStep,
) -> StepCall:
    """Forward of x, and backward from the gradient of the output; x gets a gradient too."""
    if step.autocast:
        gradient = gradient.to(getattr(torch, step.autocast))

    def forward() -> Tensor:
        return function(x)

    def backward(y: Tensor) -> None:
        y.backward(gradient)  # type: ignore[no-untyped-call]

    # Without autocast nothing stands between the step and the block: some take 50 µs.
    return _step(_cast(forward, step) if step.autocast else forward, backward, [x, *tensors], step)


def model_step(
    run: Callable[[], Any], parameters: Sequence[Tensor], step: TrainingStep
) -> StepCall:
    """Forward of a model, its loss, and backward."""

    def forward() -> Tensor:
        losses = [
            output.float().square().mean() for output in floating(run()) if output.requires_grad
        ]
        return torch.stack(losses).sum()

    def backward(loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    return _step(_cast(forward, step), backward, parameters, step)


def _cast(forward: Callable[[], Tensor], step: TrainingStep) -> Callable[[], Tensor]:
    def cast() -> Tensor:
        with _autocast(step):
            return forward()

    return cast


def _autocast(step: TrainingStep) -> AbstractContextManager[Any]:
    if not step.autocast:
        return nullcontext()
    return torch.autocast("cpu", dtype=getattr(torch, step.autocast))


def _step(
    forward: Callable[[], Tensor],
    backward: Callable[[Tensor], None],
    leaves: Sequence[Tensor],
    step: TrainingStep,
) -> StepCall:
    cleared = () if step.accumulate else tuple(leaves)
    optimizer = optimizer_of(step, leaves)

    def call() -> Tensor:
        for leaf in cleared:
            leaf.grad = None
        y = forward()
        backward(y)
        return y

    def whole() -> Tensor:
        assert optimizer is not None
        y = call()
        optimizer.step()
        return y

    return StepCall(
        call=call if optimizer is None else whole, forward=forward, leaves=tuple(leaves)
    )


def optimizer_of(step: TrainingStep, leaves: Sequence[Tensor]) -> torch.optim.Optimizer | None:
    """The optimizer for the parameters among the leaves; None if the step has none."""
    parameters = [leaf for leaf in leaves if isinstance(leaf, torch.nn.Parameter)]
    if step.optimizer == "adamw":
        return torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=True)
    if step.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=0.9, fused=True)
    return None


def judged_of(made: StepCall, accumulate: bool) -> list[Tensor]:
    """The output of a step, then the gradient of every leaf.

    A step that accumulates is taken twice from no gradients, and half of their sum is judged: it is
    exact where adding is right.
    """
    for leaf in made.leaves:
        leaf.grad = None
    y = made.call()
    if accumulate:
        y = made.call()
    factor = 0.5 if accumulate else 1.0
    return [y.detach(), *(_gradient(leaf) * factor for leaf in made.leaves)]


def _gradient(leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad.detach()
