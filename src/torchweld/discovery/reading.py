"""A traced graph, read op by op into values; what comes out is the result in normal form.

Ops fall into few kinds: products with the module's own weights, movement of data, elementwise ops,
dropout, casts, and everything else, which no chain has. An op of the last kind counts only if the
result depends on it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch
from torch import fx

from torchweld.discovery.reasons import Refused, in_words, op_name, source_of
from torchweld.discovery.tracing import Traced
from torchweld.discovery.values import (
    Apply,
    Computed,
    Dropped,
    Features,
    Foreign,
    Given,
    Leaf,
    Normal,
    Parameter,
    Product,
    given,
    has_product,
    mapped,
    normal_form,
    product_of,
    sources,
)

Value: TypeAlias = Any  # Features, Foreign, Parameter, Computed, a number, a text, or a list

MOVES = frozenset(
    [
        "view",
        "reshape",
        "_unsafe_view",
        "_reshape_alias",
        "view_as",
        "reshape_as",
        "flatten",
        "unflatten",
        "unsqueeze",
        "squeeze",
        "transpose",
        "swapaxes",
        "swapdims",
        "permute",
        "movedim",
        "moveaxis",
        "t",
        "numpy_T",
        "mT",
        "expand",
        "expand_as",
        "chunk",
        "unsafe_chunk",
        "split",
        "split_with_sizes",
        "unsafe_split",
        "unsafe_split_with_sizes",
        "tensor_split",
        "unbind",
        "select",
        "slice",
        "narrow",
    ]
)
COPIES = frozenset(
    ["contiguous", "clone", "alias", "lift_fresh", "positive", "resolve_conj", "resolve_neg"]
)
CASTS = frozenset(["to", "_to_copy", "type_as"])
DROPOUTS = frozenset(["dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout"])
TRANSPOSES = frozenset(["t", "transpose", "numpy_T", "mT", "permute", "swapaxes", "swapdims"])
ELEMENTWISE = frozenset(
    [
        "abs",
        "add",
        "addcdiv",
        "addcmul",
        "celu",
        "clamp",
        "clamp_max",
        "clamp_min",
        "clip",
        "div",
        "divide",
        "elu",
        "erf",
        "erfc",
        "exp",
        "exp2",
        "expm1",
        "ge",
        "gelu",
        "gt",
        "hardshrink",
        "hardsigmoid",
        "hardswish",
        "hardtanh",
        "le",
        "leaky_relu",
        "lerp",
        "log",
        "log10",
        "log1p",
        "log2",
        "log_sigmoid",
        "logical_and",
        "logical_not",
        "logical_or",
        "lt",
        "masked_fill",
        "maximum",
        "minimum",
        "mish",
        "mul",
        "multiply",
        "ne",
        "eq",
        "neg",
        "negative",
        "pow",
        "reciprocal",
        "relu",
        "relu6",
        "rsqrt",
        "rsub",
        "selu",
        "sigmoid",
        "sign",
        "silu",
        "sin",
        "cos",
        "softplus",
        "softshrink",
        "special_erf",
        "special_expit",
        "sqrt",
        "square",
        "sub",
        "subtract",
        "tanh",
        "threshold",
        "true_divide",
        "where",
        "special_ndtr",
        "atan",
        "arctan",
        "softsign",
    ]
)


def read(traced: Traced) -> Normal:
    """The module's result in normal form; Refused if it has none."""
    reader = _Reader(traced)
    result = reader.run()
    if isinstance(result, Foreign):
        raise result.at("after the last Linear" if result.behind else "").refusal()
    if not isinstance(result, Features):
        raise Refused("its result does not come from its arguments")
    normal = normal_form(result)
    if result.dtype != _base_dtype(result):
        raise Refused(f"returns {_short(result.dtype)} where its weights are another type")
    return normal


