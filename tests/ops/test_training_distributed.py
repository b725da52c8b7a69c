"""Several processes that train together: gradients reach DDP and FSDP through autograd."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.support.helpers import ISAS, run_python

pytestmark = [
    pytest.mark.skipif(not ISAS, reason="no compiled kernels on this machine"),
    pytest.mark.slow,
]

# Two ranks, each with half of the rows; their gradients are those of all rows in one process. The
# last block's are large enough for the pool.
RANKS = """
import copy, sys, torch, torch.distributed as dist, torchweld as tw
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torchweld import ops

def backwards():
    return ops.compiled.last_run()["backwards"]

def sharded(model):
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)

WRAPPED = {
    "ddp": DistributedDataParallel,
    "ddp views": lambda m: DistributedDataParallel(m, gradient_as_bucket_view=True),
    "fsdp": sharded,
}

def work(rank, file, kind, recompute):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(7, 16),
        tw.FusedMLP((16, 33, 16), recompute=recompute),
        tw.FusedMLP((16, 40, 512), "silu", gated=True, recompute=recompute),
        tw.FusedMLP((512, 1024, 512), recompute=recompute),
    )
    x = torch.randn(8, 7)
    expected = torch.autograd.grad(model(x).square().mean(), list(model.parameters()))
    assert tw.gradient_memory().in_use == 2 * 512 * 1024 * 4
    wrapped = WRAPPED[kind](copy.deepcopy(model))
    before = backwards()
    for step in range(2):
        wrapped.zero_grad(set_to_none=step == 0)
        wrapped(x[rank::2]).square().mean().backward()
    assert backwards() == before + 6
    for parameter, wanted in zip(wrapped.parameters(), expected):
        grad = parameter.grad
        torch.testing.assert_close(grad.full_tensor() if kind == "fsdp" else grad, wanted)
    # gloo's group waits for its peer when it is freed; that has to happen while both are there.
    del wrapped, parameter, grad
    dist.barrier()
    dist.destroy_process_group()

work(int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4] == "recompute")
print("right")
"""


@pytest.mark.parametrize("keep", ["save", "recompute"])
@pytest.mark.parametrize("kind", ["ddp", "ddp views", "fsdp"])
def test_two_ranks(kind: str, keep: str, tmp_path: Path) -> None:
    def rank(number: int) -> str:
        return run_python(RANKS, str(number), str(tmp_path / "meeting"), kind, keep)

    with ThreadPoolExecutor(2) as both:
        assert list(both.map(rank, range(2))) == ["right\n"] * 2
