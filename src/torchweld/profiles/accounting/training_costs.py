"""Models of torchweld's ops for training, from the shapes of their arguments.

A recording has neither the spec nor which gradients were needed. What was saved follows from the
shapes; which gradients were needed, from the memory that the op made. M rows, K in, N out.
"""

from __future__ import annotations

from collections.abc import Sequence

from torchweld.profiles.accounting.op_calls import (
    OpCall,
    Work,
    dense_bytes,
    is_float,
    item_bytes,
    rows_of,
)
from torchweld.profiles.accounting.product_costs import chain_width, group_width
from torchweld.profiles.profile import Tensor


def chain_saving(call: OpCall) -> Work:
    """chain_saving(x, params, masks, ...): the products of chain; what is saved is written too."""
    return _forward(call, group=False)


def group_saving(call: OpCall) -> Work:
    return _forward(call, group=True)


def _forward(call: OpCall, group: bool) -> Work:
    if not call.inputs or not call.inputs[0].shape:
        return call.unknown()
    x, *given = call.inputs
    weights = [tensor for tensor in given if is_float(tensor) and len(tensor.shape) == 2]
    if not weights:
        return call.unknown()
    width = (group_width if group else chain_width)(x.shape[-1], weights)
    return call.work(
        2 * rows_of(x) * _elements(weights), rows_of(x) * max(width, 0) * item_bytes(x)
    )


def chain_backward(call: OpCall) -> Work:
    """chain_backward(gradient, x, params, saved, masks, ...).

    The gradient goes through every layer but the first, and through that one if x needs one. If
    nothing was saved, all products but the last are computed again.
    """
    if len(call.inputs) < 3 or any(not tensor.shape for tensor in call.inputs[:2]):
        return call.unknown()
    gradient, x, *given = call.inputs
    values = [tensor for tensor in given if is_float(tensor)]  # masks are bytes
    count = _parameters_of_chain(gradient, x, values)
    weights = [tensor for tensor in values[:count] if len(tensor.shape) == 2]
    if not weights:
        return call.unknown()
    first = _reading(x.shape[-1], weights)
    again = 0 if count < len(values) else _elements(weights[:-1])
    through = _elements(weights[first:])
    flops = 2 * rows_of(x) * (through + again)
    return _with_needed(call, x, weights, weights[:first], flops)


def group_backward(call: OpCall) -> Work:
    """group_backward(gradients, x, params, saved, ...): every weight meets x and its gradient."""
    if not call.inputs or not call.inputs[0].shape:
        return call.unknown()
    lead = call.inputs[0].shape[:-1]
    alike = 0  # the gradients and x, which have the same rows
    while alike < len(call.inputs) and call.inputs[alike].shape[:-1] == lead:
        alike += 1
    if alike < 2:
        return call.unknown()
    x = call.inputs[alike - 1]
    values = [
        tensor
        for tensor in call.inputs[alike:]
        if len(tensor.shape) == 2 and (len(lead) != 1 or tensor.shape[:-1] != lead)
    ]
    weights = [tensor for tensor in values if x.shape[-1] in tensor.shape]
    if not weights:
        return call.unknown()
    return _with_needed(call, x, weights, weights, 0)


def _with_needed(
    call: OpCall, x: Tensor, weights: Sequence[Tensor], readers: Sequence[Tensor], flops: int
) -> Work:
    """Adds the products for the gradients that were made: of weights, and of x by its readers.

    If the recording shows no memory that the op made, all of them were.
    """
    made = [size for _, size in (*call.written, *call.inside)]
    told = bool(made)

    def was_made(tensor: Tensor) -> bool:
        """Each result stands for one tensor of its size."""
        if not told:
            return True
        size = dense_bytes(tensor)
        if size not in made:
            return False
        made.remove(size)
        return True

    wanted = [weight for weight in weights if was_made(weight)]
    products = _elements(wanted) + (_elements(readers) if was_made(x) else 0)
    flops += 2 * rows_of(x) * products
    return call.work(flops, dense_bytes(x) + sum(map(dense_bytes, weights)))


def _parameters_of_chain(gradient: Tensor, x: Tensor, given: Sequence[Tensor]) -> int:
    """How many of the tensors are parameters; what was saved comes after them.

    Saved values have the rows of x. With two dimensions, weights may look the same: then as many
    as possible are taken to be saved, as long as the other weights lead from x to the gradient.
    """
    lead, count = x.shape[:-1], len(given)
    if len(lead) > 1:
        return sum(tensor.shape[:-1] != lead for tensor in given)
    while count and len(given[count - 1].shape) == len(x.shape):
        if given[count - 1].shape[:-1] != lead:
            break
        count -= 1
    for taken in range(count, len(given)):
        weights = [tensor for tensor in given[:taken] if len(tensor.shape) == 2]
        if weights and chain_width(x.shape[-1], weights) == gradient.shape[-1]:
            return taken
    return len(given)


def _reading(width: int, weights: Sequence[Tensor]) -> int:
    """How many of the weights read x itself: two if gate and up are apart."""
    apart = len(weights) > 1 and weights[0].shape == weights[1].shape
    square = weights[0].shape[0] == weights[0].shape[1]
    return 2 if apart and not square and width in weights[0].shape else 1


def _elements(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel for tensor in tensors)