class _Reader:
    def __init__(self, traced: Traced) -> None:
        self._graph, self._grad = traced.graph, traced.grad
        self._values: dict[fx.Node, Value] = {}
        self._waiting = [
            *(Parameter(name, tuple(tensor.shape), tensor.dtype) for name, tensor in traced.state),
            *traced.arguments,
        ]

    def run(self) -> Value:
        waiting = iter(self._waiting)
        for node in self._graph.nodes:
            match node.op:
                case "placeholder":
                    self._values[node] = _placeholder(node, next(waiting))
                case "output":
                    outputs = _flat(node.args[0])
                    if len(outputs) != 1 or not isinstance(outputs[0], fx.Node):
                        raise Refused("returns more than one tensor")
                    return self._values[outputs[0]]
                case "call_function":
                    self._values[node] = self._call(node)
                case _:
                    self._values[node] = Computed("neither a parameter nor a buffer")
        raise Refused("returns nothing")

    def _call(self, node: fx.Node) -> Value:
        args = fx.map_arg(node.args, lambda n: self._values[n])
        kwargs = fx.map_arg(node.kwargs, lambda n: self._values[n])
        if node.target is operator.getitem:
            holder = args[0]
            return holder if isinstance(holder, (Foreign, Computed)) else holder[args[1]]
        op, where = op_name(node.target), source_of(node.stack_trace)
        if not isinstance(node.target, torch._ops.OpOverload):
            if op == "_set_grad_enabled":
                if self._grad or args[0]:
                    raise Refused("switches gradients on or off inside", op, where)
                return None
            return _outside(op, where, [*args, *kwargs.values()])
        call = _Call(node, node.target, op, where, args, kwargs)
        if node.target._schema.is_mutable:
            return self._in_place(node, call)
        return call.value()

    def _in_place(self, node: fx.Node, call: _Call) -> Value:
        """`relu_(h)`: from here on, h is the result."""
        changed = call.args[0] if call.args else None
        if isinstance(changed, Parameter):
            raise Refused(f"changes its own {changed.name}", call.op, call.where)
        name = call.op.rpartition(".")[2]
        plain = getattr(torch.ops.aten, name.removesuffix("_"), None)
        overload = getattr(plain, call.target._overloadname, None)
        if not name.endswith("_") or overload is None:
            result = _outside(call.op, call.where, call.args)
        else:
            result = _Call(
                node, overload, call.op.removesuffix("_"), call.where, call.args, call.kwargs
            ).value()
        if isinstance(changed, Features) and isinstance(changed.value, Leaf):
            if not isinstance(changed.value.source, Product):
                raise Refused("changes its argument in place", call.op, call.where)
        target = node.args[0]
        if isinstance(target, fx.Node):
            self._values[target] = result
        return result


