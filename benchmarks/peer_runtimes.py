"""The runtimes: each makes a block from the same weights and gets it ready for a number of rows.

`prepare` returns a callable without arguments whose result is the output, called the way its users
call it. M rows, K in, N out.
"""

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from peer_grid import Array, Block
from torch import Tensor, nn

from torchweld.measuring import CallableSide

Call = Callable[[], Any]

ACTIVATIONS = {"gelu": F.gelu, "relu": F.relu, "silu": F.silu}
MKLDNN_NAMES = {"gelu": ("gelu", "none"), "relu": ("relu", ""), "silu": ("swish", "")}


class Runtime(Protocol):
    """`details` says what was chosen or ran, after a call."""

    def load(self, block: Block, dtype: str) -> None: ...
    def prepare(self, rows: int) -> Call: ...
    def details(self) -> dict[str, Any]: ...


class EagerModule(nn.Module):
    """The block as users write it: nn.Linear and the activation, nothing else."""

    def __init__(self, block: Block, dtype: torch.dtype) -> None:
        super().__init__()
        self.gated = block.gated
        self.activation = ACTIVATIONS[block.activation]
        self.linears = nn.ModuleList(linears_of(block, dtype))

    def forward(self, x: Tensor) -> Tensor:
        if self.gated:
            gate, up, down = self.linears
            return down(self.activation(gate(x)) * up(x))
        *hidden, last = self.linears
        for linear in hidden:
            x = self.activation(linear(x))
        return last(x)


def linears_of(block: Block, dtype: torch.dtype) -> list[nn.Linear]:
    result = []
    for own in block.linears():
        n, k = own.weight.shape
        linear = nn.Linear(k, n, bias=own.bias is not None, device="meta", dtype=dtype)
        linear.weight = nn.Parameter(torch.from_numpy(own.weight).to(dtype))
        if own.bias is not None:
            linear.bias = nn.Parameter(torch.from_numpy(own.bias).to(dtype))
        result.append(linear)
    return result


class TorchRuntime:
    """What the runtimes inside PyTorch share: a module or function of one tensor."""

    def load(self, block: Block, dtype: str) -> None:
        self.block, self.dtype = block, getattr(torch, dtype)
        self.function = self.build()

    def build(self) -> Callable[[Tensor], Tensor]:
        return EagerModule(self.block, self.dtype).eval()

    def prepare(self, rows: int) -> Call:
        x, function = torch.from_numpy(self.block.inputs(rows)).to(self.dtype), self.function
        return lambda: function(x)

    def details(self) -> dict[str, Any]:
        return {}


class Torchweld(TorchRuntime):
    """The public module, called as users call it."""

    def build(self) -> Callable[[Tensor], Tensor]:
        import torchweld as tw

        linears = linears_of(self.block, self.dtype)
        block = self.block
        return tw.FusedMLP.from_linears(linears, block.activation, gated=block.gated).eval()

    def details(self) -> dict[str, Any]:
        from torchweld import ops

        return {"backend": "torch"} if ops.compiled is None else dict(ops.compiled.last_run())


class Mkldnn(TorchRuntime):
    """torch's own fused linears, the weights reordered once for this number of rows."""

    def build(self) -> Callable[[Tensor], Tensor]:
        self.linears = linears_of(self.block, self.dtype)
        return lambda x: x

    def prepare(self, rows: int) -> Call:
        ops, block = torch.ops.mkldnn, self.block
        x = torch.from_numpy(block.inputs(rows)).to(self.dtype)
        fused, fused_with = ops._linear_pointwise.default, ops._linear_pointwise.binary
        name, algorithm = MKLDNN_NAMES[block.activation]
        layers = [
            (ops._reorder_linear_weight(linear.weight.detach(), rows), linear.bias)
            for linear in self.linears
        ]
        *hidden, (weight_out, bias_out) = layers

        def gated() -> Tensor:
            (weight_gate, bias_gate), (weight_up, bias_up) = hidden
            gate = fused(x, weight_gate, bias_gate, name, [], algorithm)
            product = fused_with(x, gate, weight_up, bias_up, "mul")
            return fused(product, weight_out, bias_out, "none", [], "")

        def plain() -> Tensor:
            h = x
            for weight, bias in hidden:
                h = fused(h, weight, bias, name, [], algorithm)
            return fused(h, weight_out, bias_out, "none", [], "")

        return gated if block.gated else plain


class Compiled(TorchRuntime):
    """torch.compile for exactly this shape; compiled anew for every number of rows."""

    def options(self) -> dict[str, Any]:
        return {}

    def prepare(self, rows: int) -> Call:
        torch._dynamo.reset()
        self.function = torch.compile(
            self.build(), fullgraph=True, dynamic=False, options=self.options()
        )
        return super().prepare(rows)


class CompiledMax(Compiled):
    """The same with the weights as constants, and the fastest of several products chosen."""

    def options(self) -> dict[str, Any]:
        return {"freezing": True, "max_autotune": True}


