"""The numerical rule: whether a candidate is as good as eager, judged by a reference in fp64.

In: a candidate's tensor, eager's in the same dtype, the reference in fp64, and the scale of every
element's sum. Out: a `Judgement`. With eps of the output type, slack = 4 · eps · scale, and rows
along the last dimension:

    every row     max|candidate − ref| ≤ 2 · max|eager − ref| + slack, scale being the row's largest
    the tensor    rms(candidate − ref) ≤ 1.5 · rms(eager − ref) + rms(slack of the rows)
    NaN and Inf   where eager has them, or, where eager differs from it, as the reference has them
    the guard     a comparison that an answer of zeros would pass says nothing
    fp64          no reference is wider, and eager's error is not known: four times the slack

The scale of a sum is the sum of its absolute products, what it would be without cancellation. What
rounding in the layers before does to it comes on top: a few trials put such errors into the
reference and see. `check_block` runs candidate, eager and reference of a chain or group, and judges
the outputs and every gradient. M rows, K in, N out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from torchweld.core.blocks import LayerForm
from torchweld.core.errors import BlockError
from torchweld.numerics.dropped_values import by_masks, drawing_from, drawn_masks, seeded_state
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
    got, old, ref, scale = (_rows(t) for t in (candidate, eager, reference, scale))

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


def _rows(t: Tensor) -> Tensor:
    return t.detach().double().reshape(-1, t.shape[-1] if t.dim() else 1)


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


# ---- the scale of a block's sums ----


class Scales(NamedTuple):
    """Elementwise: of each output and, if gradients were asked for, of x's and each tensor's."""

    outputs: list[Tensor]
    grads: list[Tensor]


def scales_of(
    x: Tensor,
    tensors: Sequence[Tensor],
    forms: Sequence[LayerForm],
    *,
    group: bool = False,
    grads: Sequence[Tensor] | None = None,
    masks: Sequence[Tensor] = (),
) -> Scales:
    """`grads` are those of the outputs; without them only the outputs' scales are computed.

    `masks`: what is kept of each layer with dropout.

    Deterministic. A row's error is the largest of its elements' and of all trials: the fewer
    elements, the more trials, each of which runs the reference once more.
    """
    eps = torch.finfo(x.dtype).eps
    rows = None if grads is None else [_rows(grad) for grad in grads]
    inputs = [_rows(x), *(t.detach().double() for t in tensors)]
    kept = [mask.reshape(-1, mask.shape[-1]) for mask in masks]

    def run(by: _Measuring | _Rounding, backward: bool) -> list[Tensor]:
        primitives = reference_kernel.Primitives(by.linear, by.activate, by_masks(kept))
        own = [t.detach().requires_grad_(backward) for t in inputs]
        with torch.set_grad_enabled(backward):
            ys = _reference(own[0], own[1:], forms, group, primitives)
        return [*ys, *torch.autograd.grad(ys, own, rows)] if backward else ys

    products = [(form, i) for form in forms for i in range(form.weights)]
    last = 0 if group else len(products) - forms[-1].weights
    measured = _Measuring()
    exact = run(measured, backward=rows is not None)
    count = len(forms) if group else 1
    pairs = max(2, 16 // min(size.shape[1] for size in measured.sums))

    off = [y.abs() * eps for y in exact[:count]]
    for trial in range(2 * pairs):
        rounding = _Rounding(measured, products, eps, last=last, trial=trial)
        off = _furthest(off, run(rounding, backward=False), exact)
    outputs = [t.reshape(*x.shape[:-1], t.shape[-1]) / eps for t in off]
    if rows is None:
        return Scales(outputs, [])

    of_grads = measured.scales_of_grads(
        products, readers=range(len(products) if group else forms[0].weights)
    )
    off = [torch.zeros_like(t) for t in of_grads]
    for trial in range(0, 2 * pairs, 2):
        rounding = _Rounding(measured, products, eps, last=len(products), trial=trial)
        off = _furthest(off, run(rounding, backward=True)[count:], exact[count:])
    scales = [own + inherited / eps for own, inherited in zip(of_grads, off, strict=True)]
    return Scales(outputs, [scales[0].reshape(x.shape), *scales[1:]])


def _reference(
    x: Tensor,
    tensors: Sequence[Tensor],
    forms: Sequence[LayerForm],
    group: bool,
    by: reference_kernel.Primitives = reference_kernel.PLAIN,
) -> list[Tensor]:
    if group:
        return reference_kernel.group(x, tensors, forms, by)
    return [reference_kernel.chain(x, tensors, forms, by)]


def _furthest(off: list[Tensor], tried: list[Tensor], exact: list[Tensor]) -> list[Tensor]:
    differences = [(a - b).abs().nan_to_num(0.0) for a, b in zip(tried, exact, strict=False)]
    return [torch.maximum(*pair) for pair in zip(off, differences, strict=True)]


def _when_known(t: Tensor, see: Callable[[Tensor], Tensor | None]) -> None:
    """Shows t's gradient to `see`, which may return another."""
    t.register_hook(see)  # type: ignore[no-untyped-call]


