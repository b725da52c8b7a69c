"""A block in its model: the module, the tensors, and a call like those that were recorded."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from torchweld.machine.gpu_identity import set_ups_of
from torchweld.ops.backends.backend import device_of
from torchweld.welds.found_blocks import Block, Call


def module_of(model: nn.Module, block: Block) -> nn.Module:
    return model.get_submodule(block.path)


def tensors_of(model: nn.Module, block: Block) -> list[Tensor]:
    """The block's tensors, in the op's order."""
    module = module_of(model, block)
    found = []
    for name in block.tensors:
        path, _, attribute = name.rpartition(".")
        found.append(getattr(module.get_submodule(path), attribute))
    return found


def gpus_of(model: nn.Module) -> tuple[str, ...]:
    """The GPUs that the model is on, as a fingerprint has them."""
    return set_ups_of([*model.parameters(), *model.buffers()])


def set_up_of_tensors(tensors: Sequence[Tensor]) -> str:
    """What the times of a block with these tensors are only true for, beside the machine."""
    kinds = {device_of(tensor).type for tensor in tensors}
    return " and ".join(set_ups_of(tensors) or sorted(kinds))


def input_like(call: Call, rows: int | None = None) -> Tensor:
    """Random numbers in the shape, type and layout of a recorded x."""
    shape = call.shape if rows is None else (rows, call.shape[-1])
    generator = torch.Generator("cpu").manual_seed(0)
    x = torch.randn(shape, generator=generator, device="cpu").to(getattr(torch, call.dtype))
    if call.contiguous or x.dim() < 2:
        return x
    return x.transpose(-1, -2).contiguous().transpose(-1, -2)


def block_forward(module: nn.Module, block: Block, x: Tensor) -> Callable[[], Tensor]:
    """A call of the block's module as the model makes it, with hooks and `__call__`."""
    first = next(iter(inspect.signature(module.forward).parameters), None)
    args, kwargs = ((x,), {}) if first in (block.argument, "args") else ((), {block.argument: x})
    kwargs |= dict.fromkeys(block.ignores, x)  # any tensor will do
    return lambda: module(*args, **kwargs)


def block_call(module: nn.Module, block: Block, x: Tensor, training: bool) -> Callable[[], object]:
    """The same without gradients; in training with the backward, into fresh gradients."""
    forward = block_forward(module, block, x)
    if not training:
        return torch.no_grad()(forward)
    leaves = [x, *module.parameters()]
    gradients: list[Tensor] = []  # of y, made once

    def train() -> object:
        for leaf in leaves:
            leaf.grad = None
        y = forward()
        if not gradients:
            gradients.append(torch.ones_like(y))
        y.backward(gradients[0])  # type: ignore[no-untyped-call]
        return y

    return train
