"""Whether a model can be timed and counted: when it is called again, it must do the same.

A model that changes its own input or keeps something from call to call does different work in every
round, so that measuring it says nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from torchweld.core.errors import TorchweldError
from torchweld.core.model_inputs import Workload
from torchweld.core.model_state import put_back
from torchweld.numerics.model_results import results

# Sums that threads add up in another order differ in the last places, not by this share.
TOLERATED = 1e-3
REMEDY = (
    "rounds would not do the same work; give a callable that makes fresh inputs, "
    "lambda m: m(x.clone()), or leave out what is kept from call to call"
)


def check_repeatable(model: nn.Module, workloads: Sequence[Workload], training: bool) -> None:
    """Runs each workload twice, from the same seed; raises unless inputs and outputs agree."""
    for workload in workloads:
        given = workload.tensors()
        before = [tensor.detach().clone() for tensor in given]
        with put_back(model, training):
            first = results(model, workload, training)
            if any(not _same(old, new) for old, new in zip(before, given, strict=True)):
                raise TorchweldError(
                    f"{type(model).__name__} changes its input {workload.name!r}: {REMEDY}"
                )
            second = results(model, workload, training)
        odd = [name for name in first if name not in second or not _same(first[name], second[name])]
        if odd:
            raise TorchweldError(
                f"{type(model).__name__} gives another {odd[0]} when it is called again on "
                f"{workload.name!r}: {REMEDY}"
            )


def _same(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.is_floating_point() or a.numel() == 0:
        return torch.equal(a, b)
    wide_a, wide_b = a.double(), b.detach().double()
    scale = float(wide_a[wide_a.isfinite()].abs().max()) if wide_a.isfinite().any() else 0.0
    return torch.allclose(wide_a, wide_b, rtol=0.0, atol=TOLERATED * scale, equal_nan=True)
