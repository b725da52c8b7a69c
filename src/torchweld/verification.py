"""The numerical rule: whether a candidate is as good as eager, judged by a reference in fp64.

In: a candidate's tensor, eager's in the same dtype, the reference in fp64, and the scale of every
element's sum. Out: a `Judgement`. With eps of the output type, slack = 4 · eps · scale, and rows
along the last dimension:

    every row     max|candidate − ref| ≤ 2 · max|eager − ref| + slack, scale being the row's largest
    the tensor    rms(candidate − ref) ≤ 1.5 · rms(eager − ref) + rms(slack of the rows)
    NaN and Inf   where eager has them, or, where eager differs from it, as the reference has them
    the guard     a comparison that an answer of zeros would pass says nothing

The scale of a sum is the sum of its absolute products, what it would be without cancellation. The
errors of the layers before come on top, added as independent errors are: by squares. `check_block`
runs candidate, eager and reference of a chain or group, and judges the outputs and every gradient.
M rows, K in, N out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from torchweld.activations import ACTIVATIONS
from torchweld.blocks import LayerForm, split_tensors
from torchweld.errors import BlockError
from torchweld.kernels import reference as reference_kernel

ROW_FACTOR = 2.0
RMS_FACTOR = 1.5
SLACK_EPS = 4.0

Candidate = Callable[[Tensor, Sequence[Tensor]], Tensor | Sequence[Tensor]]


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """`within`: the bounds hold. `meaningful`: zeros would have broken them. Ratios are to what is
    allowed, so 1 is the bound; `reason` says what is wrong, or is None."""

    within: bool
    meaningful: bool
    row_ratio: float
    rms_ratio: float
    reason: str | None

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
    slack = SLACK_EPS * info.eps * scale.amax(-1).clamp(min=info.tiny)

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
    )


def _refused(reason: str) -> Judgement:
    inf = float("inf")
    return Judgement(within=False, meaningful=True, row_ratio=inf, rms_ratio=inf, reason=reason)


def _rows(t: Tensor) -> Tensor:
    return t.detach().double().reshape(-1, t.shape[-1] if t.dim() else 1)


def _kind(t: Tensor) -> Tensor:
    """0 finite, 1 Inf, -1 -Inf, 2 NaN."""
    return torch.where(t.isnan(), 2.0, t.isposinf().double() - t.isneginf().double())


def _rms(t: Tensor) -> Tensor:
    largest = _largest(t)
    return largest * (t / largest).square().mean().sqrt()


def _largest(t: Tensor) -> Tensor:
    """To divide by before squaring: the square of 1e200 overflows."""
    if t.numel() == 0:
        return torch.ones_like(t.sum())
    return t.abs().nan_to_num(posinf=0.0).amax().clamp(min=torch.finfo(t.dtype).tiny)


# ---- the scale of a block's sums ----


class Sized(NamedTuple):
    """A value in fp64 with two measures, both in units of the type's eps.

    `scale` is what the rule allows for: the sum without cancellation. `error` is what to expect of
    an intermediate result: sums of 16-bit numbers are accumulated in fp32, then rounded once.
    """

    value: Tensor
    scale: Tensor
    error: Tensor


def _exact(t: Tensor) -> Sized:
    zeros = torch.zeros_like(t)
    return Sized(t, zeros, zeros)


def _sum_of_products(a: Sized, b: Sized, eps: float, more: Tensor | None = None) -> Sized:
    """`a @ b`, plus a vector."""
    value, own = a.value @ b.value, a.value.abs() @ b.value.abs()
    if more is not None:
        value, own = value + more, own + more.abs()
    inherited = _root_of_squares(a.error, b.value) + _root_of_squares(a.value, b.error)
    accumulated = own * (min(eps, torch.finfo(torch.float32).eps) / eps)
    return Sized(value, own + inherited, torch.maximum(accumulated, value.abs()) + inherited)


def _root_of_squares(a: Tensor, b: Tensor) -> Tensor:
    """Independent errors a, summed with the weights b."""
    by_a, by_b = _largest(a), _largest(b)
    return ((a / by_a).square() @ (b / by_b).square()).sqrt() * by_a * by_b


def _plus(a: Sized, b: Sized) -> Sized:
    return Sized(*(one + other for one, other in zip(a, b, strict=True)))


def _times(a: Sized, b: Sized) -> Sized:
    scale = a.value.abs() * b.scale + a.scale * b.value.abs()
    error = a.value.abs() * b.error + a.error * b.value.abs()
    return Sized(a.value * b.value, scale, error)


def _through(function: Callable[[Tensor], Tensor], z: Sized, eps: float, floor: Tensor) -> Sized:
    """A function of z: how far it goes when z goes as far as it may be off, so that kinks count."""
    value = function(z.value)

    def measure(size: Tensor) -> Tensor:
        spread = (function(z.value + eps * size) - function(z.value - eps * size)).abs() / (2 * eps)
        # Where z is Inf, and so its scale, the value is a limit, and exact.
        spread = spread.nan_to_num(nan=0.0, posinf=0.0)
        return torch.maximum(spread, torch.maximum(value.abs(), floor))

    return Sized(value, measure(z.scale), measure(z.error))


def _activated(form: LayerForm, z: Sized, eps: float) -> Sized:
    def function(z: Tensor) -> Tensor:
        return ACTIVATIONS[form.activation].apply(z, *form.parameters)

    # Formulas such as z · (1 + erf) lose the last digits of z even where they are flat.
    return _through(function, z, eps, floor=z.value.abs())


def _slope(form: LayerForm, z: Sized, eps: float) -> Sized:
    def function(z: Tensor) -> Tensor:
        with torch.enable_grad():
            z = z.detach().requires_grad_()
            y = ACTIVATIONS[form.activation].apply(z, *form.parameters)
            (slope,) = torch.autograd.grad(y.sum(), z)
        return slope

    return _through(function, z._replace(scale=z.error), eps, floor=torch.zeros_like(z.value))


class _Layer(NamedTuple):
    """One layer of the reference and what its backward pass needs. `gate` is None without one."""

    form: LayerForm
    weights: list[Tensor]  # [outputs, K], one or two
    x: Sized
    gate: Sized | None  # before the activation
    up: Sized
    active: Sized  # after the activation
    y: Sized


def _halves(form: LayerForm, products: list[Sized]) -> tuple[Sized | None, Sized]:
    """Gate and up of a layer's products, as `kernels.reference` takes them apart."""
    if form.gate == "none":
        return None, products[0]
    if form.gate == "separate":
        return products[0], products[1]
    if form.gate == "interleaved":
        first, second = (Sized(*(t[:, i::2] for t in products[0])) for i in (0, 1))
    else:
        first, second = (Sized(*(t.chunk(2, 1)[i] for t in products[0])) for i in (0, 1))
    return (second, first) if form.gate == "second" else (first, second)