class _Measuring:
    """The reference's primitives, which note the sum of absolute products of every sum."""

    def __init__(self) -> None:
        self.sums: list[Tensor] = []
        self.grads: dict[int, tuple[Tensor, Tensor, Tensor]] = {}  # of x, weight and bias

    def linear(self, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        index, size, weights = len(self.sums), x.detach().abs(), w.detach().abs()
        self.sums.append(size @ weights.mT + (0.0 if b is None else b.detach().abs()))
        z = linear(x, w, b)

        def note(g: Tensor) -> None:
            g = g.abs()
            self.grads[index] = g @ weights, g.mT @ size, g.sum(0)

        if z.requires_grad:
            _when_known(z, note)
        return z

    activate = staticmethod(reference_kernel.activate)

    def scales_of_grads(
        self, products: Sequence[tuple[LayerForm, int]], readers: Iterable[int]
    ) -> list[Tensor]:
        """The scales of x's gradient, a sum over the products `readers`, and of each tensor's."""
        found = [functools.reduce(torch.add, (self.grads[i][0] for i in readers))]
        for index, (form, _) in enumerate(products):
            _, weight, bias = self.grads[index]
            found += [weight.mT if form.transposed else weight, *([bias] if form.bias else [])]
        return found


class _Rounding:
    """The reference's primitives with rounding errors put in, of random signs.

    A sum is off by eps times its scale in the last layer, as the rule has it; before, sums of
    16-bit numbers are accumulated in fp32 and rounded once. An activation is off by what its
    formula may lose: z · (1 + erf z) loses the last digits of z. So are gradients on the way back.
    """

    def __init__(
        self,
        measured: _Measuring,
        products: Sequence[tuple[LayerForm, int]],
        eps: float,
        *,
        last: int,
        trial: int,
    ) -> None:
        self.measured, self.products, self.last = measured, products, last
        self.eps, self.fine = eps, min(eps, torch.finfo(torch.float32).eps)
        self.trial, self.index = trial, 0
        self.random = torch.Generator("cpu").manual_seed(trial // 2)

    def linear(self, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        index, self.index = self.index, self.index + 1
        x = x.view_as(x)  # an edge of its own: another product may read x too
        z, size = linear(x, w, b), self.measured.sums[index]
        if x.requires_grad:
            size_x = self.measured.grads[index][0]
            _when_known(x, lambda g: g + self._noise(self.fine * size_x, self.eps * g))
        if index < self.last:
            error = torch.maximum(self.fine * size, self.eps * z.detach().abs())
        else:
            error = self.eps * size
        return z + self._signs(index, z.shape).to(z.device) * _finite(error)

    def _signs(self, index: int, shape: torch.Size) -> Tensor:
        """The signs of a sum's errors.

        In the last layer a pair of trials has both signs, so that inherited errors cannot hide the
        sum's own. Gate and up have the same sign in one pair of trials and opposite signs in the
        next, so that they cannot hide each other's.
        """
        form, place = self.products[index]
        halves = 1 if form.gate in ("none", "separate") else 2
        sign, drawn = (-1.0) ** self.trial, (shape[0], shape[1] // halves)
        signs = torch.full(drawn, sign, dtype=torch.float64, device="cpu")
        if index < self.last:
            layer = index - place  # gate and up of a layer draw the same
            random = torch.Generator("cpu").manual_seed(1000 * layer + self.trial // 2)
            signs = _random_signs(signs.shape, random)
        if halves == 2:
            signs = (
                signs.repeat_interleave(2, 1)
                if form.gate == "interleaved"
                else torch.cat([signs, signs], 1)
            )
        signs[:, _gate_columns(form, place, shape[1])] *= (-1) ** (self.trial // 2)
        return signs

    def activate(self, form: LayerForm, z: Tensor) -> Tensor:
        if form.activation == "identity":
            return z
        z = z.view_as(z)
        y = reference_kernel.activate(form, z)
        if z.requires_grad:
            seen: list[Tensor] = []
            _when_known(y, seen.append)
            _when_known(z, lambda g: g + self._noise(self.fine * seen[0], self.eps * g))
        return y + self._noise(self.fine * z, self.eps * y)

    def _noise(self, one: Tensor, other: Tensor) -> Tensor:
        """Errors of random sign, each as large as the larger of the two."""
        size = torch.maximum(one.detach().abs(), other.detach().abs())
        return _random_signs(size.shape, self.random).to(size.device) * _finite(size)


def _finite(error: Tensor) -> Tensor:
    """`error`, with 0 where a scale is Inf: there the value is a limit, and exact."""
    return error.nan_to_num(0.0, posinf=0.0)


def _random_signs(shape: torch.Size, random: torch.Generator) -> Tensor:
    """The same on every device: they are drawn on the CPU."""
    return (torch.rand(shape, generator=random, device="cpu") < 0.5).double() * 2 - 1


def _gate_columns(form: LayerForm, index: int, count: int) -> slice:
    """Which columns of a layer's `index`-th product are the gate."""
    match form.gate:
        case "none":
            return slice(0)
        case "separate":
            return slice(count if index == 0 else 0)
        case "first":
            return slice(count // 2)
        case "second":
            return slice(count // 2, count)
        case "interleaved":
            return slice(0, count, 2)


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
        return _reference(x, tensors, forms, group, by)

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
