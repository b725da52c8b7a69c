"""Liger: torch's products, and its Triton kernel for activation and gate. On GPUs alone."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from torch import Tensor

from torchweld.bench.bench_cases import MlpShape
from torchweld.bench.eager_block import BlockSource
from torchweld.bench.runtimes.runtime import Runtime, Source

# Activation of the gate -> the function of Liger's that multiplies it with up. Its gelu is the tanh
# form, whichever is asked for: the numerical rule decides whether that is near enough.
FUNCTIONS = {
    "gelu": ("liger_kernel.ops.geglu", "LigerGELUMulFunction"),
    "gelu_tanh": ("liger_kernel.ops.geglu", "LigerGELUMulFunction"),
    "silu": ("liger_kernel.ops.swiglu", "LigerSiLUMulFunction"),
}


class LigerRuntime(Runtime):
    """Liger's GEGLU and SwiGLU modules, on the block's own Linears."""

    apart = True  # it sets Triton up for itself
    countable = False
    devices = ("cuda",)
    needs = ("liger_kernel",)
    distributions = ("liger-kernel",)

    def why_not_block(self, mlp: MlpShape) -> str:
        if mlp.gated and mlp.activation in FUNCTIONS:
            return ""
        return f"it has gated MLPs, with {', '.join(FUNCTIONS)}"

    def load(self, source: Source) -> None:
        super().load(source)
        assert isinstance(source, BlockSource)
        home, name = FUNCTIONS[source.mlp.activation]
        multiply: Any = getattr(import_module(home), name).apply
        blocks = source.linears

        def run(x: Tensor) -> Tensor:
            for gate, up, down in blocks:
                x = down(multiply(gate(x), up(x)))
            return x

        self.function = run
