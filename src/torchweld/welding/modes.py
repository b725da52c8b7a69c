"""Modes of a call that a block's code asks about: a call in other modes runs the original."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchweld.decisions import Decision


class Modes:
    """As they were when the block was read."""

    def __init__(self, decision: Decision) -> None:
        self._grad = decision.training
        self._default_dtype = torch.get_default_dtype()
        self._weights: list[tuple[bool, ...]] = []

    def remember(self, tensors: Sequence[Tensor]) -> None:
        """The block's own tensors, when it is welded."""
        self._weights = [(t.requires_grad, t.is_contiguous(), t.is_inference()) for t in tensors]

    def why_not(
        self, asked: frozenset[str], given: Sequence[Tensor], tensors: Sequence[Tensor]
    ) -> str | None:
        """Which mode is another one, in two words; None if none that is asked about."""
        if not asked:
            return None
        now = [(t.requires_grad, t.is_contiguous(), t.is_inference()) for t in tensors]
        other = {
            "grad": torch.is_grad_enabled() is not self._grad,
            "inference": torch.is_inference_mode_enabled() or any(t.is_inference() for t in given),
            "requires_grad": any(t.requires_grad for t in given),
            "layout": any(not t.is_contiguous() or t.storage_offset() for t in given),
            "autocast": torch._C._is_any_autocast_enabled(),
            "default_dtype": torch.get_default_dtype() is not self._default_dtype,
            "compiling": False,
        }
        if now != self._weights:
            return "another mode of the weights"
        return next((f"another {mode} mode" for mode in sorted(asked) if other[mode]), None)
