"""Reads a result in normal form as a chain of layers.

In: a `Normal`. Out: a `Chain`, or `Refused` if it is not a chain. The result is read back to the
argument: an activation or gate over products, their common input, and so on. Multipliers that
commute with everything after them are gathered into one at the end.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from torchweld.core.blocks import Gate, LayerForm, format_spec
from torchweld.ops.backends.backend import Form
from torchweld.welds.recognising.activation_match import Match, match_gate, match_one
from torchweld.welds.refusal_reasons import Refused, in_words, op_name
from torchweld.welds.tracing.graph_values import (
    Apply,
    Dropped,
    Expression,
    Given,
    Half,
    Normal,
    Product,
    nodes,
)


@dataclass(frozen=True, kw_only=True)
class Chain:
    """What a module computes: `scale · chain(argument, tensors, forms)`."""

    argument: str  # the parameter of forward that is x
    forms: tuple[LayerForm, ...]  # one per layer
    tensors: tuple[str, ...]  # names of the parameters and buffers, in the op's order
    in_features: int
    out_features: int
    dtype: torch.dtype  # of the weights and of x
    dropout: tuple[float, ...]  # () or one per layer: the probability of dropout on its output
    scale: float  # the output is multiplied by this
    text: str  # the normal form
    # Whether all ops of the graph treat every row alike, whatever the sizes are.
    sizeless: bool = field(default=False, compare=False)

    @property
    def form(self) -> str:
        return format_spec(self.forms)

    def structure(self, own: Mapping[str, Tensor]) -> str:
        """A hash of the computation and of the tensors' shapes and types."""
        tensors = [(name, own[name]) for name in self.tensors]
        lines = [self.text, *(f"{name} {list(t.shape)} {t.dtype}" for name, t in tensors)]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]

    def hidden_sizes(self, own: Mapping[str, Tensor]) -> tuple[int, ...]:
        """The widths between the layers."""
        shape = Form.of("chain", self.forms, [own[name] for name in self.tensors])
        return tuple(N for _, N in shape.sizes[:-1])


class _At(NamedTuple):
    """The op and the line that a refusal names."""

    op: str = ""
    line: str = ""


@dataclass(frozen=True, kw_only=True)
class _Input:
    source: Given
    scale: float
    where: _At


@dataclass(frozen=True, kw_only=True)
class _Layer:
    form: LayerForm
    products: tuple[Product, ...]  # the gate's before the up's
    scale: float
    dropout: float
    where: _At  # of the multiplier


def as_chain(normal: Normal) -> Chain:
    layers: list[_Layer] = []
    step = _read(normal, first=True)
    while isinstance(step, _Layer):
        layers.append(step)
        step = _read(step.products[0].x, first=False)
    argument = step.source
    layers.reverse()
    products = [product for layer in layers for product in layer.products]
    dtypes = {t.dtype for p in products for t in (p.weight, p.bias) if t is not None}
    if len(dtypes | {argument.dtype}) > 1:
        kinds = ", ".join(sorted(str(d).removeprefix("torch.") for d in dtypes | {argument.dtype}))
        raise Refused(f"weights and input of several types: {kinds}")
    dropout = tuple(layer.dropout for layer in layers)
    return Chain(
        argument=argument.name,
        forms=tuple(layer.form for layer in layers),
        tensors=tuple(
            tensor.name for p in products for tensor in (p.weight, p.bias) if tensor is not None
        ),
        in_features=argument.width,
        out_features=normal.width,
        dtype=dtypes.pop(),
        dropout=dropout if any(dropout) else (),
        scale=_gathered(layers, step.scale, step.where),
        text=normal.text,
    )


# ---- one layer ----


def _read(normal: Normal, first: bool) -> _Layer | _Input:
    """The last layer of the rest of a chain, or its input; `first`: nothing was read before."""
    peeled = _peel(normal.value)
    value = peeled.value
    if any(isinstance(node, Dropped) for node in nodes(value)):
        raise Refused("a dropout inside an activation", "aten.dropout")
    halves = [node for node in nodes(value) if isinstance(node, Half)]
    if any(isinstance(half.source, Given) for half in halves):
        return _input(peeled, halves, first)
    match, gate, ordered = _activation(value, halves)
    products = list(
        {h.source.text: h.source for h in ordered if isinstance(h.source, Product)}.values()
    )
    form = LayerForm(
        activation=match.activation,
        parameters=match.parameters,
        bias=products[0].bias is not None,
        transposed=products[0].transposed,
        gate=gate,
    )
    return _Layer(
        form=form,
        products=tuple(products),
        scale=peeled.factor * match.scale,
        dropout=peeled.probability,
        where=peeled.where if match.scale == 1.0 else _at(value),
    )


class _Peeled(NamedTuple):
    value: Expression
    factor: float
    probability: float  # of dropout
    where: _At


def _peel(value: Expression) -> _Peeled:
    """Takes the outer dropout and multiplications by numbers off an expression."""
    factor, probability, where = 1.0, 0.0, _At()
    while True:
        if isinstance(value, Dropped):
            if probability:
                raise Refused("two dropouts in a row", "aten.dropout")
            probability, value = value.probability, value.value
            continue
        number, inner = _times_number(value)
        if inner is None:
            return _Peeled(value, factor, probability, where)
        if number != 1.0:
            where = _at(value)
        factor, value = factor * number, inner


