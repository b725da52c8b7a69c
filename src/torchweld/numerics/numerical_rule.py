"""The numerical rule: whether a candidate is as good as eager, judged by a reference in fp64.

In: a candidate's tensor, eager's in the same dtype, the reference in fp64, and the scale of every
element's sum. Out: a `Judgement`. With eps of the output type, slack = 4 · eps · scale, and rows
along the last dimension:

    every row     max|candidate − ref| ≤ 2 · max|eager − ref| + slack, scale being the row's largest
    the tensor    rms(candidate − ref) ≤ 1.5 · rms(eager − ref) + rms(slack of the rows)
    NaN and Inf   where eager has them, or, where eager differs from it, as the reference has them
    the guard     a comparison that an answer of zeros would pass says nothing
    fp64          no reference is wider, and eager's error is not known: four times the slack

`sum_scales` has the scale of a sum. `check_block` runs candidate, eager and reference of a chain or
group, and judges the outputs and every gradient. M rows, K in, N out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchweld.core.blocks import LayerForm
from torchweld.core.errors import BlockError
from torchweld.numerics.dropped_values import by_masks, drawing_from, drawn_masks, seeded_state
from torchweld.numerics.sum_scales import by_rows, reference_outputs, scales_of
from torchweld.ops.backends import reference_backend as reference_kernel

ROW_FACTOR = 2.0
RMS_FACTOR = 1.5
SLACK_EPS = 4.0

Candidate = Callable[[Tensor, Sequence[Tensor]], Tensor | Sequence[Tensor]]


def composed(x: Tensor, tensors: Sequence[Tensor], forms: Sequence[LayerForm]) -> Tensor:
    """A chain made of torch's own ops, in the precision of what it is given."""
    return reference_kernel.chain(x, tensors, forms)


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """`within`: the bounds hold. `meaningful`: zeros would have broken them. Ratios are to what is
    allowed, so 1 is the bound; `reason` says what is wrong, or is None. `error` and `eager_error`
    are the largest distances from the reference, of the candidate and of eager."""

    within: bool
    meaningful: bool
    row_ratio: float
    rms_ratio: float
    reason: str | None
    error: float = 0.0
    eager_error: float = 0.0

    @property
    def ok(self) -> bool:
        return self.within and self.meaningful


# ---- the rule ----


def judge(candidate: Tensor, eager: Tensor, reference: Tensor, scale: Tensor) -> Judgement:
    """All of one shape `[..., N]`; candidate and eager of one dtype, the others fp64."""
    if candidate.dtype != eager.dtype or candidate.shape != eager.shape:
        return _refused(
            f"the candidate is {candidate.dtype} {list(candidate.shape)}, eager is {eager.dtype} "
            f"{list(eager.shape)}"
        )
    if candidate.numel() == 0:
        return Judgement(within=True, meaningful=False, row_ratio=0.0, rms_ratio=0.0, reason=None)
    info = torch.finfo(candidate.dtype)
    got, old, ref, scale = (by_rows(t) for t in (candidate, eager, reference, scale))

    # Eager is not always right about Inf: in fp32, oneDNN's gelu(Inf) is NaN.
    misplaced = (_kind(got) != _kind(old)) & (_kind(got) != _kind(ref))
    misplaced &= ~ref.isfinite() | got.isnan()  # else it is judged as a number
    if misplaced.any():
        m, n = (int(i) for i in misplaced.nonzero()[0])
        return _refused(
            f"{int(misplaced.sum())} of {got.numel()} elements are NaN or Inf where eager's are "
            f"not, or the reverse; the first in row {m}, column {n}: {float(got[m, n])}, "
            f"eager {float(old[m, n])}"
        )

    alike = ~got.isfinite() & (_kind(got) == _kind(old)) | ~ref.isfinite()
    # Beyond the largest finite number there is only Inf: both count as that number. Below the
    # smallest normal one the spacing does not shrink any more.
    ref = ref.clamp(-info.max, info.max)
    error = (got.clamp(-info.max, info.max) - ref).abs().masked_fill(alike, 0.0)
    eager_error = (old - ref).abs().masked_fill(alike | ~old.isfinite(), 0.0)
    scale = scale.nan_to_num(nan=0.0, posinf=info.max).clamp(max=info.max)
    factor = SLACK_EPS * (4.0 if candidate.dtype == torch.float64 else 1.0)
    slack = factor * info.eps * scale.amax(-1).clamp(min=info.tiny)

    row_limit = ROW_FACTOR * eager_error.amax(-1) + slack
    rms_limit = float(RMS_FACTOR * _rms(eager_error) + _rms(slack))
    row_ratios = error.amax(-1) / row_limit
    worst = int(row_ratios.argmax())
    row_ratio, rms_ratio = float(row_ratios[worst]), float(_rms(error)) / rms_limit
    reason = None
    if row_ratio > 1.0:
        reason = (
            f"row {worst} is off by {float(error[worst].max()):.3g}, {row_ratio:.3g} times the "
            f"{float(row_limit[worst]):.3g} allowed (eager is off by "
            f"{float(eager_error[worst].max()):.3g})"
        )
    elif rms_ratio > 1.0:
        reason = f"the rms error is {rms_ratio:.3g} times the {rms_limit:.3g} allowed"
    size = ref.masked_fill(alike, 0.0).abs()
    meaningful = bool((size.amax(-1) > row_limit).any()) or float(_rms(size)) > rms_limit
    return Judgement(
        within=reason is None,
        meaningful=meaningful,
        row_ratio=row_ratio,
        rms_ratio=rms_ratio,
        reason=reason or (None if meaningful else "zeros would pass too: the values are too small"),
        error=float(error.max()),
        eager_error=float(eager_error.max()),
    )


