"""Models of ops that multiply matrices: products, torchweld's ops, convolutions, attention.

Every model takes an `OpCall` and gives its `Work`. Arguments that do not fit give work of unknown
arithmetic. M rows, K in, N out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from torchweld.profiles.accounting.op_calls import (
    OpCall,
    Work,
    accesses,
    dense_bytes,
    item_bytes,
    rows_of,
)
from torchweld.profiles.profile import Tensor

Model = Callable[[OpCall], Work]


def product(first: int) -> Model:
    """Arguments `first` and `first + 1` are multiplied, and added to argument 0 if `first` is 1."""

    def model(call: OpCall) -> Work:
        factors = call.inputs[first : first + 2]
        if len(factors) < 2 or not all(tensor.shape for tensor in factors) or call.in_complex:
            return call.unknown()
        a, b = factors
        # Every element of a meets every column of b, whatever the ranks.
        columns = b.shape[-1] if len(b.shape) > 1 else 1
        return call.work(2 * a.numel * columns, rows_of(a) * columns * item_bytes(a))

    return model


def outer(first: int) -> Model:
    """a bᵀ of two vectors, added to argument 0 if `first` is 1."""

    def model(call: OpCall) -> Work:
        if len(call.inputs) < first + 2 or call.in_complex:
            return call.unknown()
        a, b = call.inputs[first : first + 2]
        count = a.numel * b.numel
        return call.work((1 + first) * count, count * item_bytes(a))

    return model


def sum_of_products(call: OpCall) -> Work:
    """addbmm(self, a, b): self + Σ aᵢ bᵢ."""
    if len(call.inputs) < 3 or len(call.inputs[2].shape) != 3 or call.in_complex:
        return call.unknown()
    target, a, b = call.inputs[:3]
    return call.work(2 * a.numel * b.shape[-1], dense_bytes(target))


def linear(weight: int) -> Model:
    """Argument 0 is x; every row of it meets a weight `[N, K]` once."""

    def model(call: OpCall) -> Work:
        if len(call.inputs) <= weight or len(call.inputs[weight].shape) != 2:
            return call.unknown()
        x, w = call.inputs[0], call.inputs[weight]
        return call.work(2 * rows_of(x) * w.numel, rows_of(x) * w.shape[0] * item_bytes(x))

    return model


def mkl_linear(call: OpCall) -> Work:
    """_mkl_linear(x, packed weight, weight, bias, rows); the weight itself is not read."""
    work = linear(2)(call)
    reads = accesses(tensor for i, tensor in enumerate(call.inputs) if i != 2)
    return Work(flops=work.flops, reads=reads, writes=work.writes)


def linear_backward_input(call: OpCall) -> Work:
    """mkldnn_linear_backward_input(size, gradient, weight)."""
    if len(call.inputs) < 2 or len(call.inputs[1].shape) != 2:
        return call.unknown()
    gradient, w = call.inputs[:2]
    return call.work(
        2 * rows_of(gradient) * w.numel, rows_of(gradient) * w.shape[1] * item_bytes(w)
    )


def linear_backward_weights(call: OpCall) -> Work:
    """mkldnn_linear_backward_weights(gradient, x, weight, ...); the weight is not read."""
    if len(call.inputs) < 3 or len(call.inputs[2].shape) != 2:
        return call.unknown()
    gradient, x, w = call.inputs[:3]
    return Work(
        flops=2 * rows_of(gradient) * w.numel,
        reads=accesses((gradient, x)),
        writes=call.writes(dense_bytes(w)),
    )


# ---- torchweld's own ops ----


def chain(call: OpCall) -> Work:
    """chain(x, params): each weight meets each row of x once, however it is gated or laid out."""
    return _welded(call, chain_width)


def group(call: OpCall) -> Work:
    """group(x, params): the same, every layer on x."""
    return _welded(call, group_width)


def _welded(call: OpCall, width_of: Callable[[int, Sequence[Tensor]], int]) -> Work:
    if not call.inputs or not call.inputs[0].shape:
        return call.unknown()
    x, *parameters = call.inputs
    weights = [tensor for tensor in parameters if len(tensor.shape) == 2]
    if not weights:
        return call.unknown()
    flops = 2 * rows_of(x) * sum(weight.numel for weight in weights)
    return call.work(flops, rows_of(x) * width_of(x.shape[-1], weights) * item_bytes(x))


def _outputs(weight: Tensor, width: int) -> int | None:
    """How many outputs a weight of `width` inputs has, laid out either way; None: it has others."""
    out, inner = weight.shape
    if inner == width:
        return out
    return inner if out == width else None


def chain_width(width: int, weights: Sequence[Tensor]) -> int:
    """Outputs of the last layer, found by following the widths from layer to layer."""
    taken = width
    for weight in weights:
        # The layer before was plain; or gated, so that half its width comes in; or this is an up
        # projection, which takes what the gate beside it took.
        for given in (width, width // 2, taken):
            out = _outputs(weight, given)
            if out is not None:
                taken, width = given, out
                break
    return width


def group_width(width: int, weights: Sequence[Tensor]) -> int:
    return sum(_outputs(weight, width) or 0 for weight in weights)


def packed(call: OpCall) -> Work:
    """chain_packed and group_packed(x, bytes), group_of_packed(x, bytes of each member): the
    weights in the kernels' own order.

    The bytes include biases and padding of panels, which count as weights: less than 1 % from 100
    inputs on, if the outputs fill whole panels.
    """
    if len(call.inputs) < 2 or not call.inputs[0].shape:
        return call.unknown()
    x, *weights = call.inputs
    nbytes = sum(one.nbytes for one in weights)
    return call.work(2 * rows_of(x) * (nbytes // item_bytes(x)), 0)


# ---- convolutions ----


def convolution(call: OpCall) -> Work:
    """Each element of the result is a dot product with one filter; its size has to be recorded."""
    if len(call.inputs) < 2 or len(call.inputs[1].shape) < 3 or call.in_complex:
        return call.unknown()
    x, weight = call.inputs[:2]
    if "transpose" in call.plain:
        meetings = x.numel  # each element of the input meets one filter instead
    else:
        meetings = sum(size for _, size in call.writes(0)[:1]) // item_bytes(x)
    if not meetings:
        return call.unknown()
    return call.work(2 * meetings * math.prod(weight.shape[1:]), 0)


def convolution_backward(gradient: int, x: int) -> Model:
    """Costs as much as the forward for x's gradient, and again for the weight's. Orders differ."""

    def model(call: OpCall) -> Work:
        if len(call.inputs) < 3 or len(call.inputs[2].shape) < 3:
            return call.unknown()
        weight = call.inputs[2]
        wanted = [dense_bytes(call.inputs[x]), dense_bytes(weight)]
        made = [size for _, size in (*call.written, *call.inside)]
        # The sizes of what was made tell which of the two gradients were asked for.
        products = sum(size in made for size in wanted) if made else 2
        each = 2 * call.inputs[gradient].numel * math.prod(weight.shape[1:])
        return call.work(products * each, sum(wanted))

    return model


# ---- attention ----


def attention(call: OpCall) -> Work:
    """q, k, v, ... are `[batch, heads, length, size]`. What a mask may spare is counted in full."""
    return _attention(call, first=0)


def attention_backward(call: OpCall) -> Work:
    """gradient, q, k, v, ...; the scores are computed again."""
    return _attention(call, first=1)


def _attention(call: OpCall, first: int) -> Work:
    given = call.inputs[first : first + 3]
    if len(given) < 3 or any(len(tensor.shape) != 4 for tensor in given):
        return call.unknown()
    q, k, v = given
    scores = math.prod(q.shape[:3]) * k.shape[2]
    if first == 0:
        # q kᵀ over q's size; the scores by v
        each, results = q.shape[3] + v.shape[3], dense_bytes(q)
    else:
        # q kᵀ again, q's and k's gradients over q's size; the gradients of the scores and of v
        each, results = 3 * q.shape[3] + 2 * v.shape[3], sum(map(dense_bytes, given))
    return call.work(2 * scores * each, results)
