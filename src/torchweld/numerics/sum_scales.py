"""The scale of every sum of a block, which the numerical rule measures rounding errors in.

In: x, the tensors and forms of a chain or group. Out: `Scales`. The scale of a sum is the sum of
its absolute products, what it would be without cancellation. What rounding in the layers before
does to it comes on top: a few trials put such errors into the reference and see. M rows, K in, N
out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from torchweld.core.blocks import LayerForm
from torchweld.numerics.dropped_values import by_masks
from torchweld.ops.backends import reference_backend as reference_kernel


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
    rows = None if grads is None else [by_rows(grad) for grad in grads]
    inputs = [by_rows(x), *(t.detach().double() for t in tensors)]
    kept = [mask.reshape(-1, mask.shape[-1]) for mask in masks]

    def run(by: _Measuring | _Rounding, backward: bool) -> list[Tensor]:
        primitives = reference_kernel.Primitives(by.linear, by.activate, by_masks(kept))
        own = [t.detach().requires_grad_(backward) for t in inputs]
        with torch.set_grad_enabled(backward):
            ys = reference_outputs(own[0], own[1:], forms, group, primitives)
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


def reference_outputs(
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


def by_rows(t: Tensor) -> Tensor:
    return t.detach().double().reshape(-1, t.shape[-1] if t.dim() else 1)
