"""Threads of every kind: OpenMP's, Python's, none granted, and none left after a fork.

What could hang runs in a process of its own, with a time limit.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import pytest
import torch
from tests.support.helpers import (
    ISAS,
    NOT_PACKED,
    at_once,
    chain,
    kernel_runs,
    last_run,
    packed_chain,
    random_tensors,
    run_python,
    using_threads,
)
from tests.support.mlps import packs
from torch import Tensor

import torchweld as tw
from torchweld.core.blocks import parse_spec

pytestmark = pytest.mark.skipif(not ISAS, reason="no compiled kernels on this machine")

SPEC, SIZES = "gelu/b;identity/b", (256, 1024, 256)  # enough work to be shared
CALLS = 30


# ---- as many threads as asked for ----


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("rows", [1, 5, 64, 200])
def test_any_number_of_threads_gives_the_same_bits(rows: int, count: int) -> None:
    tensors = random_tensors(SIZES, parse_spec(SPEC))
    x = torch.randn(rows, SIZES[0])
    for op, weights in ((chain, NOT_PACKED), (packed_chain, {"packed"})):
        with using_threads(1), kernel_runs(*weights):
            expected = op(x, tensors, SPEC)
        with using_threads(count), kernel_runs(*weights):
            y = op(x, tensors, SPEC)
        assert last_run()["threads"] <= count
        assert torch.equal(y, expected)


def test_work_is_really_shared() -> None:
    tensors = random_tensors(SIZES, parse_spec(SPEC))
    with using_threads(2), kernel_runs("packed"):
        packed_chain(torch.randn(32, SIZES[0]), tensors, SPEC)
    assert last_run()["threads"] == 2
    assert last_run()["partition"] in ("rows", "columns")


FEWER_GRANTED = """
import sys, torch, torchweld as tw
from torchweld import ops
torch.set_num_threads(4)
torch.manual_seed(0)
mlp = tw.FusedMLP((256, 1024, 256)).eval()
with torch.no_grad():
    for rows in (1, 5, 64, 400):
        x = torch.randn(rows, 256)
        y = mlp(x)
        run = ops.compiled.last_run()
        assert run["weights"] == "packed", run
        assert run["threads"] <= int(sys.argv[1]), run
        torch.testing.assert_close(y, mlp.down(torch.nn.functional.gelu(mlp.up(x))))
    natural = ops.compiled.last_run()["calls"]
mlp(x)
run = ops.compiled.last_run()
assert run["calls"] == natural + 1 and run["threads"] <= int(sys.argv[1]), run
print("right")
"""


@pytest.mark.parametrize(
    ("setting", "most"),
    [({"OMP_THREAD_LIMIT": "1"}, 1), ({"OMP_THREAD_LIMIT": "3"}, 3), ({"OMP_DYNAMIC": "true"}, 4)],
    ids=["limit 1", "limit 3", "dynamic"],
)
def test_fewer_threads_than_asked_for(setting: dict[str, str], most: int) -> None:
    """OpenMP may grant fewer than torch says there are; all of the work is done all the same."""
    printed = run_python(FEWER_GRANTED, str(most), env={**os.environ, **setting})
    assert printed == "right\n"


# ---- several Python threads ----


@pytest.mark.parametrize("openmp", [1, 2])
def test_one_module_in_many_threads(openmp: int) -> None:
    mlp = tw.FusedMLP(SIZES).eval()
    xs = [torch.randn(rows, SIZES[0]) for rows in (1, 3, 8, 40)]
    with torch.no_grad():
        expected = [mlp(x) for x in xs]

    def body(x: Tensor, right: Tensor) -> Callable[[], None]:
        def run() -> None:
            with torch.no_grad():
                for _ in range(CALLS):
                    with kernel_runs("packed"):
                        y = mlp(x)
                    assert torch.equal(y, right)

        return run

    with using_threads(openmp):
        at_once([body(x, y) for x, y in zip(xs, expected, strict=True)])
    assert packs(mlp) == 1


def test_the_first_calls_of_a_module_in_many_threads() -> None:
    """All of them find no packed copy, and all make one."""
    x = torch.randn(5, SIZES[0])
    for _ in range(5):
        mlp = tw.FusedMLP(SIZES).eval()
        with torch.no_grad():
            expected = mlp.down(torch.nn.functional.gelu(mlp.up(x)))

        def body(mlp: tw.FusedMLP = mlp, expected: Tensor = expected) -> None:
            with torch.no_grad(), kernel_runs("packed"):
                y = mlp(x)
            torch.testing.assert_close(y, expected)

        at_once([body] * 4)


def test_copies_dropped_under_way() -> None:
    """A thread that has begun with a packed copy keeps it until it is done."""
    mlp, x = tw.FusedMLP(SIZES).eval(), torch.randn(7, SIZES[0])
    with torch.no_grad():
        expected = mlp(x)
    done = threading.Event()

    def work() -> None:
        try:
            with torch.no_grad():
                for _ in range(CALLS):
                    with kernel_runs("packed"):
                        y = mlp(x)
                    assert torch.equal(y, expected)
        finally:
            done.set()

    def drop() -> None:
        while not done.is_set():
            tw.repack(mlp)

    at_once([work, drop])


def test_weights_of_another_module_edited_meanwhile() -> None:
    still, edited = (tw.FusedMLP(SIZES).eval() for _ in range(2))
    x = torch.randn(7, SIZES[0])
    with torch.no_grad():
        expected = still(x)
    done = threading.Event()

    def work() -> None:
        try:
            with torch.no_grad():
                for _ in range(CALLS):
                    with kernel_runs("packed"):
                        y = still(x)
                    assert torch.equal(y, expected)
        finally:
            done.set()

    def edit() -> None:
        while not done.is_set():
            with torch.no_grad():
                for parameter in edited.parameters():
                    parameter.add_(0.01)
                with kernel_runs("packed"):
                    y = edited(x)
                torch.testing.assert_close(
                    y, edited.down(torch.nn.functional.gelu(edited.up(x))), rtol=1e-4, atol=1e-4
                )

    at_once([work, edit])


def test_training_in_one_thread_and_inference_in_another() -> None:
    trained, served = tw.FusedMLP(SIZES), tw.FusedMLP(SIZES).eval()
    x = torch.randn(7, SIZES[0])
    with torch.no_grad():
        expected = served(x)

    def train() -> None:
        optimizer = torch.optim.SGD(trained.parameters(), lr=1e-3)
        for _ in range(CALLS):
            with kernel_runs("natural"):
                loss = trained(x).square().mean()
            loss.backward()
            optimizer.step()

    def serve() -> None:
        with torch.no_grad():
            for _ in range(CALLS):
                with kernel_runs("packed"):
                    assert torch.equal(served(x), expected)

    at_once([train, serve, serve])


def test_errors_in_threads_reach_their_callers() -> None:
    mlp = tw.FusedMLP(SIZES).eval()

    def wrong() -> None:
        with torch.no_grad():
            for _ in range(CALLS):
                with pytest.raises(ValueError, match="features"):
                    mlp(torch.randn(2, 3))

    at_once([wrong] * 3)


# ---- after a fork ----

AFTER_FORK = """
import os, signal, sys, torch, torchweld as tw
from torchweld import ops
torch.set_num_threads(2)
torch.manual_seed(0)
mlp = tw.FusedMLP((256, 1024, 256)).eval()
x = torch.randn(32, 256)
with torch.no_grad():
    expected = mlp(x)