def _refused(reason: str) -> Judgement:
    inf = float("inf")
    return Judgement(
        within=False,
        meaningful=True,
        row_ratio=inf,
        rms_ratio=inf,
        reason=reason,
        error=inf,
        eager_error=float("nan"),
    )


def _kind(t: Tensor) -> Tensor:
    """0 finite, 1 Inf, -1 -Inf, 2 NaN."""
    return torch.where(t.isnan(), 2.0, t.isposinf().double() - t.isneginf().double())


def _rms(t: Tensor) -> Tensor:
    largest = _largest(t)
    return largest * (t / largest).square().mean().sqrt()


def _largest(t: Tensor) -> Tensor:
    """What to divide by before squaring: the square of 1e200 overflows."""
    if t.numel() == 0:
        return torch.ones_like(t.sum())
    return t.abs().nan_to_num(posinf=0.0).amax().clamp(min=torch.finfo(t.dtype).tiny)


# ---- a whole block ----


def check_block(
    candidate: Candidate,
    x: Tensor,
    tensors: Sequence[Tensor],
    forms: Sequence[LayerForm],
    *,
    group: bool = False,
    grads: Sequence[Tensor] | None = None,
) -> dict[str, Judgement]:
    """Candidate and eager on the same tensors, against the reference in fp64.

    Given `grads`, one for each output, the gradients of x and of every tensor are judged too. The
    keys say what was judged: "output" ("output 0", … of a group), "grad x", "grad 0", … Where forms
    have dropout, the candidate draws random numbers as `F.dropout` does.
    """
    state = seeded_state(x.device)
    masks = drawn_masks(x, tensors, forms, state)

    def eager(x: Tensor, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        by = reference_kernel.Primitives(drop=by_masks(masks))
        return reference_outputs(x, tensors, forms, group, by)

    def run(function: Candidate, dtype: torch.dtype) -> list[Tensor]:
        inputs = [t.detach().to(dtype).requires_grad_(grads is not None) for t in (x, *tensors)]
        drawing = drawing_from(state if masks else None, x.device)
        with torch.set_grad_enabled(grads is not None), drawing:
            ys = function(inputs[0], inputs[1:])
        outputs = [ys] if isinstance(ys, Tensor) else list(ys)
        if grads is None:
            return outputs
        return outputs + list(
            torch.autograd.grad(outputs, inputs, [grad.to(dtype) for grad in grads])
        )

    names = [f"output {i}" for i in range(len(forms))] if group else ["output"]
    if grads is not None and len(grads) != len(names):
        raise BlockError(f"{len(grads)} gradients for {len(names)} outputs; give one for each")
    scales = scales_of(x, tensors, forms, group=group, grads=grads, masks=masks)
    if grads is not None:
        names += ["grad x", *(f"grad {i}" for i in range(len(tensors)))]
    tried = run(candidate, x.dtype), run(eager, x.dtype), run(eager, torch.float64)
    columns = zip(names, *tried, [*scales.outputs, *scales.grads], strict=True)
    return {name: judge(*row) for name, *row in columns}