class _Call:
    """One op with its arguments as values."""

    def __init__(
        self, node: fx.Node, target: Any, op: str, where: str, args: Any, kwargs: Any
    ) -> None:
        self.node, self.target, self.op, self.where = node, target, op, where
        self.args, self.kwargs = tuple(args), dict(kwargs)
        self.name = op.rpartition(".")[2] if op.startswith("aten.") else op

    def value(self) -> Value:
        tensors = [v for v in _tensors([*self.args, *self.kwargs.values()])]
        products = {
            "linear": self._linear,
            "matmul": self._matmul,
            "mm": self._matmul,
            "addmm": self._addmm,
        }
        if self.name in products:
            return products[self.name]()
        if any(isinstance(value, Foreign) for value in tensors):
            return self._outside()
        if not any(isinstance(value, Features) for value in tensors):
            return self._of_parameters(tensors)
        if self.name == "glu":
            return self._glu()
        if self.name in COPIES:
            return self.args[0]
        if self.name in ("detach", "lift_fresh_copy"):
            return self._detach()
        if self.name in CASTS:
            return self._cast()
        if self.name in DROPOUTS:
            return self._dropout()
        if self.name in MOVES:
            return self._move()
        if self.name in ELEMENTWISE:
            return self._elementwise(tensors)
        return self._outside()

    def _outside(self, reason: str = "") -> Foreign:
        return _outside(self.op, self.where, [*self.args, *self.kwargs.values()], reason)

    # ---- products ----

    def _linear(self) -> Value:
        x, weight, *rest = self.args
        bias = rest[0] if rest else self.kwargs.get("bias")
        return self._product(x, weight, bias, flipped=False)

    def _matmul(self) -> Value:
        x, weight = self.args
        return self._product(x, weight, None, flipped=True)

    def _addmm(self) -> Value:
        bias, x, weight = self.args
        if any(self.kwargs.get(key, 1) != 1 for key in ("alpha", "beta")):
            return self._outside("a product with factors of its own")
        return self._product(x, weight, bias, flipped=True)

    def _product(self, x: Value, weight: Value, bias: Value, flipped: bool) -> Value:
        """`flipped`: the weight stands as `[in, out]` here."""
        if isinstance(x, Foreign):
            return x.at("between the Linears" if x.behind else "before the first Linear")
        for tensor in (weight, bias):
            if isinstance(tensor, Foreign):
                return tensor
            if isinstance(tensor, Computed):
                return self._outside(f"a weight that is {tensor.what}")
        if not isinstance(x, Features):
            return self._outside("a product that does not multiply an argument from the right")
        if isinstance(weight, Features):
            return self._outside("a product of two activations")
        if len(weight.shape) != 2:
            return self._outside(f"a weight of {len(weight.shape)} dimensions")
        weight = Parameter(
            weight.name, weight.shape, weight.dtype, transposed=weight.transposed != flipped
        )
        width = weight.shape[1] if weight.transposed else weight.shape[0]
        if bias is not None and (not isinstance(bias, Parameter) or bias.shape != (width,)):
            return self._outside("something else than a bias added to a product")
        try:
            normal = normal_form(x)
        except Refused as refused:
            return self._outside(f"a Linear whose input {refused.reason}")
        product = Product(normal, weight, bias, width, _dtype(self.node), self.where)
        return product_of(x, product)

    # ---- tensors of the module ----

    def _of_parameters(self, tensors: list[Value]) -> Value:
        own = self.args[0] if self.args and isinstance(self.args[0], Parameter) else None
        if own is not None and len(tensors) == 1:
            if self.name in COPIES or self.name == "detach":
                return own
            if self.name in CASTS and _dtype(self.node) == own.dtype:
                return own
            if self.name in TRANSPOSES and len(own.shape) == 2 and self._swaps_two():
                return Parameter(own.name, own.shape, own.dtype, not own.transposed)
            if self.name in MOVES and _shape(self.node) == own.shape and not own.transposed:
                return own
        made = next((value for value in tensors if isinstance(value, Computed)), None)
        return made or Computed(f"computed by {self.op}")

    def _swaps_two(self) -> bool:
        rest = self.args[1:]
        if self.name == "permute":
            return [int(i) % 2 for i in rest[0]] == [1, 0]
        return not rest or int(rest[0]) % 2 != int(rest[1]) % 2

    # ---- data in other places, types, chances ----

    def _move(self) -> Value:
        features = self.args[0]
        if not isinstance(features, Features):
            return self._outside()
        rest = [v.rows if isinstance(v, Features) else v for v in self.args[1:]]

        def move(labels: torch.Tensor) -> Any:
            if self.name in ("reshape", "_unsafe_view", "_reshape_alias"):
                return labels.view(rest[0])  # what has to be copied mixes rows with columns
            if self.name == "reshape_as":
                return labels.view(rest[0].shape)
            return self.target(labels, *rest, **self.kwargs)

        try:
            rows = move(features.rows)
            count = len(rows) if isinstance(rows, (list, tuple)) else 0
            pick: Iterator[Callable[[Any], Any]] = (
                (lambda moved, i=i: moved[i]) for i in range(count)
            )
            if not count:
                return _moved(features, move, rows)
            return [_moved(features, lambda t, p=p: p(move(t)), p(rows)) for p in pick]
        except RuntimeError:
            return self._outside("a reshape that mixes rows with columns")

    def _detach(self) -> Value:
        # With gradients it cuts them off; without, it is nothing.
        value = self.args[0]
        fake = self.node.meta.get("val")
        before = self.node.args[0]
        needed = isinstance(before, fx.Node) and getattr(
            before.meta.get("val"), "requires_grad", False
        )
        return self._outside("a detach") if needed and fake is not None else value

    def _cast(self) -> Value:
        value, to = self.args[0], _dtype(self.node)
        if not isinstance(value, Features):
            return self._outside()
        device = self.node.meta["val"].device
        before = self.node.args[0]
        if isinstance(before, fx.Node) and before.meta["val"].device != device:
            return self._outside("a move to another device")
        if to == value.dtype:
            return value
        base = _base_dtype(value)
        words = f"a cast from {_short(value.dtype)} to {_short(to)}"
        if not has_product(value.value):
            return self._outside(words)
        # Elementwise in a wider type and back again is what a chain does anyway.
        if not to.is_floating_point or to.itemsize < base.itemsize:
            return self._outside(words)
        if to.itemsize == base.itemsize and to != base:
            return self._outside(words)
        return Features(value.value, value.rows, to)

    def _dropout(self) -> Value:
        value, probability, training = self.args
        if not training or probability == 0.0:
            return value
        if self.name != "dropout":
            return self._outside("a dropout of another kind")
        if not isinstance(value, Features):
            return self._outside()
        return Features(Dropped(value.value, float(probability)), value.rows, value.dtype)

    # ---- elementwise ----

    def _elementwise(self, tensors: list[Value]) -> Value:
        features = [value for value in tensors if isinstance(value, Features)]
        others = [value for value in tensors if not isinstance(value, Features)]
        if others:
            if self.name == "add" and len(features) == 1 and len(self.args) == 2:
                return self._biased(features[0], others[0])
            return self._outside(self._with_own(others[0]))
        first = features[0]
        for other in features[1:]:
            if not _aligned(first.rows, other.rows):
                return self._outside(self._misfit(features))
        args = fx.node.map_aggregate(self.args, _expression)
        kwargs = fx.node.map_aggregate(self.kwargs, _expression)
        value = Apply(self.target, args, kwargs, self.where)
        return Features(value, first.rows, _dtype(self.node))

    def _misfit(self, features: list[Features]) -> str:
        found = [source for value in features for source in sources(value.value)]
        names = sorted({source.name for source in found if isinstance(source, Given)})
        if names and len(names) < len(found):
            return f"{self.op} with its argument {' and '.join(names)}"
        return f"{self.op} of tensors of different shapes"

    def _with_own(self, other: Value) -> str:
        what = f"its {other.name}" if isinstance(other, Parameter) else "a tensor made inside"
        return f"{self.op} with {what}"

    def _biased(self, features: Features, bias: Value) -> Value:
        """`x @ w + b`, where it is that."""
        leaf = features.value
        if not (isinstance(leaf, Leaf) and isinstance(leaf.source, Product)):
            return self._outside(self._with_own(bias))
        source = leaf.source
        whole = normal_form(features).text == source.text
        fits = isinstance(bias, Parameter) and bias.shape == (source.width,)
        if source.bias is not None or not whole or not fits or self.kwargs.get("alpha", 1) != 1:
            return self._outside(self._with_own(bias))
        biased = Product(source.x, source.weight, bias, source.width, source.dtype, source.where)
        return Features(Leaf(biased, leaf.columns), features.rows, features.dtype)

    def _glu(self) -> Value:
        """`a · sigmoid(b)`, a being the first half."""
        value = self.args[0]
        dim = self.args[1] if len(self.args) > 1 else -1
        if not isinstance(value, Features):
            return self._outside()
        first, second = (
            _moved(value, lambda t, i=i: t.chunk(2, dim)[i], value.rows.chunk(2, dim)[i])
            for i in (0, 1)
        )
        aten = torch.ops.aten
        gate = Apply(aten.sigmoid.default, (second.value,), {}, self.where)
        both = Apply(aten.mul.Tensor, (first.value, gate), {}, self.where)
        return Features(both, first.rows, value.dtype)


