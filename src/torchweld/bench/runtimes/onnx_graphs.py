"""Blocks as ONNX graphs, written directly: opset 20, weights as constants, any number of rows."""

from __future__ import annotations

from typing import Any

import numpy as np

from torchweld.bench.bench_cases import SEED, Array, MlpShape
from torchweld.core.activations import parse_activation
from torchweld.core.errors import TorchweldError

# Activations that are one node: its kind, and the names of its numbers.
NODES: dict[str, tuple[str, tuple[str, ...]]] = {
    "gelu": ("Gelu", ()),
    "relu": ("Relu", ()),
    "tanh": ("Tanh", ()),
    "sigmoid": ("Sigmoid", ()),
    "mish": ("Mish", ()),
    "hardswish": ("HardSwish", ()),
    "elu": ("Elu", ("alpha",)),
    "leaky_relu": ("LeakyRelu", ("alpha",)),
}


class _Graph:
    def __init__(self) -> None:
        from onnx import helper, numpy_helper

        self._make_node, self._from_array = helper.make_node, numpy_helper.from_array
        self.nodes: list[Any] = []
        self.weights: list[Any] = []

    def constant(self, name: str, values: Array) -> str:
        self.weights.append(self._from_array(np.ascontiguousarray(values), name))
        return name

    def node(self, kind: str, inputs: list[str], output: str, **attributes: Any) -> str:
        self.nodes.append(self._make_node(kind, inputs, [output], **attributes))
        return output

    def activated(self, x: str, text: str) -> str:
        name, parameters = parse_activation(text)
        if name == "identity":
            return x
        if name in NODES:
            kind, names = NODES[name]
            return self.node(
                kind, [x], f"{x}_activated", **dict(zip(names, parameters, strict=True))
            )
        if name == "gelu_tanh":
            return self.node("Gelu", [x], f"{x}_activated", approximate="tanh")
        if name == "silu":
            return self.node("Mul", [x, self.node("Sigmoid", [x], f"{x}_sigmoid")], f"{x}_silu")
        if name == "relu2":
            relu = self.node("Relu", [x], f"{x}_relu")
            return self.node("Mul", [relu, relu], f"{x}_squared")
        if name == "quick_gelu":
            slope = self.constant(f"{x}_slope", np.array(1.702, np.float32))
            steep = self.node("Mul", [x, slope], f"{x}_steep")
            return self.node("Mul", [x, self.node("Sigmoid", [steep], f"{x}_gate")], f"{x}_quick")
        if name == "softplus" and parameters == (1.0, 20.0):
            return self.node("Softplus", [x], f"{x}_activated")
        raise TorchweldError(
            f"activation {text!r} is not written as ONNX; leave runtimes that read ONNX out"
        )


def onnx_model(mlp: MlpShape, gemm: bool, seed: int = SEED) -> bytes:
    """The block as an ONNX graph: Gemm on [N, K] weights, or MatMul and Add on [K, N]."""
    from onnx import TensorProto, helper

    graph = _Graph()

    def linear(x: str, number: int, output: str) -> str:
        own = linears[number]
        bias = [] if own.bias is None else [graph.constant(f"bias{number}", own.bias)]
        if gemm:
            weight = graph.constant(f"weight{number}", own.weight)
            return graph.node("Gemm", [x, weight, *bias], output, transB=1)
        weight = graph.constant(f"weight{number}", own.weight.T)
        if not bias:
            return graph.node("MatMul", [x, weight], output)
        product = graph.node("MatMul", [x, weight], f"product{number}")
        return graph.node("Add", [product, *bias], output)

    linears = mlp.linears(seed)
    last = len(linears) - 1
    if mlp.gated:
        gate = graph.activated(linear("x", 0, "gate"), mlp.activation)
        hidden = graph.node("Mul", [gate, linear("x", 1, "up")], "hidden")
    else:
        hidden = "x"
        for number in range(last):
            hidden = graph.activated(linear(hidden, number, f"hidden{number}"), mlp.activation)
    linear(hidden, last, "y")
    float_ = TensorProto.FLOAT
    made = helper.make_graph(
        graph.nodes,
        "block",
        [helper.make_tensor_value_info("x", float_, ["M", mlp.sizes[0]])],
        [helper.make_tensor_value_info("y", float_, ["M", mlp.sizes[-1]])],
        graph.weights,
    )
    opset = helper.make_opsetid("", 20)
    model = helper.make_model(made, opset_imports=[opset], ir_version=10)
    return bytes(model.SerializeToString())
