"""What `tw.find` gives: blocks that can be welded, and what was refused and why. Plain data.

A `Block` belongs to one module of the model: calling that module on its recorded input computes
exactly `chain(x, tensors, form)`. The module is named by its path and the tensors by theirs, so a
block can be saved, and applied to another instance of the same model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, overload

import torch

from torchweld.core.blocks import parse_spec
from torchweld.core.errors import TorchweldError
from torchweld.core.record_fields import Bounds, Count, Length, Positive, Word

DType = Literal["float32", "float64", "bfloat16", "float16"]

# Of x in a file: far more than a call has, and little enough to be traced. Nothing of the size is
# ever allocated.
MOST_ELEMENTS = 1 << 32
MOST_DIMENSIONS = 64
Ones = Annotated[str, Length(most=MOST_DIMENSIONS)]


@dataclass(frozen=True, kw_only=True)
class Call:
    """One way the module was called; x is `[..., in_features]`."""

    shape: Annotated[tuple[Count, ...], Length(1, MOST_DIMENSIONS)]  # of x
    dtype: DType  # of x
    contiguous: bool
    grad: bool  # whether gradients were recorded
    training: bool
    count: Count  # times in the workload

    @property
    def rows(self) -> int:
        return math.prod(self.shape[:-1])

    def problems(self) -> Iterator[str]:
        """What is wrong with one that was read from a file."""
        if math.prod(max(n, 1) for n in self.shape) > MOST_ELEMENTS:
            yield f"has a shape of more than {MOST_ELEMENTS:,} elements"


@dataclass(frozen=True, kw_only=True)
class Beside:
    """A tensor that calls gave beside x. Its values do not enter the result."""

    name: Word
    dtype: Word
    ones: Ones  # its dimensions: "1" for a size of one, "n" for any other
    # Where sizes matter; (): any sizes with these ones.
    shape: Annotated[tuple[Count, ...], Length(most=MOST_DIMENSIONS)] = ()

    def problems(self) -> Iterator[str]:
        """What is wrong with one that was read from a file."""
        if not isinstance(getattr(torch, self.dtype, None), torch.dtype):
            yield f"has dtype {self.dtype[:60]!r}, which torch does not know"
        if math.prod(max(n, 1) for n in self.shape) > MOST_ELEMENTS:
            yield f"has a shape of more than {MOST_ELEMENTS:,} elements"


@dataclass(frozen=True, kw_only=True)
class Domain:
    """Calls in which a block is known to compute its chain; in all others the original runs."""

    ones: Ones  # the leading dimensions of x: "n1" for 8 × 1; "*" for any number of them
    shapes: tuple[tuple[Count, ...], ...] = ()  # these alone; (): any sizes with these ones
    beside: tuple[Beside, ...] = ()
    nones: tuple[Word, ...] = ()  # arguments given as None where their default is something else


@dataclass(frozen=True, kw_only=True)
class Block:
    """A module that computes a chain of one argument."""

    path: Word  # of the module in the model; "" for the model itself
    kind: Word  # its class
    form: Word  # the op's spec: "gelu/b;identity/b"
    # Names of its parameters or buffers, in the op's order: "up.weight".
    tensors: Annotated[tuple[Word, ...], Length(1, 1000)]
    argument: Word  # name of the parameter of forward that is x
    # Other arguments that every call gave: tensors that do not enter the result. Besides these,
    # calls gave nothing but None and forward's own defaults.
    ignores: tuple[Word, ...] = ()
    in_features: Positive
    out_features: Positive
    dtype: DType  # of the weights
    covers: tuple[Word, ...]  # paths of the modules inside, relative, that will not be called
    # () or one for each layer: what its output is dropped with, in training. Known only if calls
    # in training were recorded.
    dropout: tuple[Annotated[float, Bounds(0, 1)], ...] = ()
    scale: float = 1.0  # the output is multiplied by this
    calls: Annotated[tuple[Call, ...], Length(most=10_000)] = ()
    structure: Word = ""  # hash of what was computed; the same for the same code and settings
    valid: Annotated[tuple[Domain, ...], Length(most=1000)] = ()  # (): not known: made by hand
    # What the module's code was seen to read: attributes, classes, functions, globals. Each is
    # compared at every call; see torchweld.welds.guarding.guard.
    depends_on: tuple[str, ...] = ()
    group: Word = ""  # the input that blocks of one group share, "" for none: q, k and v

    @property
    def layers(self) -> int:
        return self.form.count(";") + 1

    def problems(self) -> Iterator[str]:
        """What is wrong with one that was read from a file."""
        try:
            forms = parse_spec(self.form)
        except TorchweldError as error:
            yield f"has a form that cannot be read: {error}"
            return
        wanted = sum(form.tensors for form in forms)
        if len(self.tensors) != wanted:
            yield f"names {len(self.tensors)} tensors, and its form has {wanted}"
        for call in self.calls:
            if call.shape[-1] != self.in_features or call.dtype != self.dtype:
                yield (
                    f"was called with {call.dtype} of shape {list(call.shape)}, and takes "
                    f"{self.dtype} of {self.in_features} features"
                )


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """A module with Linears that is not welded as a whole, in one line."""

    path: Word
    kind: Word
    reason: str  # "a layer norm between the Linears"
    op: str = ""  # "aten.layer_norm"
    where: str = ""  # "modeling.py:212"


@dataclass(frozen=True, kw_only=True)
class Blocks(Sequence[Block]):
    """The blocks in the order of the model, as a sequence; `refused` is what was not taken."""

    blocks: tuple[Block, ...]
    refused: tuple[Refusal, ...] = ()
    notices: tuple[str, ...] = ()

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
