"""Reads a traced graph op by op.

In: a `Traced` graph. Out: the module's result in normal form, or `Refused`. An op that no chain has
is a reason to refuse only if the result depends on it: a `ForeignValue` carries the reason along.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from torchweld.welds.refusal_reasons import Refused, op_name, source_of
from torchweld.welds.tracing.forward_trace import Traced
from torchweld.welds.tracing.graph_values import (
    Computed,
    Features,
    ForeignValue,
    Normal,
    Parameter,
    base_dtype,
    given,
    normal_form,
)
from torchweld.welds.tracing.traced_ops import TracedOp, Value, outside, short

# Assertions that the tracer adds to the graph; they have no result.
_ASSERTIONS = ("aten._assert_tensor_metadata", "aten._assert_async", "aten._assert_scalar")


def read(traced: Traced) -> Normal:
    """The module's result in normal form; Refused if it has none."""
    result = _GraphReader(traced).run()
    if isinstance(result, ForeignValue):
        raise result.at("after the last Linear" if result.behind else "").refusal()
    if not isinstance(result, Features):
        raise Refused("its result does not come from its arguments")
    normal = normal_form(result)
    base = base_dtype(result.value)
    if result.dtype != base:
        raise Refused(f"returns {short(result.dtype)} where it computes in {short(base)}")
    return normal


class _GraphReader:
    def __init__(self, traced: Traced) -> None:
        self._graph, self._grad = traced.graph, traced.grad
        self._values: dict[fx.Node, Value] = {}
        self._waiting = [
            *(Parameter(name, tuple(t.shape), t.dtype) for name, t in traced.state),
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
        args: Any = fx.map_arg(node.args, lambda n: self._values[n])
        kwargs: Any = fx.map_arg(node.kwargs, lambda n: self._values[n])
        if node.target is operator.getitem:
            holder, index = args
            return holder if isinstance(holder, (ForeignValue, Computed)) else holder[index]
        op, where = op_name(node.target), source_of(node.stack_trace)
        if op == "_set_grad_enabled":
            if self._grad or args[0]:
                raise Refused("switches gradients on or off inside", op, where)
            return None
        if op in _ASSERTIONS:
            return None
        target = node.target
        if not isinstance(target, torch._ops.OpOverload):
            return outside(op, where, [*args, *kwargs.values()])
        return TracedOp(node, target, op, where, args, kwargs, self._grad).value()


def _placeholder(node: fx.Node, waiting: Any) -> Value:
    if isinstance(waiting, Parameter):
        return waiting
    name, spec = waiting
    if not spec.shape or not spec.dtype.is_floating_point or 0 in spec.shape:
        return ForeignValue(f"the argument {name}, which is {spec}", "", "", behind=False)
    return given(name, node.meta["val"])


def _flat(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return [item for part in value for item in _flat(part)]
    return [value]
