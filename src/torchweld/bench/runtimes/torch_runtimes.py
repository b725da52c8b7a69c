"""Runtimes that come with PyTorch: eager, oneDNN's fused linears, torch.compile."""

from __future__ import annotations

import copy
import statistics
from math import prod
from typing import Any

import torch

from torchweld.bench.bench_cases import MlpShape
from torchweld.bench.eager_block import BlockSource
from torchweld.bench.runtimes import model_facts
from torchweld.bench.runtimes.runtime import Call, Runtime
from torchweld.numerics.repeat_check import check_repeatable
from torchweld.ops.backends import Form, compile_backend, mkldnn_linears

CUDA_CALLS = 20
# Includes oneDNN's own relu, as users write it, although it makes 0 of NaN.
FUSED = {**mkldnn_linears.FUSED, "relu": ("relu", "")}


class EagerRuntime(Runtime):
    """The module's own code; it also says what the module computes."""

    trains = True
    devices = None

    def expected_kernels(self, mlp: MlpShape) -> dict[str, int]:
        """Biases are part of the products; each activation is a kernel, and so is the gate."""
        layers = sum(form.activation != "identity" for form in mlp.forms)
        pointwise = layers + (1 if mlp.gated else 0)
        return {"gemm": len(mlp.products), **({"pointwise": pointwise} if pointwise else {})}

    def check(self) -> None:
        """Raises where the model cannot be timed."""
        check_repeatable(self.model, self.made.workloads, training=False)

    def work(self) -> dict[str, Any]:
        return model_facts.work_of(self.model, self.workload)

    def truth(self) -> dict[str, Any]:
        return model_facts.truth_arrays(self.model, self.workload)

    def cuda_us(self) -> float | None:
        """The time of a block on CUDA, by the device's own clock; None for whole models."""
        if not isinstance(self.source, BlockSource) or self.source.device != "cpu":
            return None
        block, (x,) = copy.deepcopy(self.model).cuda(), self.workload.tensors()
        x = x.cuda()
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


class MkldnnRuntime(Runtime):
    """torch's own fused linears, the weights reordered once for this number of rows."""

    def why_not(self, dtype: str, training: bool = False) -> str:
        return super().why_not(dtype, training) or "; ".join(
            mkldnn_linears.reasons(getattr(torch, dtype), torch.device("cpu"))
        )

    def prepare(self, *where: int) -> Call:
        assert isinstance(self.source, BlockSource)
        tensors = [tensor.detach() for tensor in self.source.tensors]
        self.function, _ = mkldnn_linears.bind(
            form_of(self.source), tensors, rows=prod(where), fused=FUSED
        )
        return super().prepare(*where)


class CompiledRuntime(Runtime):
    """torch.compile for exactly this shape; compiled anew for each."""

    apart = True
    countable = False
    devices = None

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.trains = not options.get("freezing")  # frozen weights are constants

    def absent(self, whole_model: bool) -> str:
        return "; ".join(compile_backend.BACKEND.unavailable())

    def expected_kernels(self, mlp: MlpShape) -> dict[str, int] | None:
        """The products stay torch's; all between two of them is one kernel of Inductor's."""
        if self.options:  # it may write products of its own
            return None
        between = sum(form.activation != "identity" for form in mlp.forms)
        return {"gemm": len(mlp.products), **({"triton": between} if between else {})}

    def prepare(self, *where: int) -> Call:
        torch._dynamo.reset()
        self.show()
        self.function = torch.compile(
            self.model,
            fullgraph=isinstance(self.source, BlockSource),
            dynamic=False,
            options=self.options or None,
        )
        return super().prepare(*where)


def form_of(source: BlockSource) -> Form:
    """The block as backends take it."""
    return form_of_shape(source.mlp)


def form_of_shape(mlp: MlpShape) -> Form:
    sizes = tuple(zip(mlp.sizes, mlp.sizes[1:], strict=False))
    return Form(kind="chain", forms=mlp.forms, sizes=sizes)
