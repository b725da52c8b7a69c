"""Describes the tensors of a traced graph, whatever way the code moves their data.

`Features` describe a tensor computed from an argument: an expression whose leaves have labels. The
labels say for every element which row and which column of which source it is. Views, slices and
transposes are applied to the labels, so it is known where the data end up without a rule for every
way to move them. Labels are expanded views, so they take no memory. `normal_form` reduces
`Features` to an expression over whole sources or halves of them, the same for every row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from torchweld.welds.refusal_reasons import Refused, op_name

Part = Literal["all", "first", "second", "even", "odd"]


@dataclass(frozen=True, eq=False)
class Given:
    """An argument of forward, `[..., width]`."""

    name: str
    width: int
    dtype: torch.dtype

    @property
    def text(self) -> str:
        return f"${self.name}"


@dataclass(frozen=True, eq=False)
class Product:
    """A Linear, `x · Wᵀ + b`; `transposed` weights are `[in, out]`."""

    x: Normal
    weight: Parameter
    bias: Parameter | None
    width: int
    dtype: torch.dtype

    @property
    def transposed(self) -> bool:
        return self.weight.transposed

    @property
    def text(self) -> str:
        tensors = [self.weight.text, *([self.bias.text] if self.bias else [])]
        return f"linear({self.x.text}, {', '.join(tensors)})"


Source: TypeAlias = "Given | Product"


@dataclass(frozen=True)
class Parameter:
    """A parameter or buffer of the module; one of two dimensions may be transposed."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    transposed: bool = False

    @property
    def text(self) -> str:
        return self.name + (".T" if self.transposed else "")


@dataclass(frozen=True)
class Computed:
    """A tensor that is neither a parameter nor computed from an argument."""

    what: str  # "computed by aten.mul"


@dataclass(frozen=True, eq=False)
class Leaf:
    source: Source
    columns: Tensor  # for each element, the column of the source that it is


@dataclass(frozen=True, eq=False)
class Half:
    """A leaf in normal form: all columns of a source, or half of them."""

    source: Source
    part: Part

    @property
    def text(self) -> str:
        return self.source.text + ("" if self.part == "all" else f"[{self.part}]")


@dataclass(frozen=True, eq=False)
class Apply:
    """An elementwise op; arguments that are numbers or texts are kept as they are."""

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    where: str


@dataclass(frozen=True, eq=False)
class Dropped:
    """An active dropout: in training, with a probability above 0."""

    value: Expression
    probability: float


Expression: TypeAlias = "Leaf | Half | Apply | Dropped"
EXPRESSION = (Leaf, Half, Apply, Dropped)


@dataclass(frozen=True, eq=False)
class Features:
    """A tensor computed from an argument; `rows` has its shape, and the row of each element."""

    value: Expression
    rows: Tensor
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.rows.shape)


@dataclass(frozen=True, eq=False)
class ForeignValue:
    """A tensor that no chain has, with the first op that is the reason."""

    reason: str
    op: str
    where: str
    behind: bool  # whether it depends on a product
    place: str = ""  # "between the Linears", for the refusal

    def at(self, place: str) -> ForeignValue:
        return self if self.place else replace(self, place=place)

    def refusal(self) -> Refused:
        return Refused(f"{self.reason} {self.place}".rstrip(), self.op, self.where)


def _range(count: int) -> Tensor:
    return torch.arange(count, device="cpu")  # not the default device


def given(name: str, tensor: Tensor) -> Features:
    """The features of an argument that has at least one dimension."""
    shape = tuple(tensor.shape)
    width = shape[-1]
    count = tensor.numel() // width if width else 0
    rows = _range(count).view(*shape[:-1], 1).expand(shape)
    columns = _range(width).expand(shape)
    return Features(Leaf(Given(name, width, tensor.dtype), columns), rows, tensor.dtype)


def product_of(x: Features, product: Product) -> Features:
    shape = (*x.shape[:-1], product.width)
    columns = _range(product.width).expand(shape)
    return Features(Leaf(product, columns), x.rows[..., :1].expand(shape), product.dtype)


# ---- walking expressions ----


