"""Models of pointwise ops, reductions, normalisations, losses and optimizer steps.

Every model takes an `OpCall` and gives its `Work`. Operations per element were counted from the
formulas. An exponential, logarithm or error function is a range reduction and a polynomial of
degree five or more: about ten operations. Division and square root count as one, as usual, though
a CPU takes longer for them.
"""

from __future__ import annotations

from torchweld.profiles.accounting.op_calls import (
    OpCall,
    Work,
    accesses,
    broadcast,
    dense_bytes,
    item_bytes,
    names,
)
from torchweld.profiles.profile import Tensor

_EXPENSIVE = 10

_POINTWISE_FLOPS = {
    **dict.fromkeys(
        names("""
            exp exp2 expm1 log log2 log10 log1p sin cos tan tanh sinh cosh asin acos atan atan2
            asinh acosh atanh erf erfc erfinv sigmoid gelu silu mish softplus elu celu selu
            log_sigmoid log_sigmoid_forward logaddexp logaddexp2 lgamma digamma logit xlogy sinc
            gelu_backward silu_backward mish_backward softplus_backward log_sigmoid_backward
        """),
        _EXPENSIVE,
    ),
    **dict.fromkeys(
        names("""
            addcmul addcdiv lerp sigmoid_backward tanh_backward elu_backward hardswish
            hardsigmoid hardswish_backward hardsigmoid_backward smooth_l1_loss_backward
            mse_loss_backward glu_backward
        """),
        3,
    ),
    **dict.fromkeys(names("where masked_fill tril triu isnan isinf isfinite"), 0),
    "glu": _EXPENSIVE // 2,  # one exponential for two elements of the input
}
_BOOLEAN = frozenset(
    names("""
        eq ne lt le gt ge isnan isinf isfinite isposinf isneginf logical_and logical_or
        logical_not logical_xor signbit isin isclose
    """)
)


def pointwise(call: OpCall) -> Work:
    if not call.inputs or call.in_complex:
        return call.unknown()
    count = broadcast(call.inputs)
    each = _POINTWISE_FLOPS.get(call.plain, 1)
    if call.plain == "pow" and sum(tensor.numel > 1 for tensor in call.inputs) > 1:
        each = 2 * _EXPENSIVE  # a logarithm and an exponential; a number as exponent is a product
    # A tensor without dimensions does not decide the type of the result.
    deciding = [tensor for tensor in call.inputs if tensor.shape] or call.inputs
    item = 1 if call.plain in _BOOLEAN else max(map(item_bytes, deciding))
    results = count // 2 if call.plain == "glu" else count
    return call.work(each * count, results * item)


def reduction(call: OpCall) -> Work:
    """One operation per element; results that the recording does not show count as small."""
    if not call.inputs or call.in_complex:
        return call.unknown()
    return call.work(max(tensor.numel for tensor in call.inputs), 0)


def sorting(call: OpCall) -> Work:
    """How many comparisons it takes depends on the data."""
    return call.unknown()


# ---- normalisations ----

_NORMALISATION_FLOPS = {
    # the largest, the difference, the exponential, the sum, the quotient
    **dict.fromkeys(
        ("_softmax", "_log_softmax", "_safe_softmax", "_masked_softmax"), 4 + _EXPENSIVE
    ),
    # (gradient - Σ gradient·result)·result
    **dict.fromkeys(("_softmax_backward_data", "_masked_softmax_backward"), 4),
    # gradient - exp(result)·Σ gradient
    "_log_softmax_backward_data": 3 + _EXPENSIVE,
    # Σ x² and x·scale·weight; backward also Σ gradient·weight·x, and the weight's gradient
    "_fused_rms_norm": 4,
    "_fused_rms_norm_backward": 9,
}
_NORM = 8  # a sum, a difference, squared and summed (4); scaled (2); weight and bias (2)
_NORM_BACKWARD = 14  # two sums of products (4); the gradient of x (6), of weight and bias (4)


def normalisation(call: OpCall) -> Work:
    if not call.inputs or call.in_complex:
        return call.unknown()
    usual = _NORM_BACKWARD if "backward" in call.plain else _NORM
    each = _NORMALISATION_FLOPS.get(call.plain, usual)
    x = call.inputs[0]
    return call.work(each * x.numel, dense_bytes(x))


# ---- losses ----


def loss(call: OpCall) -> Work:
    """nll_loss_forward(scores, target, ...): one score for each target is read."""
    if len(call.inputs) < 2:
        return call.unknown()
    scores, target = call.inputs[:2]
    picked = (scores.storage, target.numel * item_bytes(scores))
    return Work(
        flops=target.numel,
        reads=(picked, *accesses(call.inputs[1:])),
        writes=call.writes(0),
    )


def loss_backward(call: OpCall) -> Work:
    """nll_loss_backward(gradient, scores, target, ...): one element for each target is written.

    The zeros around them are the work of an op inside; the scores are not read.
    """
    if len(call.inputs) < 3:
        return call.unknown()
    gradient, scores, target = call.inputs[:3]
    return Work(
        flops=target.numel,
        reads=accesses((gradient, target)),
        writes=((call.prepared(), target.numel * item_bytes(scores)),),
    )


# ---- optimizers ----

# Operations per element; how many lists of tensors it may take; how many of them hold counters.
_FUSED_OPTIMIZERS = {
    # averages of the gradient (3) and its square (4), decay (2), root, quotient, update (4)
    "_fused_adam": (14, (5, 6), 1),
    "_fused_adamw": (14, (5, 6), 1),
    "_fused_sgd": (4, (3, 2), 0),  # decay and momentum (2), update (2)
    "_fused_adagrad": (6, (4,), 1),
}
FUSED_OPTIMIZERS = tuple(_FUSED_OPTIMIZERS)
_THREE_LISTS = ("addcmul", "addcdiv")


def fused_optimizer(call: OpCall) -> Work:
    """Lists one after another: parameters, gradients, what is kept of them, counters.

    Gradients and counters are read; the others are read and written.
    """
    each, possible, counters = _FUSED_OPTIMIZERS[call.plain]
    for lists in possible:
        length, rest = divmod(len(call.inputs), lists)
        full = call.inputs[: length * (lists - counters)]
        if not rest and _repeats(full, length):
            return Work(
                flops=each * sum(tensor.numel for tensor in full[:length]),
                reads=call.reads,
                writes=accesses(full[:length] + full[2 * length :]),
            )
    return call.unknown()


def _repeats(tensors: list[Tensor], length: int) -> bool:
    """Whether these are several lists of `length` tensors of the same shapes."""
    shapes = [tensor.shape for tensor in tensors]
    return bool(length) and shapes == shapes[:length] * (len(shapes) // length)


def foreach(call: OpCall) -> Work:
    """One or more lists; the first, or a new one of its size, is written."""
    if not call.inputs:
        return call.unknown()
    operation = call.plain.removeprefix("_foreach_")
    lists = 3 if operation in _THREE_LISTS else 2
    length, rest = divmod(len(call.inputs), lists)
    if rest or not _repeats(call.inputs, length):
        lists, length = 1, len(call.inputs)
    first = call.inputs[:length]
    elements = sum(tensor.numel for tensor in first)
    if "norm" in operation:
        return Work(flops=2 * elements, reads=call.reads, writes=call.written)
    flops = elements * _POINTWISE_FLOPS.get(operation, 1)
    reads = call.reads
    if operation in ("zero", "copy"):
        flops, reads = 0, accesses(call.inputs[length:])
    writes = accesses(first) if call.in_place else call.writes(sum(map(dense_bytes, first)))
    return Work(flops=flops, reads=reads, writes=writes)
