"""What `tw.find` gives: blocks that can be welded, and what was refused and why. Plain data.

A `Block` belongs to one module of the model: calling that module on its recorded input computes
exactly `chain(x, tensors, form)`. The module is named by its path and the tensors by theirs, so a
block can be saved, and applied to another instance of the same model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload


@dataclass(frozen=True, kw_only=True)
class Call:
    """One way the module was called; x is `[..., in_features]`."""

    shape: tuple[int, ...]  # of x
    dtype: str  # of x, "float32"
    contiguous: bool
    grad: bool  # whether gradients were recorded
    training: bool
    count: int  # times in the workload

    @property
    def rows(self) -> int:
        product = 1
        for n in self.shape[:-1]:
            product *= n
        return product


@dataclass(frozen=True, kw_only=True)
class Beside:
    """A tensor that calls gave beside x. Its values do not enter the result."""

    name: str
    dtype: str
    ones: str  # its dimensions: "1" for a size of one, "n" for any other
    shape: tuple[int, ...] = ()  # where sizes matter; (): any sizes with these ones


@dataclass(frozen=True, kw_only=True)
class Domain:
    """Calls in which a block is known to compute its chain; in all others the original runs."""

    ones: str  # the leading dimensions of x: "n1" for 8 × 1; "*" for any number of them
    shapes: tuple[tuple[int, ...], ...] = ()  # these alone; (): any sizes with these ones
    beside: tuple[Beside, ...] = ()
    nones: tuple[str, ...] = ()  # arguments given as None where their default is something else


@dataclass(frozen=True, kw_only=True)
class Block:
    """A module that computes a chain of one argument."""

    path: str  # of the module in the model; "" for the model itself
    kind: str  # its class
    form: str  # the op's spec: "gelu/b;identity/b"
    tensors: tuple[str, ...]  # names of its parameters or buffers, in the op's order: "up.weight"
    argument: str  # name of the parameter of forward that is x
    # Other arguments that every call gave: tensors that do not enter the result. Besides these,
    # calls gave nothing but None and forward's own defaults.
    ignores: tuple[str, ...] = ()
    in_features: int
    out_features: int
    dtype: str  # of the weights
    covers: tuple[str, ...]  # paths of the modules inside, relative, that will not be called
    # () or one for each layer: what its output is dropped with, in training. Known only if calls
    # in training were recorded.
    dropout: tuple[float, ...] = ()
    scale: float = 1.0  # the output is multiplied by this
    calls: tuple[Call, ...] = ()
    structure: str = ""  # hash of what was computed; the same for the same code and settings
    valid: tuple[Domain, ...] = ()  # (): not known, as in a block made by hand
    # What the module's code was seen to read: attributes, classes, functions, globals. Each is
    # compared at every call; see torchweld.welding.guard.
    depends_on: tuple[str, ...] = ()
    group: str = ""  # the input that blocks of one group share, "" for none: q, k and v

    @property
    def layers(self) -> int:
        return self.form.count(";") + 1


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """A module with Linears that is not welded as a whole, in one line."""

    path: str
    kind: str
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
