"""One call of one op, its arguments sorted into what is read and what is written.

`Work` is what a call has to do. The models of `product_costs.py`, `elementwise_costs.py` and
`move_costs.py` make it from an `OpCall`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torchweld.profiles.attributing.op_schemas import out_arguments
from torchweld.profiles.profile import ITEM_BYTES, Op, Tensor

# Which memory (a storage; None if the recording does not tell), and how many bytes of it.
Access = tuple[int | None, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """`flops` is None where no model knows the op; a multiply-add counts two."""

    flops: int | None
    reads: tuple[Access, ...]
    writes: tuple[Access, ...]

    @property
    def read_bytes(self) -> int:
        return sum(size for _, size in self.reads)

    @property
    def written_bytes(self) -> int:
        return sum(size for _, size in self.writes)


class OpCall:
    """`inputs` are the tensors among the arguments, `outs` those that were given as results.

    `written` is what the op made itself, `inside` what ops inside it made.
    """

    __slots__ = ("base", "inputs", "inside", "outs", "plain", "written")

    def __init__(self, op: Op, inside: Sequence[tuple[int, int]] = ()) -> None:
        self.base = op.name.partition("::")[2] or op.name
        self.plain = self.base.rstrip("_") or self.base  # the same for the in-place variant
        outs = out_arguments(op.name, len(op.inputs)) if op.inputs else 0
        first_out = len(op.inputs) - outs
        self.inputs = [tensor for tensor in op.inputs[:first_out] if tensor is not None]
        # An empty one is enlarged, and the new memory counts as made by the op.
        self.outs = [tensor for tensor in op.inputs[first_out:] if tensor and tensor.numel]
        self.written = op.written
        self.inside = inside

    @property
    def in_place(self) -> bool:
        return self.base.endswith("_") and not self.base.endswith("__")

    @property
    def in_floats(self) -> bool:
        return any(map(is_float, self.inputs)) or not self.inputs

    @property
    def in_complex(self) -> bool:
        return any(tensor.dtype.startswith("complex") for tensor in self.inputs)

    @property
    def reads(self) -> tuple[Access, ...]:
        """All inputs, once each."""
        return accesses(self.inputs)

    def writes(self, otherwise_bytes: int) -> tuple[Access, ...]:
        """What the op writes: `otherwise_bytes` of new memory, if the recording shows nothing."""
        if self.outs:
            return accesses(self.outs)
        if self.in_place and self.inputs:
            return accesses(self.inputs[:1])
        return self.written or ((None, otherwise_bytes),)

    def prepared(self) -> int | None:
        """The memory of a result that an op inside prepared, such as zeros to add to."""
        made = (*self.written, *self.inside)
        return made[0][0] if made else None

    def work(self, flops: int | None, result_bytes: int) -> Work:
        """Every input read, the result written; arithmetic on integers is not counted."""
        if flops is not None and not self.in_floats:
            flops = 0
        return Work(flops=flops, reads=self.reads, writes=self.writes(result_bytes))

    def unknown(self) -> Work:
        """Reads what it is given and writes what it makes; what it computes is not known."""
        return self.work(None, 0)


def accesses(tensors: Iterable[Tensor]) -> tuple[Access, ...]:
    return tuple((tensor.storage, tensor.nbytes) for tensor in tensors)


def names(text: str) -> tuple[str, ...]:
    """A table of names, as text that can be read."""
    return tuple(text.split())


def is_float(tensor: Tensor) -> bool:
    return not tensor.dtype or tensor.dtype.startswith(("float", "bfloat", "complex"))


def item_bytes(tensor: Tensor) -> int:
    return ITEM_BYTES.get(tensor.dtype, 4)


def dense_bytes(tensor: Tensor) -> int:
    """Bytes of a new tensor of this shape and type."""
    return tensor.numel * item_bytes(tensor)


def rows_of(tensor: Tensor) -> int:
    """All dimensions but the last together."""
    return math.prod(tensor.shape[:-1])


def broadcast(tensors: Sequence[Tensor]) -> int:
    """Elements of the shape that all of them are broadcast to."""
    rank = max((len(tensor.shape) for tensor in tensors), default=0)
    sizes = [1] * rank
    for tensor in tensors:
        first = rank - len(tensor.shape)
        for i, n in enumerate(tensor.shape):
            if n != 1:
                sizes[first + i] = n
    return math.prod(sizes)
