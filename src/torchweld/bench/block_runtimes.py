"""The runtimes of blocks: each makes a block from the same weights and gets it ready for some rows.

`load(mlp, dtype, seed)` makes it, `prepare(rows)` or `prepare(batch, tokens)` returns a callable
without arguments whose result is the output, called the way its users call it. M rows, K in, N out.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable
from functools import partial
from importlib import import_module
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor

from torchweld import ops
from torchweld.bench.cases import SEED, MlpShape
from torchweld.bench.eager_block import EagerBlock, linears_of, tensors_of
from torchweld.bench.onnx_graphs import onnx_model
from torchweld.core.activations import ACTIVATIONS, parse_activation
from torchweld.ops.backends import (
    BACKENDS,
    Backend,
    BackendMode,
    Form,
    backend_named,
    reference_backend,
)
from torchweld.ops.backends.backend import mode_of
from torchweld.ops.fused_mlp import FusedMLP
from torchweld.timing import CallableSide

Call = Callable[[], Any]
CUDA_CALLS = 20

# oneDNN's own names, relu among them: this is the peer, which users write with it.
MKLDNN_NAMES = {
    "gelu": ("gelu", "none"),
    "gelu_tanh": ("gelu", "tanh"),
    "relu": ("relu", ""),
    "silu": ("swish", ""),
    "tanh": ("tanh", ""),
    "sigmoid": ("sigmoid", ""),
    "hardswish": ("hardswish", ""),
}


class Runtime(Protocol):
    """`details` says what was chosen or ran, after a call."""

    def load(self, mlp: MlpShape, dtype: str, seed: int = SEED) -> None: ...
    def prepare(self, *lead: int) -> Call: ...
    def details(self) -> dict[str, Any]: ...


class TorchRuntime:
    """What the runtimes inside PyTorch share: a module or function of one tensor.

    `countable`: its ops reach the dispatcher one by one, and it can run on an x without rows.
    """

    countable = True

    def load(self, mlp: MlpShape, dtype: str, seed: int = SEED) -> None:
        self.mlp, self.dtype, self.seed = mlp, getattr(torch, dtype), seed
        self.function = self.build()

    def build(self) -> Callable[[Tensor], Tensor]:
        return EagerBlock(self.mlp, self.dtype, self.seed).eval()

    def input(self, *lead: int) -> Tensor:
        values = torch.from_numpy(self.mlp.inputs(prod(lead), self.seed + 1))
        return values.to(self.dtype).view(*lead, self.mlp.sizes[0])

    def prepare(self, *lead: int) -> Call:
        self.x = self.input(*lead)
        return self.bind(self.x)

    def bind(self, x: Tensor) -> Call:
        function = self.function
        return lambda: function(x)

    def idle(self) -> Call:
        """The same call on an x without rows: all of its Python, dispatch and allocation."""
        return self.bind(self.input(1)[:0])

    def details(self) -> dict[str, Any]:
        return {}


class Eager(TorchRuntime):
    """nn.Linear and the activation."""

    def cuda_us(self) -> float:
        """One call on a CUDA device, by the device's own clock."""
        block, x = copy.deepcopy(self.function).cuda(), self.x.cuda()  # type: ignore[attr-defined]
        begin: Any
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        found: list[float] = []
        for _ in range(2 * CUDA_CALLS):  # the first half warms up
            begin.record()
            block(x)
            end.record()
            torch.cuda.synchronize()
            found.append(1e3 * begin.elapsed_time(end))
        return statistics.median(found[CUDA_CALLS:])


class Torchweld(TorchRuntime):
    """The public module, called as users call it."""

    def __init__(self, packing: bool = True) -> None:
        self.packing = packing

    def build(self) -> Callable[[Tensor], Tensor]:
        self.module = FusedMLP.from_linears(
            linears_of(self.mlp, self.dtype, self.seed),
            self.mlp.activation,
            gated=self.mlp.gated,
            packing=self.packing,
        ).eval()
        return self.module

    def details(self) -> dict[str, Any]:
        if ops.compiled is None:
            return {"backend": reference_backend.BACKEND.name, "copied_bytes": 0}
        return {**ops.compiled.last_run(), "copied_bytes": self.module.packed_bytes}


class OwnBackend(TorchRuntime):
    """A backend of torchweld by name and mode, below the module."""

    def __init__(self, name: str, mode: str | None) -> None:
        self.backend = backend_named(name)
        self.mode = mode_of(self.backend, mode)
        self.countable = not self.backend.abilities.compiles

    def build(self) -> Callable[[Tensor], Tensor]:
        sizes = tuple(zip(self.mlp.sizes, self.mlp.sizes[1:], strict=False))
        block = Form(kind="chain", forms=self.mlp.forms, sizes=sizes)
        tensors = tensors_of(self.mlp, self.dtype, self.seed)
        self.runner = self.backend.build(block, tensors, self.mode)
        return self.runner  # type: ignore[return-value]

    def details(self) -> dict[str, Any]:
        return {"kernel": self.mode, "copied_bytes": self.runner.copied_bytes}


