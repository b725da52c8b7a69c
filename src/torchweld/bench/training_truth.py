"""What a block's output and gradients should be, in fp64, and whether those of a side are so.

In: a source, a step, the shape of x. Out: an `OutputCheck` for what a side found: the output, then
the gradients of x and of every weight and bias. Under autocast the reference has what autocast
rounds to, and everything is judged in that type.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchweld.bench.bench_results import (
    NOT_FINITE,
    OutputCheck,
    error_ratio,
    largest_of,
    told,
)
from torchweld.bench.eager_block import BlockSource
from torchweld.bench.training_step import TrainingStep
from torchweld.numerics.numerical_rule import composed, judge
from torchweld.numerics.sum_scales import scales_of


@dataclass(frozen=True, kw_only=True)
class TrainingTruth:
    """References in fp64 and scales of their sums, by name; `dtype` is what is judged."""

    dtype: torch.dtype
    references: dict[str, Tensor]
    scales: tuple[Tensor, ...]

    @classmethod
    def of(cls, source: BlockSource, step: TrainingStep, *lead: int) -> TrainingTruth:
        dtype = getattr(torch, step.autocast) if step.autocast else source.torch_dtype
        x, gradient = source.inputs(*lead).to(dtype), source.gradient(*lead).to(dtype)
        tensors = [tensor.detach().to(dtype) for tensor in source.tensors]
        wide = [tensor.double().requires_grad_() for tensor in (x, *tensors)]
        with torch.enable_grad():
            y = composed(wide[0], wide[1:], source.forms)
            found = torch.autograd.grad(y, wide, gradient.double())
        scales = scales_of(x, tensors, source.forms, grads=[gradient])
        names = ["output", "gradient of x", *(f"gradient {i}" for i in range(len(tensors)))]
        return cls(
            dtype=dtype,
            references=dict(zip(names, [y.detach(), *found], strict=True)),
            scales=(*scales.outputs, *scales.grads),
        )

    def check(self, found: Sequence[Tensor], eager: Sequence[Tensor]) -> OutputCheck:
        """All of one side, by the numerical rule."""
        if len(found) != len(self.references):
            unknown = told(float("inf"), NOT_FINITE)
            return OutputCheck(
                ok=False,
                error_ratio=unknown,
                row_ratio=unknown,
                rms_ratio=unknown,
                reason=f"there are {len(found)} tensors instead of {len(self.references)}",
            )
        rows, rms, errors, wrong = [], [], [], []
        columns = zip(self.references.items(), self.scales, found, eager, strict=True)
        for (name, reference), scale, own, other in columns:
            own, other = (t.to(self.dtype).view(reference.shape) for t in (own, other))
            judged = judge(own, other, reference, scale)
            rows.append(told(judged.row_ratio, NOT_FINITE))
            rms.append(told(judged.rms_ratio, NOT_FINITE))
            errors.append(error_ratio(_error(own, reference), _error(other, reference)))
            if not judged.ok:
                wrong.append(f"{name}: {judged.reason}")
        return OutputCheck(
            ok=not wrong,
            error_ratio=largest_of(errors),
            row_ratio=largest_of(rows),
            rms_ratio=largest_of(rms),
            reason="; ".join(wrong) or None,
        )


def _error(found: Tensor, reference: Tensor) -> float:
    return float((found.double() - reference).abs().max().nan_to_num(nan=float("inf")))
