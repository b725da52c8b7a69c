"""Calls of a block on a GPU as torch.profiler would record them: made by hand.

There is no trace of a gated MLP from a GPU here. So these are events in the form of a real trace of
an A100 (tests/traces), under names of kernels that such GPUs run for these ops.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.support.made_traces import MadeTrace, a_folder

from torchweld.profiles.recorded_events import Recording
from torchweld.profiles.traces.trace_events import read_recording

GEMM = "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_tn"
GELU = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::GeluCUDAKernelImpl("
    "at::TensorIteratorBase&, at::native::GeluType)::{lambda()#1}, std::array<char*, 2ul> >"
)
MUL = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::BinaryFunctor<c10::BFloat16, "
    "c10::BFloat16, c10::BFloat16, at::native::binary_internal::MulFunctor<float> > >"
)
FUSED = "triton_poi_fused_gelu_mul_0"
OURS = "torchweld_pointwise"
SPLIT_SUM = "void splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>(cublasSplitKParams<float>)"
# Kernel -> the op around its launch.
OPS = {GEMM: "aten::mm", GELU: "aten::gelu", MUL: "aten::mul"}

# GeGLU: gate and up, what is between, down.
EAGER = (GEMM, GEMM, GELU, MUL, GEMM)
COMPILED = (GEMM, GEMM, FUSED, GEMM)
WELDED = (GEMM, GEMM, OURS, GEMM)

GEMM_US, OTHER_US, APART_US = 180.0, 60.0, 5.0
LAUNCH_US, QUERY_US = 4.0, 1.0


def made_calls(kernels: Sequence[str], calls: int) -> MadeTrace:
    """Calls whose kernels begin 5 µs apart. A product asks the device once."""
    trace = MadeTrace()
    at_us, runs_us, number = 10.0, 100.0, 0
    for _ in range(calls):
        for name in kernels:
            number += 1
            product = name == GEMM
            trace.op(OPS.get(name, "fused"), at_us, 12)
            if product:
                query = "cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags"
                trace.call(query, at_us + 1, QUERY_US)
            trace.call("cudaLaunchKernel", at_us + 3, LAUNCH_US, number)
            took_us = GEMM_US if product else OTHER_US
            trace.ran(name, runs_us, took_us, number)
            at_us, runs_us = at_us + 15, runs_us + took_us + APART_US
    return trace


def recorded(trace: MadeTrace) -> Recording:
    with a_folder() as folder:
        return read_recording(trace.write(Path(folder) / "trace.json"))
