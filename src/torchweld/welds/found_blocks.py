"""Holds the result of `tw.find` as plain data: the blocks to weld, and the refusals with reasons.

A `Block` is about one module of the model: calling that module on x computes exactly
`scale · chain(x, tensors, form)`. Module and tensors are given by their names, so a block can be
saved, and applied to another instance of the same model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, overload

import torch

from torchweld.core.blocks import parse_spec
from torchweld.core.errors import TorchweldError
from torchweld.core.record_fields import Bounds, Count, Length, Letters, Positive, Word

DType = Literal["float32", "float64", "bfloat16", "float16"]

# Most elements of an x that a file may describe: far more than real calls have, yet few enough to
# trace. A tensor of this size is never allocated.
MOST_ELEMENTS = 1 << 32
MOST_DIMENSIONS = 64
Ones = Annotated[str, Letters("n1", most=MOST_DIMENSIONS, other="*")]


@dataclass(frozen=True, kw_only=True)
class Call:
    """One kind of call of the module; x is `[..., in_features]`."""

    shape: Annotated[tuple[Count, ...], Length(1, MOST_DIMENSIONS)]  # of x
    dtype: DType  # of x
    contiguous: bool  # whether x was
    grad: bool  # whether the output required gradients
    training: bool  # whether the module was in training mode
    count: Count  # how often the workload made such a call

    @property
    def rows(self) -> int:
        return math.prod(self.shape[:-1])

    def problems(self) -> Iterator[str]:
        """What is wrong with values that were read from a file."""
        if math.prod(max(n, 1) for n in self.shape) > MOST_ELEMENTS:
            yield f"has a shape of more than {MOST_ELEMENTS:,} elements"


@dataclass(frozen=True, kw_only=True)
class Beside:
    """A tensor argument other than x. Its values do not affect the result."""

    name: Word  # of the parameter of forward
    dtype: Word
    ones: Ones  # one character per dimension: "1" for a size of one, "n" for any other
    # The exact shape, if sizes matter; (): any sizes with these ones.
    shape: Annotated[tuple[Count, ...], Length(most=MOST_DIMENSIONS)] = ()

    def problems(self) -> Iterator[str]:
        """What is wrong with values that were read from a file."""
        if not isinstance(getattr(torch, self.dtype, None), torch.dtype):
            yield f"has dtype {self.dtype[:60]!r}, which torch does not know"
        if math.prod(max(n, 1) for n in self.shape) > MOST_ELEMENTS:
            yield f"has a shape of more than {MOST_ELEMENTS:,} elements"


@dataclass(frozen=True, kw_only=True)
class Domain:
    """Calls in which a block is known to compute its chain; all other calls run the original."""

    ones: Ones  # of the leading dimensions of x: "n1" for 8 × 1; "*": any number of dimensions
    # The leading shapes of x that are valid; (): any sizes with these ones.
    shapes: tuple[tuple[Count, ...], ...] = ()
    beside: tuple[Beside, ...] = ()  # the tensor arguments other than x
    nones: tuple[Word, ...] = ()  # arguments given as None whose default is not None


@dataclass(frozen=True, kw_only=True)
class Block:
    """A module that computes a chain of layers on one argument."""

    path: Word  # of the module in the model; "" for the model itself
    kind: Word  # its class
    form: Word  # the op's spec: "gelu/b;identity/b"
    # Names of its parameters or buffers, in the op's order: "up.weight".
    tensors: Annotated[tuple[Word, ...], Length(1, 1000)]
    argument: Word  # the parameter of forward that is x
    # The other tensor arguments of the recorded calls; they do not affect the result. All remaining
    # arguments were absent, None, or forward's defaults.
    ignores: tuple[Word, ...] = ()
    in_features: Positive
    out_features: Positive
    # The widths between the layers; (): not known, since the block was made by hand or is of an
    # earlier version.
    hidden: Annotated[tuple[Positive, ...], Length(most=1000)] = ()
    dtype: DType  # of the weights
    covers: tuple[Word, ...]  # relative paths of the modules inside, which a weld does not call
    # () or one per layer: the probability with which its output is dropped in training. Known only
    # if calls in training mode were recorded.
    dropout: tuple[Annotated[float, Bounds(0, 1)], ...] = ()
    scale: float = 1.0  # the output is multiplied by this
    calls: Annotated[tuple[Call, ...], Length(most=10_000)] = ()
    structure: Word = ""  # hash of the computation; equal for equal code and settings
    # The calls for which the block is proved; (): not known, since the block was made by hand.
    valid: Annotated[tuple[Domain, ...], Length(most=1000)] = ()
    # What the module's code reads: attributes, classes, functions, globals. A guard compares each
    # at every call; see torchweld.welds.guarding.guard.
    depends_on: tuple[str, ...] = ()
    group: Word = ""  # equal for blocks that share an input (q, k and v); "": no group

    @property
    def layers(self) -> int:
        return self.form.count(";") + 1

    def problems(self) -> Iterator[str]:
        """What is wrong with values that were read from a file."""
        try:
            forms = parse_spec(self.form)
        except TorchweldError as error:
            yield f"has a form that cannot be read: {error}"
            return
        if any(form.dropout for form in forms):
            yield "has dropout in its form; `dropout` has the probabilities"
        if self.dropout and len(self.dropout) != len(forms):
            yield f"has {len(self.dropout)} probabilities of dropout for {len(forms)} layers"
        if self.hidden and len(self.hidden) != len(forms) - 1:
            yield f"has {len(self.hidden)} hidden sizes for {len(forms)} layers"
        wanted = sum(form.tensors for form in forms)
        if len(self.tensors) != wanted:
            yield f"names {len(self.tensors)} tensors, but its form has {wanted}"
        for call in self.calls:
            if call.shape[-1] != self.in_features or call.dtype != self.dtype:
                yield (
                    f"was called with {call.dtype} of shape {list(call.shape)}, but takes "
                    f"{self.dtype} of {self.in_features} features"
                )


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """A module with Linears that cannot be welded as a whole, and the reason in one line."""

    path: Word  # of the module in the model
    kind: Word  # its class
    reason: str  # "a layer norm between the Linears"
    op: str = ""  # the op that no chain has: "aten.layer_norm"; "" if no op is the reason
    where: str = ""  # the line in the model's code: "modeling.py:212"; "" if unknown


@dataclass(frozen=True, kw_only=True)
class Blocks(Sequence[Block]):
    """The blocks of a model as a sequence, in the order of the model, and the refusals."""

    blocks: tuple[Block, ...]
    refused: tuple[Refusal, ...] = ()
    notices: tuple[str, ...] = ()  # remarks for the user, such as modules that were not called

    def __len__(self) -> int:
        return len(self.blocks)

    @overload
    def __getitem__(self, index: int) -> Block: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Block]: ...
    def __getitem__(self, index: int | slice) -> Block | Sequence[Block]:
        return self.blocks[index]

    def __iter__(self) -> Iterator[Block]:
        return iter(self.blocks)