def _whole(form: LayerForm, gate: Sized | None, up: Sized) -> list[Sized]:
    """The inverse of `_halves`."""
    if gate is None:
        return [up]
    if form.gate == "separate":
        return [gate, up]
    pairs = zip(up, gate, strict=True) if form.gate == "second" else zip(gate, up, strict=True)
    if form.gate == "interleaved":
        return [Sized(*(torch.stack(pair, -1).flatten(-2) for pair in pairs))]
    return [Sized(*(torch.cat(pair, -1) for pair in pairs))]


def _forward(form: LayerForm, x: Sized, tensors: Sequence[Tensor], eps: float) -> _Layer:
    step = 2 if form.bias else 1
    weights = [w.mT if form.transposed else w for w in tensors[::step]]
    biases = tensors[1::2] if form.bias else [None] * form.weights
    gate, up = _halves(
        form,
        [_sum_of_products(x, _exact(w.mT), eps, b) for w, b in zip(weights, biases, strict=True)],
    )
    active = _activated(form, up if gate is None else gate, eps)
    y = active if gate is None else _times(active, up)
    return _Layer(form, weights, x, gate, up, active, y)


def _backward(layer: _Layer, g: Sized, eps: float) -> tuple[Sized, list[Tensor]]:
    """The gradient of the layer's input, and the scales of those of its tensors, in their order."""
    form = layer.form
    if layer.gate is None:
        parts = _whole(form, None, _times(g, _slope(form, layer.up, eps)))
    else:
        slope = _slope(form, layer.gate, eps)
        parts = _whole(form, _times(_times(g, layer.up), slope), _times(g, layer.active))
    grads_x: list[Sized] = []
    scales: list[Tensor] = []
    for part, weight in zip(parts, layer.weights, strict=True):
        turned = Sized(*(t.mT for t in part))
        scale = _sum_of_products(turned, layer.x, eps).scale
        scales.append(scale.mT if form.transposed else scale)
        if form.bias:
            ones = torch.ones_like(part.value[:, :1])
            scales.append(_sum_of_products(turned, _exact(ones), eps).scale.squeeze(1))
        grads_x.append(_sum_of_products(part, _exact(weight), eps))
    return functools.reduce(_plus, grads_x), scales


