"""Compares the modes of a call that the block's code asks about with the recorded ones.

In: a call's tensors and the modes asked about. Out: why the call has to run the original, or None.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchweld.welds.weld_decisions import Decision

_ANEW = "Weld the model again as it is now."
_NO_GRAD = "Call the model under torch.no_grad()."

# How a call may differ from the recorded calls -> what the user can do about it.
_REMEDIES = {
    "gradient mode on": _NO_GRAD,
    "gradient mode off": "Call the model with gradients on.",
    "inference mode": "Call the model under torch.no_grad() instead of torch.inference_mode().",
    "an input that requires gradients": _NO_GRAD,
    "an input with another layout": "Give it a contiguous input.",
    "autocast": "Call the model outside of torch.autocast.",
    "another default dtype": _ANEW,
}
# Words for what `_modes_of` gives, in its order.
_OF_WEIGHTS = ("require gradients", "are contiguous", "are inference tensors")


class Modes:
    """The modes in which the block was read."""

    def __init__(self, decision: Decision) -> None:
        self._grad = decision.training
        self._default_dtype = torch.get_default_dtype()
        self._weights: list[tuple[bool, ...]] = []

    def remember(self, tensors: Sequence[Tensor]) -> None:
        """Remembers the modes of the block's own tensors, when it is welded."""
        self._weights = [_modes_of(t) for t in tensors]

    def why_not(
        self, asked: frozenset[str], given: Sequence[Tensor], tensors: Sequence[Tensor]
    ) -> str | None:
        """How the call differs from recorded calls in the modes asked about; None if not."""
        if not asked:
            return None
        now = [_modes_of(t) for t in tensors]
        if now != self._weights:
            return _difference(self._weights, now)
        grad = torch.is_grad_enabled()
        inference = torch.is_inference_mode_enabled() or any(t.is_inference() for t in given)
        layout = any(not t.is_contiguous() or t.storage_offset() for t in given)
        found = {
            "gradient mode on": "grad" in asked and grad and not self._grad,
            "gradient mode off": "grad" in asked and self._grad and not grad,
            "inference mode": "inference" in asked and inference,
            "an input that requires gradients": "requires_grad" in asked
            and any(t.requires_grad for t in given),
            "an input with another layout": "layout" in asked and layout,
            "autocast": "autocast" in asked and torch._C._is_any_autocast_enabled(),
            "another default dtype": "default_dtype" in asked
            and torch.get_default_dtype() is not self._default_dtype,
        }
        return next((name for name, is_so in found.items() if is_so), None)


def _modes_of(tensor: Tensor) -> tuple[bool, ...]:
    return tensor.requires_grad, tensor.is_contiguous(), tensor.is_inference()


def _difference(before: Sequence[tuple[bool, ...]], now: Sequence[tuple[bool, ...]]) -> str:
    """The difference of the first weight whose modes changed, in words."""
    for was, one in zip(before, now, strict=True):
        for name, a, b in zip(_OF_WEIGHTS, was, one, strict=True):
            if a != b:
                return f"weights that {name} now" if b else f"weights that no longer {name}"
    raise AssertionError("the modes are the same")


def remedy_of(condition: str) -> str | None:
    """A remedy for a condition that `why_not` gave."""
    return _ANEW if condition.startswith("weights that ") else _REMEDIES.get(condition)
