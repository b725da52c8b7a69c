"""Counts are exact, the same in every grad mode, and agree with torch's allocator."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from torchweld.profiles.dispatch_counts import count


@pytest.fixture
def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_every_op_and_buffer_of_eager_is_counted(mlp: nn.Module, mode: type) -> None:
    x = torch.randn(2, 3, 8)
    with mode():
        counts = count(lambda: mlp(x))
    linear = ("aten.view", "aten.t", "aten.addmm", "aten.view")
    assert counts.ops == (*linear, "aten.gelu", *linear)
    assert counts.buffers == 3
    assert counts.buffer_bytes == 6 * (16 + 16 + 4) * 4


def test_in_place_and_out_ops_make_no_buffer() -> None:
    x, out = torch.randn(4, 4), torch.empty(4, 4)
    assert count(lambda: x.relu_()).buffers == 0
    assert count(lambda: torch.mm(x, x, out=out)).buffers == 0
    assert count(lambda: x.t()[1:]).buffers == 0
    assert count(lambda: torch.mm(x, x)).buffers == 1


def test_a_buffer_in_the_place_of_a_freed_one_counts_again() -> None:
    x = torch.randn(64, 64)

    def freed_at_once() -> None:
        for _ in range(5):
            torch.relu(x)

    assert count(freed_at_once).buffers == 5


@torch.no_grad()
def test_buffers_are_what_the_allocator_hands_out(mlp: nn.Module) -> None:
    x = torch.randn(2, 3, 8)
    counts = count(lambda: mlp(x))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        mlp(x)
    allocated = [e.self_cpu_memory_usage for e in profiled.events() if e.self_cpu_memory_usage > 0]
    assert (counts.buffers, counts.buffer_bytes) == (len(allocated), sum(allocated))