# ---- helpers ----


def _placeholder(node: fx.Node, waiting: Any) -> Value:
    if isinstance(waiting, Parameter):
        return waiting
    name, spec = waiting
    tensor = node.meta["val"]
    if not spec.shape or not spec.dtype.is_floating_point or 0 in spec.shape:
        return Foreign(f"the argument {name}, which is {spec}", "", "", behind=False)
    return given(name, tensor)


def _tensors(values: Any) -> Iterator[Value]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _tensors(value)
        elif isinstance(value, (Features, Foreign, Parameter, Computed)):
            yield value


def _outside(op: str, where: str, values: Any, reason: str = "") -> Foreign:
    """What an op gives that no chain has."""
    tensors = list(_tensors(values))
    strange = [value for value in tensors if isinstance(value, Foreign)]
    behind = any(has_product(v.value) for v in tensors if isinstance(v, Features))
    # Where something from the side meets a product, it is the meeting that is in the way.
    for value in strange:
        if value.behind or not behind:
            return value
    return Foreign(reason or in_words(op), op, where, behind)


def _moved(features: Features, move: Callable[[Any], Any], rows: Any) -> Features:
    value = mapped(features.value, lambda leaf: Leaf(leaf.source, move(leaf.columns)))
    return Features(value, rows, features.dtype)


def _expression(value: Any) -> Any:
    return value.value if isinstance(value, Features) else value


def _aligned(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors hold the same rows at the same places; cheap for views of one range."""
    if a.shape != b.shape:
        return False
    strides = [[s for s, n in zip(t.stride(), t.shape, strict=True) if n > 1] for t in (a, b)]
    if strides[0] == strides[1] and a.storage_offset() == b.storage_offset():
        return True
    return torch.equal(a, b)


def _base_dtype(features: Features) -> torch.dtype:
    """Of the products it is made of, or else of the arguments."""
    found = sources(features.value)
    products = [source for source in found if isinstance(source, Product)]
    return (products or found)[0].dtype


def _flat(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return [item for part in value for item in _flat(part)]
    return [value]


def _dtype(node: fx.Node) -> torch.dtype:
    dtype: torch.dtype = node.meta["val"].dtype
    return dtype


def _shape(node: fx.Node) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
