"""Evaluates one op of a traced graph on descriptions of tensors.

In: the op and its arguments as values of `graph_values`. Out: its result as such a value. There are
few kinds of ops: products with the module's own weights, movement of data, elementwise ops, dropout
and casts. No chain has any other op; its result is a `ForeignValue`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx

from torchweld.welds.refusal_reasons import Refused, in_words
from torchweld.welds.tracing.graph_values import (
    Apply,
    Computed,
    Dropped,
    Features,
    ForeignValue,
    Given,
    Leaf,
    Parameter,
    Product,
    base_dtype,
    has_product,
    mapped,
    normal_form,
    product_of,
    sources,
)

Value: TypeAlias = Any  # Features, ForeignValue, Parameter, Computed, a number, a text, or a list


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


MOVES = _names(
    """view reshape _unsafe_view _reshape_alias view_as reshape_as flatten unflatten unsqueeze
    squeeze transpose swapaxes swapdims permute movedim moveaxis t numpy_T mT expand expand_as
    chunk unsafe_chunk split split_with_sizes unsafe_split unsafe_split_with_sizes tensor_split
    unbind select slice narrow"""
)
# In the model these copy if they have to. In tracing, labels are only viewed.
RESHAPES = _names("reshape _unsafe_view _reshape_alias reshape_as")
TRANSPOSES = _names("t transpose numpy_T mT permute swapaxes swapdims")
COPIES = _names("contiguous clone alias lift_fresh positive resolve_conj resolve_neg")
CASTS = _names("to _to_copy type_as")
DROPOUTS = _names("dropout feature_dropout alpha_dropout feature_alpha_dropout")
ELEMENTWISE = _names(
    """abs add addcdiv addcmul atan celu clamp clamp_max clamp_min clip cos div divide elu eq erf
    erfc exp exp2 expm1 ge gelu gt hardshrink hardsigmoid hardswish hardtanh le leaky_relu lerp log
    log10 log1p log2 log_sigmoid logical_and logical_not logical_or lt masked_fill maximum minimum
    mish mul multiply ne neg negative pow reciprocal relu relu6 rsqrt rsub selu sigmoid sign silu
    sin softplus softshrink special_erf special_expit special_ndtr sqrt square sub subtract tanh
    threshold true_divide where"""
)


def tensors_of(values: Iterable[Value]) -> Iterator[Value]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from tensors_of(value)
        elif isinstance(value, (Features, ForeignValue, Parameter, Computed)):
            yield value


def outside(op: str, where: str, values: Iterable[Value], reason: str = "") -> ForeignValue:
    """The result of an op that no chain has."""
    tensors = list(tensors_of(values))
    behind = any(has_product(v.value) for v in tensors if isinstance(v, Features))
    # An op that combines a product with a foreign value is the reason itself, not that value.
    for value in tensors:
        if isinstance(value, ForeignValue) and (value.behind or not behind):
            return value
    return ForeignValue(reason or in_words(op), op, where, behind)


class TracedOp:
    """An op of aten or of another library, with its arguments as values."""

    def __init__(
        self, node: fx.Node, target: Any, op: str, where: str, args: Any, kwargs: Any, grad: bool
    ) -> None:
        self.node, self.target, self.op, self.where = node, target, op, where
        self.args, self.kwargs, self.grad = tuple(args), dict(kwargs), grad
        self.name = op.removeprefix("aten.")

    def value(self) -> Value:
        tensors = list(tensors_of([*self.args, *self.kwargs.values()]))
        multiply = {
            "linear": self._linear,
            "matmul": self._matmul,
            "mm": self._matmul,
            "addmm": self._addmm,
            "einsum": self._einsum,
        }.get(self.name)
        if multiply is not None:
            return multiply()
        if any(isinstance(value, ForeignValue) for value in tensors):
            return self._outside()
        features = [value for value in tensors if isinstance(value, Features)]
        if not features:
            return self._of_parameters(tensors)
        if self.name in ELEMENTWISE:
            return self._elementwise(features, tensors)
        if self.args[0] is not features[0]:
            return self._outside()
        if self.name in MOVES:
            return self._move(features[0])
        if self.name in COPIES:
            return features[0]
        if self.name in CASTS:
            return self._cast(features[0])
        if self.name in DROPOUTS:
            return self._dropout(features[0])
        if self.name == "detach":
            return self._outside("a detach") if self.grad else features[0]
        if self.name == "glu":
            return self._glu(features[0])
        return self._outside()

    def _outside(self, reason: str = "") -> ForeignValue:
        return outside(self.op, self.where, [*self.args, *self.kwargs.values()], reason)

    # ---- products ----

    def _linear(self) -> Value:
        x, weight, *rest = self.args
        return self._product(x, weight, rest[0] if rest else None, flipped=False)

    def _matmul(self) -> Value:
        x, weight = self.args
        return self._product(x, weight, None, flipped=True)

    def _addmm(self) -> Value:
        bias, x, weight = self.args
        if any(self.kwargs.get(key, 1) != 1 for key in ("alpha", "beta")):
            return self._outside("a product with factors of its own")
        return self._product(x, weight, bias, flipped=True)

    def _einsum(self) -> Value:
        """A Linear if it is `...k,nk->...n` or `...k,kn->...n`, in any letters."""
        equation, operands = self.args[0].replace(" ", ""), self.args[1]
        left, arrow, result = equation.partition("->")
        letters = left.split(",")
        if arrow and len(operands) == 2 == len(letters) and len(letters[1]) == 2:
            rows, k = letters[0][:-1], letters[0][-1:]
            n = letters[1].replace(k, "")
            if len(n) == 1 and result == rows + n and n not in rows and k not in rows:
                x, weight = operands
                return self._product(x, weight, None, flipped=letters[1] == k + n)
        return self._outside()

    def _product(self, x: Value, weight: Value, bias: Value, flipped: bool) -> Value:
        """A Linear; `flipped`: the op takes the weight as `[in, out]`."""
        if isinstance(x, ForeignValue):
            return x.at("between the Linears" if x.behind else "before the first Linear")
        for tensor in (weight, bias):
            if isinstance(tensor, Computed):
                return self._outside(f"a weight that is {tensor.what}")
        if isinstance(weight, (Features, ForeignValue)):
            return self._outside("a product of two activations")
        if not isinstance(x, Features):
            return self._outside("a product that does not have its input on the left")
        if len(weight.shape) != 2:
            return self._outside(f"a weight of {len(weight.shape)} dimensions")
        weight = replace(weight, transposed=weight.transposed != flipped)
        width = weight.shape[1] if weight.transposed else weight.shape[0]
        if bias is not None and (not isinstance(bias, Parameter) or bias.shape != (width,)):
            return self._outside("something other than a bias added to a product")
        try:
            normal = normal_form(x, rows_in_order=False)
        except Refused as refused:
            return self._outside(f"a Linear whose input {refused.reason}")
        return product_of(x, Product(normal, weight, bias, width, _dtype(self.node)))

    # ---- tensors of the module ----

    def _of_parameters(self, tensors: list[Value]) -> Value:
        own = self.args[0] if self.args else None
        one = isinstance(self.node.meta.get("val"), Tensor)  # not several, as topk gives
        if one and isinstance(own, Parameter) and len(tensors) == 1:
            same_type = _dtype(self.node) == own.dtype
            if self.name in COPIES or (self.name == "detach" and not self.grad):
                return own
            if self.name in CASTS and same_type:
                return own
            if self.name in TRANSPOSES and len(own.shape) == 2 and self._swaps_two():
                return replace(own, transposed=not own.transposed)
            if self.name in MOVES and _shape(self.node) == own.shape and not own.transposed:
                return own
        made = next((value for value in tensors if isinstance(value, Computed)), None)
        return made or Computed(f"computed by {self.op}")

    def _swaps_two(self) -> bool:
        rest = self.args[1:]
        if self.name == "permute":
            return [int(i) % 2 for i in rest[0]] == [1, 0]
        return not rest or int(rest[0]) % 2 != int(rest[1]) % 2

    # ---- movement of data, casts, dropout ----

    def _move(self, features: Features) -> Value:
        rest = [v.rows if isinstance(v, Features) else v for v in self.args[1:]]

        def move(labels: Tensor) -> Any:
            if self.name in RESHAPES:
                shape = rest[0].shape if isinstance(rest[0], Tensor) else rest[0]
                return labels.view(shape)
            return self.target(labels, *rest, **self.kwargs)

        try:
            return _moved_parts(features, move)
        except RuntimeError:  # labels are expanded views, and a copy of them needs memory
            if features.rows.numel() > MOST_COPIED_LABELS:
                return self._outside("a reshape that mixes rows with columns")
        return _moved_parts(features, lambda labels: move(labels.contiguous()))

    def _cast(self, value: Features) -> Value:
        to, before = self.node.meta["val"], self.node.args[0]
        if isinstance(before, fx.Node) and before.meta["val"].device != to.device:
            return self._outside("a move to another device")
        if to.dtype == value.dtype:
            return value
        base = base_dtype(value.value)
        # A chain also computes elementwise ops in a wider type and casts back.
        wider = to.dtype.is_floating_point and to.dtype.itemsize > base.itemsize
        if has_product(value.value) and (wider or to.dtype == base):
            return replace(value, dtype=to.dtype)
        return self._outside(f"a cast from {short(value.dtype)} to {short(to.dtype)}")

    def _dropout(self, value: Features) -> Value:
        probability, training = self.args[1:]
        if not training or probability == 0.0:
            return value
        if self.name != "dropout":
            return self._outside("a dropout of another kind")
        return replace(value, value=Dropped(value.value, float(probability)))

    # ---- elementwise ----

    def _elementwise(self, features: list[Features], tensors: list[Value]) -> Value:
        others = [value for value in tensors if not isinstance(value, Features)]
        if others:
            if self.name == "add" and len(features) == 1 == len(others):
                return self._biased(features[0], others[0])
            return self._outside(self._with_own(others[0]))
        first = features[0]
        if not all(_aligned(first.rows, other.rows) for other in features[1:]):
            return self._outside(self._misfit(features))
        args = fx.node.map_aggregate(self.args, _expression)
        kwargs = fx.node.map_aggregate(self.kwargs, _expression)
        value = Apply(self.target, args, dict(kwargs), self.where)
        return Features(value, first.rows, _dtype(self.node))

    def _misfit(self, features: list[Features]) -> str:
        found = [source for value in features for source in sources(value.value)]
        names = sorted({source.name for source in found if isinstance(source, Given)})
        if names and len(names) < len(found):
            return f"{self.op} with its argument {' and '.join(names)}"
        return f"{self.op} of tensors whose rows do not match"

    def _with_own(self, other: Value) -> str:
        what = f"its {other.name}" if isinstance(other, Parameter) else "a computed tensor"
        return f"{self.op} with {what}"

    def _biased(self, features: Features, bias: Value) -> Value:
        """A product with a bias if it is `x @ w + b`; no chain has other additions."""
        leaf = features.value
        fits = isinstance(bias, Parameter) and bias.shape == features.shape[-1:]
        if fits and isinstance(leaf, Leaf) and isinstance(leaf.source, Product):
            source = leaf.source
            whole = normal_form(features, rows_in_order=False).text == source.text
            if whole and source.bias is None and self.kwargs.get("alpha", 1) == 1:
                return replace(features, value=replace(leaf, source=replace(source, bias=bias)))
        return self._outside(self._with_own(bias))

    def _glu(self, value: Features) -> Value:
        """`a · sigmoid(b)`, where a is the first half and b the second."""
        dim = self.args[1] if len(self.args) > 1 else -1

        def halves(labels: Tensor) -> tuple[Tensor, ...]:
            return labels.chunk(2, dim)

        first, second = (
            _moved(value, _part_of(halves, i), part) for i, part in enumerate(halves(value.rows))
        )
        aten = torch.ops.aten
        gate = Apply(aten.sigmoid.default, (second.value,), {}, self.where)
        both = Apply(aten.mul.Tensor, (first.value, gate), {}, self.where)
        return replace(first, value=both)


# ---- helpers ----

# A view that mixes rows with columns is followed up to this many elements.
MOST_COPIED_LABELS = 1 << 22


def _moved_parts(features: Features, move: Callable[[Tensor], Any]) -> Value:
    rows = move(features.rows)
    if isinstance(rows, Tensor):
        return _moved(features, move, rows)
    return [_moved(features, _part_of(move, i), part) for i, part in enumerate(rows)]


def _moved(features: Features, move: Callable[[Tensor], Any], rows: Tensor) -> Features:
    value = mapped(features.value, lambda leaf: Leaf(leaf.source, move(leaf.columns)))
    return Features(value, rows, features.dtype)


def _part_of(move: Callable[[Tensor], Any], index: int) -> Callable[[Tensor], Any]:
    return lambda labels: move(labels)[index]


def _expression(value: Any) -> Any:
    return value.value if isinstance(value, Features) else value


def _aligned(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same rows in the same places; cheap for views of one range."""
    if a.shape != b.shape:
        return False
    strides = [[s for s, n in zip(t.stride(), t.shape, strict=True) if n > 1] for t in (a, b)]
    if strides[0] == strides[1] and a.storage_offset() == b.storage_offset():
        return True
    return torch.equal(a, b)


def _dtype(node: fx.Node) -> torch.dtype:
    dtype: torch.dtype = node.meta["val"].dtype
    return dtype


def _shape(node: fx.Node) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
