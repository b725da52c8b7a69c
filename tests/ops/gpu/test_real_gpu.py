"""What only a GPU can show: a call in a CUDA graph, and the second of two GPUs.

None of it can run without one: `make gpu-test`.
"""

from __future__ import annotations

import pytest
import torch
from tests.support.gpu_device import on_real_gpu
from tests.support.helpers import all_within, random_tensors
from torch import Tensor

from torchweld.core.blocks import format_spec, parse_spec
from torchweld.numerics.numerical_rule import check_block
from torchweld.ops.gpu import gpu_support
from torchweld.ops.gpu.gpu_ways import WAYS

pytestmark = [
    pytest.mark.skipif(not on_real_gpu(), reason="it needs a GPU; run make gpu-test"),
    pytest.mark.usefixtures("gpu"),
]
SPEC = "gelu/b;identity/b"
ALL_WAYS = (*WAYS, "cuda")


def chain(way: str, x: Tensor, tensors: list[Tensor]) -> Tensor:
    if way == "cuda" and not gpu_support.has_cuda_kernels():
        pytest.skip("torchweld was built without its CUDA C++ kernels")
    y: Tensor = torch.ops.torchweld.chain_way(x, tensors, SPEC, way, False)
    return y


@pytest.mark.parametrize("way", ALL_WAYS)
def test_a_captured_step_gives_what_a_call_gives(way: str) -> None:
    """Forward and backward in one graph, replayed on other values."""
    tensors = [t.requires_grad_() for t in random_tensors((64, 128, 64), parse_spec(SPEC))]
    x = torch.randn(40, 64)

    def step() -> list[Tensor]:
        y = chain(way, x, tensors)
        return [y.detach(), *torch.autograd.grad(y, tensors, torch.ones_like(y))]

    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    x.copy_(torch.randn(40, 64))
    wanted = step()
    graph.replay()
    torch.testing.assert_close(captured, wanted)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="it needs two GPUs")
@pytest.mark.parametrize("way", ALL_WAYS)
def test_tensors_of_the_second_gpu_are_computed_there(way: str) -> None:
    forms = parse_spec(SPEC)
    with torch.device("cuda:1"):
        tensors = random_tensors((64, 128, 64), forms)
        x, grad = torch.randn(40, 64), torch.randn(40, 64)
        y = chain(way, x, tensors)
        assert y.device == x.device == torch.device("cuda:1")
        assert torch.cuda.current_device() == 0
        assert format_spec(forms) == SPEC
        checks = check_block(
            lambda x, tensors: chain(way, x, list(tensors)), x, tensors, forms, grads=[grad]
        )
    all_within(checks)
