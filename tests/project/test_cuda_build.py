"""The package built against torch's CUDA build: `make test-cuda` runs this in its environment."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

import torchweld as tw
from torchweld.machine import kernel_build
from torchweld.ops.gpu import gpu_support

pytestmark = pytest.mark.skipif(
    torch.version.cuda is None, reason="torch is built without CUDA; run make test-cuda"
)
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU; see make gpu-test")
SPEC = "gelu/b;identity/b"


def test_the_cuda_kernels_are_built_and_registered() -> None:
    info = kernel_build.build_info()
    assert info is not None
    assert info.cuda.reason == ""
    assert {"sm_80", "sm_90", "sm_100"} <= set(info.cuda.architectures)
    assert gpu_support.has_cuda_kernels()
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    for way in ("cuda", "pointwise", "epilogue", "narrow", "chain"):
        assert has(f"torchweld::{way}_saving", "CUDA"), way
        assert has(f"torchweld::{way}_backward", "CUDA"), way


def test_info_says_what_they_were_built_for() -> None:
    command = [sys.executable, "-m", "torchweld", "info"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("CUDA kernels")]
    assert "built for sm_80, sm_90, sm_100, compute_100, by nvcc" in line


@NO_GPU
def test_without_a_driver_they_say_so_and_nothing_worse() -> None:
    mlp = tw.FusedMLP((7, 9, 5))
    with pytest.raises(RuntimeError, match="Found no NVIDIA driver"):
        mlp.to("cuda")
    x, weight = torch.randn(2, 3), torch.randn(4, 3)
    with pytest.raises(RuntimeError, match="NVIDIA driver"):
        torch.ops.torchweld.cuda_saving(x.to("cuda"), [weight.to("cuda")], [], "gelu", False)


@NO_GPU
def test_the_kernel_itself_refuses_without_a_crash() -> None:
    """Called past the dispatcher, on tensors of the CPU."""
    code = (
        "import torch, torchweld\n"
        "op = torch.ops.torchweld.cuda_saving.default\n"
        "try:\n"
        "    op._op_dk(torch._C.DispatchKey.CUDA, torch.randn(2, 3), [torch.randn(4, 3)], [], "
        "'gelu', False)\n"
        "except RuntimeError as error:\n"
        "    print('refused:', str(error).splitlines()[0])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("refused: ")


@NO_GPU
def test_reasons_name_the_missing_gpu() -> None:
    command = [sys.executable, "-m", "torchweld", "info", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    reasons = {one["name"]: one["reasons"] for one in json.loads(done.stdout)["backends"]}
    for name in ("cublas", "triton", "triton-narrow", "cuda"):
        assert reasons[name] == ["torch finds no GPU; see nvidia-smi, or rocm-smi"]
    assert reasons["cpu"] == []