def _times_number(value: Expression) -> tuple[float, Expression | None]:
    if isinstance(value, Apply) and not value.kwargs:
        name = op_name(value.op).removeprefix("aten.")
        match name, value.args:
            case "mul" | "multiply", ((int() | float()) as number, inner):
                return float(number), inner
            case "mul" | "multiply", (inner, (int() | float()) as number):
                return float(number), inner
            case "div" | "divide" | "true_divide", (inner, (int() | float()) as number) if number:
                return 1.0 / number, inner
            case "neg" | "negative", (inner,):
                return -1.0, inner
    return 1.0, None


def _input(peeled: _Peeled, halves: Sequence[Half], first: bool) -> _Input:
    value = peeled.value
    if isinstance(value, Half) and isinstance(value.source, Given):
        if first:
            raise Refused("has no product with weights of its own")
        if value.part != "all":
            raise Refused(f"a Linear over half of its argument {value.source.name}")
        if peeled.probability:
            raise Refused("a dropout before the first Linear", "aten.dropout")
        return _Input(source=value.source, scale=peeled.factor, where=peeled.where)
    at = _at(value)
    names = sorted({half.source.name for half in halves if isinstance(half.source, Given)})
    if all(isinstance(half.source, Given) for half in halves):
        if first:
            raise Refused("has no product with weights of its own")
        raise Refused(f"{in_words(at.op)} before the first Linear", *at)
    if at.op == "aten.add":
        raise Refused(f"adds its argument {' and '.join(names)} to the result", *at)
    raise Refused(f"{at.op} of its argument {' and '.join(names)} and a product", *at)


def _activation(value: Expression, halves: Sequence[Half]) -> tuple[Match, Gate, list[Half]]:
    """The activation over products, how a gate is stored, and the products, gate before up."""
    dtype = halves[0].source.dtype
    if len(halves) == 1 and halves[0].part == "all":
        match = match_one(value, halves[0], dtype)
        if match is not None:
            return match, "none", [halves[0]]
    elif len(halves) == 2:
        for gate, up in (halves, halves[::-1]):
            match = match_gate(value, gate, up, dtype)
            if match is not None:
                return match, _gate(gate, up, _at(value)), [gate, up]
    raise _no_activation(value, halves)


def _gate(gate: Half, up: Half, at: _At) -> Gate:
    """How gate and up are stored."""
    a, b = gate.source, up.source
    assert isinstance(a, Product)
    assert isinstance(b, Product)
    if a.text == b.text:
        match gate.part, up.part:
            case "first", "second":
                return "first"
            case "second", "first":
                return "second"
            case "even", "odd":
                return "interleaved"
        raise Refused("a gate in the odd columns, up in the even ones", *at)
    if (gate.part, up.part) != ("all", "all"):
        raise Refused("gate and up are halves of different products", *at)
    if a.x.text != b.x.text:
        raise Refused("gate and up have different inputs", *at)
    if (a.bias is None) != (b.bias is None):
        raise Refused("only one of gate and up has a bias", *at)
    if a.transposed != b.transposed:
        raise Refused("gate and up keep their weights in different orders", *at)
    return "separate"


# Arithmetic that any formula has. A refusal names another op if there is one.
_PLAIN_OPS = ("aten.mul", "aten.add", "aten.sub", "aten.rsub", "aten.div", "aten.neg")


def _at(value: Expression) -> _At:
    """The outermost op."""
    return _At(op_name(value.op), value.where) if isinstance(value, Apply) else _At()


def _no_activation(value: Expression, halves: Sequence[Half]) -> Refused:
    applied = [node for node in nodes(value) if isinstance(node, Apply)]
    ops = list(dict.fromkeys(op_name(node.op) for node in applied))
    if not applied:
        return Refused(f"uses only the {halves[0].part} half of a product's columns")
    telling = [node for node in applied if op_name(node.op) not in _PLAIN_OPS] or applied
    what = ", ".join(ops[:4]) + (", …" if len(ops) > 4 else "")
    inputs = "a product" if len(halves) == 1 else f"{len(halves)} products or parts of them"
    return Refused(
        f"{what} over {inputs} is neither an activation nor a gate that torchweld has",
        *_at(telling[0]),
    )


# ---- multipliers ----

# act(a · z) = a^degree · act(z) for a > 0.
_DEGREE = {"identity": 1, "relu": 1, "leaky_relu": 1, "relu2": 2}


def _gathered(layers: Sequence[_Layer], scale: float, at: _At) -> float:
    """Gathers all multipliers into one multiplier of the result."""
    for layer in layers:
        form = layer.form
        if scale != 1.0:
            degree = _DEGREE.get(form.activation)
            if form.bias:
                raise Refused(f"a multiplier of {scale:g} before a bias", *at)
            if degree is None or (scale < 0.0 and form.activation != "identity"):
                raise Refused(f"a multiplier of {scale:g} inside {form.activation}", *at)
            scale = scale ** (degree + (form.gate != "none"))
        if layer.scale != 1.0:
            scale, at = scale * layer.scale, layer.where
    return scale
