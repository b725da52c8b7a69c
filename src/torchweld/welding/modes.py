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
        self._requires_grad: tuple[bool, ...] | None = None  # of the tensors, at the first call

    def why_not(self, asked: frozenset[str], x: Tensor, tensors: Sequence[Tensor]) -> str | None:
        """Which mode is another one, in two words; None if none that is asked about."""
        if not asked:
            return None
        requires = tuple(tensor.requires_grad for tensor in tensors)
        if self._requires_grad is None:
            self._requires_grad = requires
        other = {
            "grad": torch.is_grad_enabled() is not self._grad,
            "inference": torch.is_inference_mode_enabled() or x.is_inference(),
            "requires_grad": x.requires_grad or requires != self._requires_grad,
            "layout": not x.is_contiguous() or x.storage_offset() != 0,
            "autocast": torch._C._is_any_autocast_enabled(),
            "default_dtype": torch.get_default_dtype() is not self._default_dtype,
            "compiling": False,
        }
        return next((f"another {mode} mode" for mode in sorted(asked) if other[mode]), None)