def mapped(value: Expression, leaf: Callable[[Any], Expression]) -> Expression:
    """The same expression with other leaves; a part that is used twice stays one object."""
    known: dict[int, Expression] = {}

    def walk(node: Any) -> Any:
        if isinstance(node, (list, tuple)):
            return type(node)(walk(item) for item in node)
        if not isinstance(node, EXPRESSION):
            return node
        if id(node) not in known:
            if isinstance(node, Apply):
                kwargs = {key: walk(item) for key, item in node.kwargs.items()}
                known[id(node)] = replace(node, args=walk(node.args), kwargs=kwargs)
            elif isinstance(node, Dropped):
                known[id(node)] = replace(node, value=walk(node.value))
            else:
                known[id(node)] = leaf(node)
        return known[id(node)]

    result: Expression = walk(value)
    return result


def nodes(value: Expression) -> Iterator[Expression]:
    """Every part of an expression once, operands before the ops that use them."""
    seen: set[int] = set()

    def walk(node: Any) -> Iterator[Expression]:
        if isinstance(node, (list, tuple)):
            for item in node:
                yield from walk(item)
        elif isinstance(node, EXPRESSION) and id(node) not in seen:
            seen.add(id(node))
            if isinstance(node, Apply):
                yield from walk([*node.args, *node.kwargs.values()])
            elif isinstance(node, Dropped):
                yield from walk(node.value)
            yield node

    yield from walk(value)


def sources(value: Expression) -> list[Source]:
    return [node.source for node in nodes(value) if isinstance(node, (Leaf, Half))]


def base_dtype(value: Expression) -> torch.dtype:
    """The dtype of the products in an expression, or of its arguments if it has no product."""
    found = sources(value)
    products = [source for source in found if isinstance(source, Product)]
    return (products or found)[0].dtype


def has_product(value: Expression) -> bool:
    return any(isinstance(source, Product) for source in sources(value))


# ---- normal form ----


@dataclass(frozen=True, eq=False)
class Normal:
    """An expression over `Half` leaves that computes one row, column by column."""

    value: Expression
    width: int
    text: str


def normal_form(features: Features, rows_in_order: bool = True) -> Normal:
    """The normal form; Refused if columns are not where a chain has them.

    rows_in_order: whether rows have to be in their places too
    """
    if not features.shape:
        raise Refused("a result without a last dimension")
    if not _constant(features.rows, along=[-1]):
        raise Refused("works along a dimension other than the last")
    if rows_in_order:
        found = features.rows[..., 0].reshape(-1)
        if not torch.equal(found, _range(len(found))):
            raise Refused("reorders or leaves out rows")
    halves: dict[tuple[str, Part], Half] = {}

    def leaf(node: Leaf) -> Half:
        half = Half(node.source, _part(node))
        return halves.setdefault((half.source.text, half.part), half)

    value = mapped(features.value, leaf)
    return Normal(value, features.shape[-1], write(value))


def _part(leaf: Leaf) -> Part:
    columns, width = leaf.columns, leaf.source.width
    if not _constant(columns, along=range(columns.dim() - 1)):
        raise Refused("works along a dimension other than the last")
    one = columns[(0,) * (columns.dim() - 1)] if columns.numel() else columns.new_empty(0)
    every = _range(width)
    parts: dict[Part, Tensor] = {"all": every}
    if width % 2 == 0:
        half = width // 2
        parts |= {"first": every[:half], "second": every[half:]}
        parts |= {"even": every[::2], "odd": every[1::2]}
    for part, expected in parts.items():
        if torch.equal(one, expected):
            return part
    raise Refused(f"takes {len(one)} of {width} columns, neither all nor half of them")


def _constant(labels: Tensor, along: Any) -> bool:
    """Whether labels are constant along these dimensions."""
    for i in along:
        if labels.shape[i] > 1 and labels.stride(i) != 0:
            first = labels.narrow(i, 0, 1)
            if not bool((labels == first).all()):
                return False
    return True


def write(value: Any) -> str:
    """An expression as text, equal for equal computations; dropout is left out."""
    if isinstance(value, Half):
        return value.text
    if isinstance(value, Dropped):
        return write(value.value)
    if isinstance(value, Apply):
        parts = [write(item) for item in value.args]
        parts += [f"{key}={write(item)}" for key, item in sorted(value.kwargs.items())]
        return f"{op_name(value.op).removeprefix('aten.')}({', '.join(parts)})"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(write(item) for item in value)}]"
    return repr(value)