class Mkldnn(TorchRuntime):
    """torch's own fused linears, the weights reordered once for this number of rows."""

    def build(self) -> Callable[[Tensor], Tensor]:
        self.linears = linears_of(self.mlp, self.dtype, self.seed)
        return lambda x: x

    def prepare(self, *lead: int) -> Call:
        reorder = torch.ops.mkldnn._reorder_linear_weight
        self.layers = [
            (reorder(linear.weight.detach(), prod(lead)), linear.bias) for linear in self.linears
        ]
        return super().prepare(*lead)

    def bind(self, x: Tensor) -> Call:
        fused = torch.ops.mkldnn._linear_pointwise.default
        fused_with = torch.ops.mkldnn._linear_pointwise.binary
        *hidden, (weight_out, bias_out) = self.layers
        activation, numbers = parse_activation(self.mlp.activation)
        name, algorithm = MKLDNN_NAMES.get(activation, ("none", ""))
        after = None if activation in MKLDNN_NAMES else ACTIVATIONS[activation].apply

        def gated() -> Tensor:
            (weight_gate, bias_gate), (weight_up, bias_up) = hidden
            gate = fused(x, weight_gate, bias_gate, name, [], algorithm)
            if after is not None:
                gate = after(gate, *numbers)
            product = fused_with(x, gate, weight_up, bias_up, "mul")
            y: Tensor = fused(product, weight_out, bias_out, "none", [], "")
            return y

        def plain() -> Tensor:
            h = x
            for weight, bias in hidden:
                h = fused(h, weight, bias, name, [], algorithm)
                if after is not None:
                    h = after(h, *numbers)
            y: Tensor = fused(h, weight_out, bias_out, "none", [], "")
            return y

        return gated if self.mlp.gated else plain


class Compiled(TorchRuntime):
    """torch.compile for exactly this shape; compiled anew for every number of rows."""

    countable = False

    def options(self) -> dict[str, Any]:
        return {}

    def prepare(self, *lead: int) -> Call:
        torch._dynamo.reset()
        self.function = torch.compile(
            self.build(), fullgraph=True, dynamic=False, options=self.options()
        )
        return super().prepare(*lead)


class CompiledMax(Compiled):
    """The same with the weights as constants, and the fastest of several products chosen."""

    def options(self) -> dict[str, Any]:
        return {"freezing": True, "max_autotune": True}


class OnnxRuntime:
    """`session.run`, of the two ways to write a Linear in ONNX the one that is faster here."""

    def __init__(self) -> None:
        self.runtime: Any = import_module("onnxruntime")

    def load(self, mlp: MlpShape, dtype: str, seed: int = SEED) -> None:
        options = self.runtime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.log_severity_level = 3
        self.mlp, self.seed = mlp, seed
        self.sessions = {
            form: self.runtime.InferenceSession(
                onnx_model(mlp, form == "Gemm", seed), options, providers=["CPUExecutionProvider"]
            )
            for form in ("Gemm", "MatMul")
        }

    def prepare(self, *lead: int) -> Call:
        feed = {"x": self.mlp.inputs(prod(lead), self.seed + 1)}

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
        self.core: Any = import_module("openvino").Core()

    def load(self, mlp: MlpShape, dtype: str, seed: int = SEED) -> None:
        self.mlp, self.seed = mlp, seed
        self.model = self.core.read_model(onnx_model(mlp, gemm=True, seed=seed))

    def prepare(self, *lead: int) -> Call:
        self.model.reshape([prod(lead), self.mlp.sizes[0]])
        settings = {
            "INFERENCE_NUM_THREADS": torch.get_num_threads(),
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_PRECISION_HINT": "f32",
        }
        compiled = self.core.compile_model(self.model, "CPU", settings)
        x = self.mlp.inputs(prod(lead), self.seed + 1)
        return lambda: compiled(x)[0]

    def details(self) -> dict[str, Any]:
        return {}


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


def _own(backend: Backend, mode: BackendMode | None) -> Callable[[], Runtime]:
    if backend.abilities.c_forward:  # as users get it: through the module
        return partial(Torchweld, packing=mode is None or mode.packs)
    return partial(OwnBackend, backend.name, None if mode is None else mode.name)


# Backends of ours by name, and with a mode: "torch", "torch:mkldnn". Peers keep their names.
RUNTIMES: dict[str, Callable[[], Runtime]] = {
    **{backend.name: _own(backend, None) for backend in BACKENDS},
    **{f"{b.name}:{mode.name}": _own(b, mode) for b in BACKENDS for mode in b.abilities.modes},
    "torchweld": Torchweld,
    "eager": Eager,
    "mkldnn": Mkldnn,
    "compile": Compiled,
    "compile-max": CompiledMax,
    "onnxruntime": OnnxRuntime,
    "openvino": OpenVino,
}
