"""The backend of the way `cuda`: what it serves, what it refuses, and that its kernels run."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.support.cuda_on_host import forget, launched
from tests.support.helpers import random_tensors

from torchweld.core.blocks import parse_spec
from torchweld.core.errors import UnsupportedError
from torchweld.machine import kernel_build
from torchweld.machine.kernel_build import BuildInfo, CudaBuild
from torchweld.ops.backends import Form, backend_named, select
from torchweld.ops.backends.backend import CountsKernels
from torchweld.ops.gpu import gpu_support

CPU = torch.device("cpu")


@pytest.mark.parametrize("mode", ["natural", "recompute"])
def test_it_runs_gated_and_wide_chains(cuda_on_host: None, mode: str) -> None:
    for width, kernel in ((9, "torchweld_cuda_narrow"), (300, "torchweld_cuda_pointwise")):
        forms = parse_spec("silu/b/first;identity/b")
        tensors = [t.requires_grad_() for t in random_tensors((6, width, 4), forms)]
        block = Form.of("chain", forms, tensors)
        x = torch.randn(5, 6, requires_grad=True)
        choice = select(block, [x.shape], x.dtype, CPU, name="cuda", mode=mode)
        forget()
        y = choice.backend.build(block, tensors, mode)(x)
        assert isinstance(y, torch.Tensor)
        y.sum().backward()
        assert {kernel, f"{kernel}_backward"} <= set(launched())


def test_its_reasons(cuda_on_host: None) -> None:
    forms = parse_spec("gelu/b;identity/b")
    block = Form.of("chain", forms, random_tensors((6, 9, 4), forms))
    group = Form.of("group", forms, random_tensors((6, 6, 6), forms))
    with pytest.raises(UnsupportedError, match="it runs chains; torch's products serve groups"):
        select(group, [(5, 6)], torch.float32, CPU, name="cuda")
    with pytest.raises(UnsupportedError, match="float64"):
        select(block, [(5, 6)], torch.float64, CPU, name="cuda")


def test_without_its_kernels_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_support, "device_problems", lambda: ())
    monkeypatch.setattr(gpu_support, "has_cuda_kernels", lambda: False)
    info = BuildInfo(torch="9.9.9", isas=(), compiler="g++ 12", source_hash="0")
    info = replace(info, cuda=CudaBuild(reason="nvcc was not found"))
    monkeypatch.setattr(kernel_build, "build_problem", lambda: None)
    monkeypatch.setattr(kernel_build, "build_info", lambda: info)
    assert backend_named("cuda").unavailable() == [
        "torchweld was built without its CUDA kernels: nvcc was not found; build it where torch "
        "has CUDA and nvcc is found"
    ]


def test_its_gradients_have_the_same_bits_at_every_run() -> None:
    assert backend_named("cuda").abilities.deterministic


@pytest.mark.parametrize("shared_kb", [99, 163])
@pytest.mark.parametrize(
    "spec",
    [
        "gelu/b;identity/b",
        "silu/b/first;identity/b",
        ";".join(["gelu/b"] * 12),
        ";".join(["gelu/b"] * 13),  # more than the description of a narrow chain has room for
    ],
)
@pytest.mark.parametrize("width", [24, 128, 256, 257])
def test_it_launches_in_inference_what_a_bench_holds_it_to(
    cuda_on_host: None, monkeypatch: pytest.MonkeyPatch, spec: str, width: int, shared_kb: int
) -> None:
    """With the shared memory of an A100, and with that of a GeForce."""
    monkeypatch.setenv("TORCHWELD_HOST_SHARED", str(shared_kb << 10))
    monkeypatch.setattr(gpu_support, "shared_memory", lambda: shared_kb << 10)
    forms = parse_spec(spec)
    tensors = random_tensors([width] * (len(forms) + 1), forms)
    block = Form.of("chain", forms, tensors)
    forget()
    with torch.no_grad():
        backend_named("cuda").build(block, tensors)(torch.randn(3, width))
    backend = backend_named("cuda")
    assert isinstance(backend, CountsKernels)
    expected = backend.expected_kernels(block)
    assert (expected is None) is (width == 256 and shared_kb == 99 and len(forms) <= 12)
    if expected is None:
        return  # whether it fits depends on the chain
    if expected == {"gemm": 1}:
        assert launched() == ["torchweld_cuda_narrow"]
    else:
        assert launched() == ["torchweld_cuda_pointwise"] * expected["pointwise"]