def onnx_model(block: Block, gemm: bool) -> bytes:
    """The block as an ONNX graph, opset 20: Gemm on [N, K] weights, or MatMul and Add on [K, N]."""
    from onnx import TensorProto, helper, numpy_helper

    nodes: list[Any] = []
    weights: list[Any] = []

    def constant(name: str, values: Array) -> str:
        weights.append(numpy_helper.from_array(np.ascontiguousarray(values), name))
        return name

    def node(kind: str, inputs: list[str], output: str, **attributes: Any) -> str:
        nodes.append(helper.make_node(kind, inputs, [output], **attributes))
        return output

    def linear(x: str, number: int, output: str) -> str:
        own = linears[number]
        bias = [] if own.bias is None else [constant(f"bias{number}", own.bias)]
        if gemm:
            weight = constant(f"weight{number}", own.weight)
            return node("Gemm", [x, weight, *bias], output, transB=1)
        weight = constant(f"weight{number}", own.weight.T)
        if not bias:
            return node("MatMul", [x, weight], output)
        return node("Add", [node("MatMul", [x, weight], f"product{number}"), *bias], output)

    def activated(x: str) -> str:
        if block.activation == "silu":
            return node("Mul", [x, node("Sigmoid", [x], f"{x}_sigmoid")], f"{x}_silu")
        return node(block.activation.capitalize(), [x], f"{x}_activated")

    linears = block.linears()
    last = len(linears) - 1
    if block.gated:
        gate, up = activated(linear("x", 0, "gate")), linear("x", 1, "up")
        hidden = node("Mul", [gate, up], "hidden")
    else:
        hidden = "x"
        for number in range(last):
            hidden = activated(linear(hidden, number, f"hidden{number}"))
    linear(hidden, last, "y")
    float_ = TensorProto.FLOAT
    graph = helper.make_graph(
        nodes,
        "block",
        [helper.make_tensor_value_info("x", float_, ["M", block.sizes[0]])],
        [helper.make_tensor_value_info("y", float_, ["M", block.sizes[-1]])],
        weights,
    )
    opset = helper.make_opsetid("", 20)
    return helper.make_model(graph, opset_imports=[opset], ir_version=10).SerializeToString()


class OnnxRuntime:
    """`session.run`, of the two ways to write a Linear in ONNX the one that is faster here."""

    def __init__(self) -> None:
        import onnxruntime

        self.runtime = onnxruntime

    def load(self, block: Block, dtype: str) -> None:
        options = self.runtime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.log_severity_level = 3
        self.block = block
        self.sessions = {
            form: self.runtime.InferenceSession(
                onnx_model(block, form == "Gemm"), options, providers=["CPUExecutionProvider"]
            )
            for form in ("Gemm", "MatMul")
        }

    def prepare(self, rows: int) -> Call:
        feed = {"x": self.block.inputs(rows)}

        def call_of(session: Any) -> Call:
            return lambda: session.run(None, feed)[0]

        calls = {form: call_of(session) for form, session in self.sessions.items()}
        self.form = fastest(calls)
        return calls[self.form]

    def details(self) -> dict[str, Any]:
        return {"form": self.form}


class OpenVino:
    """`compiled(x)`, compiled for this number of rows, latency mode, fp32 kept fp32."""

    def __init__(self) -> None:
        import openvino

        self.core = openvino.Core()

    def load(self, block: Block, dtype: str) -> None:
        self.block = block
        self.model = self.core.read_model(onnx_model(block, gemm=True))

    def prepare(self, rows: int) -> Call:
        self.model.reshape([rows, self.block.sizes[0]])
        settings = {
            "INFERENCE_NUM_THREADS": torch.get_num_threads(),
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_PRECISION_HINT": "f32",
        }
        compiled = self.core.compile_model(self.model, "CPU", settings)
        x = self.block.inputs(rows)
        return lambda: compiled(x)[0]

    def details(self) -> dict[str, Any]:
        return {}


RUNTIMES: dict[str, Callable[[], Runtime]] = {
    "eager": TorchRuntime,
    "mkldnn": Mkldnn,
    "compile": Compiled,
    "compile-max": CompiledMax,
    "onnxruntime": OnnxRuntime,
    "openvino": OpenVino,
    "torchweld": Torchweld,
}


def fastest(calls: dict[str, Call], rounds: int = 7) -> str:
    """The one with the best time of several turns; a turn is a call, or 200 µs of them."""
    sides = {name: CallableSide(call) for name, call in calls.items()}
    once_s = {name: min(side.time(1) for _ in range(3)) for name, side in sides.items()}
    best_s = dict.fromkeys(calls, float("inf"))
    for _ in range(rounds):
        for name, side in sides.items():
            number = max(1, round(200e-6 / once_s[name]))
            best_s[name] = min(best_s[name], side.time(number) / number)
    return min(best_s, key=best_s.__getitem__)
