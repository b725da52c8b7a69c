"""Training where it may go wrong: several threads, a forked child, too little memory, no kernels.

What could hang or die runs in a process of its own.
"""

from __future__ import annotations

import os
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from tests.support.helpers import ISAS, at_once, run_python, using_threads
from tests.support.training_steps import KEEPING, backward_runs, same_bits
from torch import Tensor

import torchweld as tw
from torchweld.machine.kernel_build import PACKAGE

needs_kernels = pytest.mark.skipif(not ISAS, reason="no compiled kernels on this machine")
keeping = pytest.mark.parametrize("keep", KEEPING)


@needs_kernels
@keeping
@pytest.mark.parametrize("openmp", [1, 2])
def test_several_threads_train_at_once(openmp: int, keep: str) -> None:
    """Two blocks of their own, and one that is shared: each as if it were alone."""
    shared = tw.FusedMLP((64, 256, 64), recompute=KEEPING[keep])
    own = [tw.FusedMLP((64, 256, 64), recompute=KEEPING[keep]) for _ in range(2)]
    tasks = [
        (mlp, torch.randn(rows, 64))
        for mlp, rows in zip([*own, shared, shared], (3, 40, 9, 8), strict=True)
    ]

    def grads(mlp: tw.FusedMLP, x: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(mlp(x).square().sum(), list(mlp.parameters()))

    def train(mlp: tw.FusedMLP, x: Tensor, right: tuple[Tensor, ...]) -> None:
        for _ in range(10):
            with backward_runs():
                same_bits(grads(mlp, x), right)

    with using_threads(1):
        expected = [grads(*task) for task in tasks]

    with using_threads(openmp):
        at_once([partial(train, *task, right) for task, right in zip(tasks, expected, strict=True)])


AFTER_FORK = """
import os, signal, torch, torchweld as tw
from torchweld import ops
torch.set_num_threads(2)
torch.manual_seed(0)
mlp = tw.FusedMLP((256, 1024, 256))
x = torch.randn(32, 256, requires_grad=True)
def grads():
    return torch.autograd.grad(mlp(x).square().sum(), [x, *mlp.parameters()])
expected = grads()
run = ops.compiled.last_run()
assert run["threads"] == 2 and run["pass"] == "backward", run
child = os.fork()
if child == 0:
    signal.alarm(60)
    status = 1
    try:
        found = [grads() for _ in range(2)]
        run = ops.compiled.last_run()
        assert run["threads"] == 1 and run["pass"] == "backward", run
        torch.set_num_threads(1)  # torch's own ops would wait for threads that are not here
        assert all(torch.equal(a, b) for one in found for a, b in zip(one, expected))
        status = 0
    finally:
        os._exit(status)
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
assert all(torch.equal(a, b) for a, b in zip(grads(), expected))
assert ops.compiled.last_run()["threads"] == 2
print(code)
"""


@needs_kernels
def test_a_forked_child_trains_alone() -> None:
    assert run_python(AFTER_FORK) == "0\n"


LIMITED = """
import sys, torch, torchweld as tw
from torchweld import ops
torch.set_num_threads(2)
torch.ones(1 << 20).add_(1)  # the pool is there
failed = 0
for rows, sizes in ((8, (512, 1024, 512)), (512, (64, 64, 64))):
    for recompute in (False, True):
        mlp = tw.FusedMLP(sizes, recompute=recompute)
        x = torch.randn(rows, sizes[0], requires_grad=True)
        inputs = [x, *mlp.parameters()]
        y = mlp(x)
        ops.compiled.limit_scratch(0)
        try:
            torch.autograd.grad(y.sum(), inputs, retain_graph=True)
        except (MemoryError, RuntimeError) as error:
            failed += 1
            assert isinstance(error, MemoryError) or "bad_alloc" in str(error), error
        ops.compiled.limit_scratch(sys.maxsize)
        found = torch.autograd.grad(y.sum(), inputs)
        plain = mlp.down(torch.nn.functional.gelu(mlp.up(x)))
        for a, b in zip(found, torch.autograd.grad(plain.sum(), inputs)):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-3)
print(failed)
"""


@needs_kernels
def test_out_of_memory_in_backward() -> None:
    """The backward fails; the process, the graph and later backwards do not."""
    assert int(run_python(LIMITED)) >= 1, "nothing ran out of memory: the test is blind"


COMPOSED = """
import torch, torchweld as tw
from torchweld import ops
assert ops.compiled is None
for recompute in (False, True, None):
    torch.manual_seed(0)
    mlp = tw.FusedMLP((13, 21, 7), dropout=0.3, recompute=recompute)
    optimizer = torch.optim.AdamW(mlp.parameters(), fused=True)
    plain = torch.nn.Sequential(mlp.up, torch.nn.GELU(), torch.nn.Dropout(0.3), mlp.down)
    for _ in range(2):
        x = torch.randn(9, 13, requires_grad=True)
        inputs = [x, *mlp.parameters()]
        grads = []
        for run in (mlp, plain):
            torch.manual_seed(1)
            grads.append(torch.autograd.grad(run(x).square().sum(), inputs))
        for a, b in zip(*grads):
            torch.testing.assert_close(a, b)
        mlp(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
print("right")
"""


def test_without_kernels_the_composition_trains(tmp_path: Path) -> None:
    unwanted = shutil.ignore_patterns("*.so", "_build_info.json", "__pycache__")
    shutil.copytree(PACKAGE, tmp_path / "torchweld", ignore=unwanted)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    assert run_python(COMPOSED, env=environment) == "right\n"