run = ops.compiled.last_run()
assert run["threads"] == 2 and run["weights"] == "packed", run
natural = mlp(x).detach()
child = os.fork()
if child == 0:
    signal.alarm(60)
    status = 1
    try:
        with torch.no_grad():
            assert torch.equal(mlp(x), expected)
            run = ops.compiled.last_run()
            assert run["weights"] == "packed" and run["threads"] == 1, run
            tw.repack(mlp)
            assert torch.equal(mlp(x), expected)
        calls = ops.compiled.last_run()["calls"]
        assert torch.equal(mlp(x), natural)
        run = ops.compiled.last_run()
        assert run["calls"] == calls + 1 and run["threads"] == 1, run
        grandchild = os.fork()
        if grandchild == 0:
            signal.alarm(60)
            os._exit(0 if torch.equal(mlp(x), natural) else 1)
        status = os.waitstatus_to_exitcode(os.waitpid(grandchild, 0)[1])
    finally:
        os._exit(status)
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
with torch.no_grad():
    assert torch.equal(mlp(x), expected)
assert ops.compiled.last_run()["threads"] == 2
print(code)
"""


def test_a_forked_child_computes_the_same_alone() -> None:
    assert run_python(AFTER_FORK) == "0\n"


IN_WORKERS = """
import torch, torchweld as tw
from torch.utils.data import DataLoader, Dataset
from torchweld import ops

class Embedded(Dataset):
    def __init__(self, mlp, x):
        self.mlp, self.x = mlp, x
    def __len__(self):
        return len(self.x)
    def __getitem__(self, i):
        with torch.no_grad():
            y = self.mlp(self.x[i])
        run = ops.compiled.last_run()
        assert run["weights"] == "packed" and run["threads"] == 1, run
        return y

if __name__ == "__main__":
    torch.set_num_threads(2)
    mlp = tw.FusedMLP((256, 1024, 256)).eval()
    x = torch.randn(8, 16, 256)
    with torch.no_grad():
        expected = mlp(x)
    assert ops.compiled.last_run()["threads"] == 2
    loader = DataLoader(
        Embedded(mlp, x), batch_size=2, num_workers=2, multiprocessing_context="fork", timeout=60
    )
    assert torch.equal(torch.cat(list(loader)), expected)
    print("right")
"""


def test_in_a_worker_of_a_data_loader() -> None:
    assert run_python(IN_WORKERS) == "right\n"
