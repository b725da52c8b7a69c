"""Models of ops that move memory and compute next to nothing: copies, fills, gathers, scatters.

Every model takes an `OpCall` and gives its `Work`.
"""

from __future__ import annotations

import math

from torchweld.profiles.accounting.op_calls import (
    OpCall,
    Work,
    accesses,
    broadcast,
    dense_bytes,
    is_float,
    item_bytes,
)
from torchweld.profiles.profile import Tensor


def copy_into(call: OpCall) -> Work:
    """copy_(target, source)."""
    if len(call.inputs) < 2:
        return copy(call)
    target, source = call.inputs[:2]
    return Work(flops=0, reads=accesses([source]), writes=accesses([target]))


def copy(call: OpCall) -> Work:
    """Everything once, into a new place."""
    return call.work(0, sum(map(dense_bytes, call.inputs)))


def fill(call: OpCall) -> Work:
    """A fill: writes the target and reads nothing."""
    size = dense_bytes(call.inputs[0]) if call.inputs else 0
    return Work(flops=0, reads=(), writes=call.writes(size))


def random(call: OpCall) -> Work:
    """The generator's integer arithmetic is not counted."""
    if not call.inputs or call.in_place:
        return fill(call)
    return call.work(0, dense_bytes(call.inputs[0]))


# ---- gathering ----


def gather(call: OpCall) -> Work:
    """Reads from the table only what the result holds, and all indices."""
    if not call.inputs:
        return call.unknown()
    table, indices = call.inputs[0], call.inputs[1:]
    writes = call.writes(_gathered_bytes(call))
    size = min(table.nbytes, sum(size for _, size in writes))
    return Work(flops=0, reads=((table.storage, size), *accesses(indices)), writes=writes)


def _gathered_bytes(call: OpCall) -> int:
    """Bytes that embedding, gather or index returns, from the shapes of table and indices."""
    table = call.inputs[0]
    indices = [tensor for tensor in call.inputs[1:] if _is_index(tensor)]
    if not indices or not table.shape:
        return dense_bytes(table)
    count = broadcast(indices)
    if call.plain in ("gather", "take"):
        return count * item_bytes(table)
    # index takes one index per dimension, embedding and index_select a single one.
    dimensions = len(indices) if call.plain == "index" else 1
    row = math.prod(table.shape[dimensions:])
    return count * row * item_bytes(table)


def _is_index(tensor: Tensor) -> bool:
    return tensor.dtype in ("int64", "int32", "bool", "uint8")


def scatter(call: OpCall) -> Work:
    """Writes into the target as many elements as the values hold."""
    if len(call.inputs) < 2:
        return call.unknown()
    target, rest = call.inputs[0], call.inputs[1:]
    values = [tensor for tensor in rest if tensor.shape and not _is_index(tensor)]
    count = broadcast(values or rest)
    if not call.in_place:  # copies the target as well
        return call.work(count, dense_bytes(target))
    touched = (target.storage, min(count * item_bytes(target), target.nbytes))
    return Work(
        flops=count if is_float(target) else 0,
        reads=(touched, *accesses(rest)),
        writes=(touched,),
    )


def embedding_bag(call: OpCall) -> Work:
    """_embedding_bag(table, indices, ...): a row for each index is read, and added to its bag."""
    if len(call.inputs) < 2 or not call.inputs[0].shape:
        return call.unknown()
    table, indices = call.inputs[:2]
    count = indices.numel * table.shape[-1]
    rows = (table.storage, count * item_bytes(table))
    return Work(flops=count, reads=(rows, *accesses(call.inputs[1:])), writes=call.writes(rows[1]))


def embedding_backward(call: OpCall) -> Work:
    """The same backwards, (gradient, indices, ...): adds a row for each index.

    The zeros they are added to are the work of an op inside.
    """
    if len(call.inputs) < 2 or not call.inputs[0].shape:
        return call.unknown()
    gradient, indices = call.inputs[:2]
    count = indices.numel * gradient.shape[-1]
    touched = (call.prepared(), count * item_bytes(gradient))
    return Work(flops=count, reads=(*call.reads, touched), writes=(touched,))
