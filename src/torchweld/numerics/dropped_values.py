"""Dropout in a comparison: all sides drop the same values.

A candidate draws random numbers as `F.dropout` does. Eager and the reference in fp64 get masks that
were drawn from the same state of the generator, one for each layer with dropout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn.functional import dropout

from torchweld.core.blocks import LayerForm
from torchweld.ops.backends.backend import Form

SEED = 0
# How many times further from two runs than these are from each other a third may be, if it has
# drawn the same random numbers. Other numbers put it a hundred times as far and more in fp32.
DRAWN_ALIKE = 8.0
# Differences below this are rounding, in units in the last place of the largest value.
SLACK_EPS = 64.0


def seeded_state(device: torch.device) -> Tensor:
    """The state of a generator with a fixed seed."""
    return torch.Generator(device).manual_seed(SEED).get_state()


def random_state(device: torch.device) -> Tensor:
    """What the next random numbers on the device are drawn from."""
    if device.type == "cpu":
        return torch.get_rng_state()
    state: Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


@contextmanager
def drawing_from(state: Tensor | None, device: torch.device) -> Iterator[None]:
    """Inside, random numbers are drawn from `state`; afterwards as if nothing had been drawn.

    With None, nothing is changed.
    """
    if state is None:
        yield
        return
    on_cpu = device.type == "cpu"
    others: list[torch.device] = [] if on_cpu else [device]
    with torch.random.fork_rng(others, device_type="cuda" if on_cpu else device.type):
        if on_cpu:
            torch.set_rng_state(state)
        else:
            torch.get_device_module(device).set_rng_state(state, device)
        yield


def drawn_masks(
    x: Tensor, tensors: Sequence[Tensor], forms: Sequence[LayerForm], state: Tensor
) -> list[Tensor]:
    """What is kept (True) of the output of each layer with dropout, drawn as eager draws it."""
    if not any(form.dropout for form in forms):
        return []
    widths = [N for _, N in Form.of("chain", forms, tensors).sizes]
    with drawing_from(state, x.device):
        return [
            dropout(x.new_ones(*x.shape[:-1], N), form.dropout) != 0
            for form, N in zip(forms, widths, strict=True)
            if form.dropout
        ]


def by_masks(masks: Sequence[Tensor]) -> Callable[[LayerForm, Tensor], Tensor]:
    """A primitive of the reference: drops by one mask after the other."""
    left = iter(masks)

    def drop(form: LayerForm, y: Tensor) -> Tensor:
        return y * next(left).to(y.dtype).div(1 - form.dropout)

    return drop


def drew_alike(exact: Mapping[str, Tensor], others: Sequence[Mapping[str, Tensor]]) -> bool:
    """Whether a model dropped in fp64 what it dropped in its own type.

    `others` are runs in its own type with other rounding. If the same values were dropped, the run
    in fp64 differs from them as they differ from each other. `F.dropout` drops the same in every
    type on a CPU; on other devices, and for what else draws random numbers, that is not sure.
    """
    if len(others) < 2:
        return False
    for name, values in exact.items():
        if any(name not in run or run[name].shape != values.shape for run in others[:2]):
            return False
        one, other = (run[name].double() for run in others[:2])
        eps = torch.finfo(others[0][name].dtype).eps
        allowed = DRAWN_ALIKE * _largest(one - other) + SLACK_EPS * eps * _largest(values)
        if _largest(one - values) > allowed:
            return False
    return True


def _largest(values: Tensor) -> float:
    finite = values[values.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0
