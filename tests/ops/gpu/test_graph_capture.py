"""Nothing on the path of a call breaks the capture of a CUDA graph.

No graph can be captured here. The source is searched for what would break it, and what runs in
Triton's interpreter is watched.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.capture_lint import functions_with_offences, offences, offences_in_cpp
from tests.support.capture_watch import assert_nothing_waits, run_watched
from tests.support.gpu_device import on_real_gpu
from torch import Tensor

import torchweld
from torchweld.ops.gpu import triton_launches
from torchweld.ops.gpu.gpu_ways import WAYS

CSRC = Path(__file__).parents[3] / "csrc"
# The stand-in for CUDA on the host, and the program that tests the kernels there, run on no GPU.
CUDA_SOURCES = [
    *(path for path in sorted((CSRC / "cuda").iterdir())
      if path.name not in ("cuda_on_host.h", "cuda_selftest.cpp")),
    *sorted((CSRC / "torch_glue").glob("cuda_*")),
]  # fmt: skip
GPU = Path(torchweld.__file__).parent / "ops" / "gpu"
WATCHED = pytest.mark.skipif(
    on_real_gpu(), reason="the watch runs kernels for CPUs; on a GPU a step is captured"
)
# Never runs while a graph is captured: `captures` asks; test_gpu_tuning.py has its tests.
EXEMPT = {"tile_tuning.py": {"device_seconds"}}


@pytest.mark.parametrize("module", sorted(path.name for path in GPU.glob("*.py")))
def test_no_module_waits_or_reads_values(module: str) -> None:
    found = functions_with_offences((GPU / module).read_text())
    exempt = EXEMPT.get(module, set())
    assert exempt <= set(found), "an exemption that nothing needs"
    assert {name: lines for name, lines in found.items() if name not in exempt} == {}


@pytest.mark.parametrize(
    "line",
    [
        "x.item()",
        "x.tolist()",
        "x.cpu()",
        "x.to('cpu')",
        "x.to(device='cpu')",
        "x.numpy()",
        "bool(x)",
        "float(x[0])",
        "int(x.sum())",
        "torch.cuda.synchronize()",
        "torch.cuda.current_stream().synchronize()",
        "x.nonzero()",
        "torch.nonzero(x)",
        "torch.where(x)",
        "torch.tensor([1], device=x.device)",
        "torch.cuda.Event()",
        "print(x)",
        "print('here')",
        "f'{x}'",
        "str(x)",
        "import numpy",
        "from ctypes import CDLL",
        "import cuda.bindings",
        "if x: pass",
        "if not x: pass",
        "if mask: pass",
        "if x > 0: pass",
        "while x[0] < n: pass",
        "assert x == 0",
        "[i for i in range(n) if x]",
        "n if x else 0",
        "n and x",
        "any(x)",
        "y = torch.empty(3)\n    if y: pass",
        "y = x.contiguous()\n    float(y)",
        "y: Tensor = f(x)\n    float(y)",
        "def inner():\n        return x.item()",
    ],
)
def test_made_offences_are_found(line: str) -> None:
    source = f"def f(x: Tensor, mask: Tensor | None, n: int) -> None:\n    {line}\n"
    assert offences(source) != []
    assert list(functions_with_offences(source)) == ["f"]


@pytest.mark.parametrize(
    "line",
    [
        "x.new_empty((n, x.shape[0]))",
        "if mask is None: pass",
        "if x is not mask and n: pass",
        "if x.shape[0]: pass",
        "float(n)",
        "bool(x.is_cuda)",
        "x.to(mask.dtype)",
        "y = x.contiguous()\n    y.copy_(x)",
        "torch.where(x, x, x)",
    ],
)
def test_what_is_allowed_is_no_offence(line: str) -> None:
    assert offences(f"def f(x: Tensor, mask: Tensor | None, n: int) -> None:\n    {line}\n") == []


@pytest.mark.parametrize("source", CUDA_SOURCES, ids=lambda path: str(path.name))
def test_no_cuda_source_waits_or_allocates(source: Path) -> None:
    assert offences_in_cpp(source.read_text()) == []


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("cudaDeviceSynchronize();", True),
        ("cudaStreamSynchronize(stream);", True),
        ("cudaMalloc(&p, 4);", True),
        ("cudaMallocAsync(&p, 4, stream);", True),
        ("cudaMemcpy(a, b, 4, cudaMemcpyDeviceToHost);", True),
        ("x.item<float>()", True),
        ("x.cpu()", True),
        ("x.to(at::kCPU)", True),
        ('printf("here");', True),
        ("cudaGetLastError();", False),
        ("cudaFuncSetAttribute(kernel, attribute, 4);", False),
        ("cudaMemsetAsync(p, 0, 4, stream);", False),
        ("// cudaMalloc is not called", False),
        ("at::empty({M, N}, x.options())", False),
    ],
)
def test_made_offences_in_cuda_sources_are_found(line: str, wrong: bool) -> None:
    assert bool(offences_in_cpp(line)) is wrong


@WATCHED
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("way", WAYS)
def test_no_op_that_runs_waits(way: str) -> None:
    assert_nothing_waits(way)


@WATCHED
@pytest.mark.usefixtures("gpu")
def test_an_op_that_waits_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = triton_launches.launch

    def waits(kernel: Any, grid: Any, tile: Any, near: Tensor, *given: Any, **by: Any) -> None:
        near.sum().item()
        launch(kernel, grid, tile, near, *given, **by)

    monkeypatch.setattr(triton_launches, "launch", waits)
    watched = run_watched("epilogue", "gelu", torch.randn(2, 3), [torch.randn(4, 3)])
    assert "item" in watched.waiting