class Scales(NamedTuple):
    """Elementwise: of each output and, if gradients were asked for, of x's and each tensor's."""

    outputs: list[Tensor]
    grads: list[Tensor]


@torch.no_grad()
def scales_of(
    x: Tensor,
    tensors: Sequence[Tensor],
    forms: Sequence[LayerForm],
    *,
    group: bool = False,
    grads: Sequence[Tensor] | None = None,
) -> Scales:
    """`grads` are those of the outputs; without them only the outputs' scales are computed."""
    parts = split_tensors(forms, [t.detach().double() for t in tensors])
    start, eps = _exact(_rows(x)), torch.finfo(x.dtype).eps
    layers: list[_Layer] = []
    for form, own in parts:
        layers.append(_forward(form, start if group or not layers else layers[-1].y, own, eps))
    last = layers if group else layers[-1:]
    outputs = [s.reshape(*x.shape[:-1], s.shape[-1]) for s in (layer.y.scale for layer in last)]
    if grads is None:
        return Scales(outputs, [])
    of_x, of_tensors = torch.zeros_like(start.value), []
    if group:
        for layer, grad in zip(layers, grads, strict=True):
            grad_x, own_scales = _backward(layer, _exact(_rows(grad)), eps)
            of_x = of_x + grad_x.scale
            of_tensors += own_scales
    else:
        g = _exact(_rows(grads[0]))
        for layer in reversed(layers):
            g, own_scales = _backward(layer, g, eps)
            of_tensors = own_scales + of_tensors
        of_x = g.scale
    return Scales(outputs, [of_x.reshape(x.shape), *of_tensors])


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
    keys say what was judged: "output" ("output 0", … of a group), "grad x", "grad 0", …
    """

    def eager(x: Tensor, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        if group:
            return reference_kernel.group(x, tensors, forms)
        return [reference_kernel.chain(x, tensors, forms)]

    def run(function: Candidate, dtype: torch.dtype) -> list[Tensor]:
        inputs = [t.detach().to(dtype).requires_grad_(grads is not None) for t in (x, *tensors)]
        with torch.set_grad_enabled(grads is not None):
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
    scales = scales_of(x, tensors, forms, group=group, grads=grads)
    if grads is not None:
        names += ["grad x", *(f"grad {i}" for i in range(len(tensors)))]
    tried = run(candidate, x.dtype), run(eager, x.dtype), run(eager, torch.float64)
    columns = zip(names, *tried, [*scales.outputs, *scales.grads], strict=True)
    return {name: judge(*row) for name, *row in columns}
