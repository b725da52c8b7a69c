"""Training loops around FusedMLP: precision, checkpoints, compilers, optimizers, threads, forks.

Each loop is run beside the same loop on the children, and ends where that ends.
"""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.helpers import ISAS, run_python, using_threads
from tests.support.mlps import by_hand
from tests.support.training_steps import (
    KEEPING,
    all_close,
    at_once,
    backward_runs,
    grads_in,
    same_bits,
)
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils.checkpoint import checkpoint

import torchweld as tw
from torchweld.machine.kernel_build import PACKAGE

pytestmark = [
    pytest.mark.skipif(not ISAS, reason="no compiled kernels on this machine"),
    pytest.mark.usefixtures("one_thread"),
]

keeping = pytest.mark.parametrize("keep", KEEPING)


def mlp_of(keep: str, **how: Any) -> tw.FusedMLP:
    return tw.FusedMLP((13, 21, 7), recompute=KEEPING[keep], **how)


def twins(keep: str, **how: Any) -> list[tuple[nn.Module, Callable[[Tensor], Tensor]]]:
    """The same MLP twice: as one op, and as its children one by one."""
    mlp = mlp_of(keep, **how)
    plain = copy.deepcopy(mlp)
    return [(mlp, mlp), (plain, partial(by_hand, plain))]


# ---- precision ----


@keeping
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("gated", [False, True])
def test_autocast_gives_parameters_gradients_of_their_own_type(
    gated: bool, dtype: torch.dtype, keep: str
) -> None:
    """In float32, and as close to float64's as eager's."""
    x, g = torch.randn(33, 13), torch.randn(33, 7)
    found = []
    for module, run in twins(keep, gated=gated, activation="silu"):
        own = x.clone().requires_grad_()
        with torch.autocast("cpu", dtype=dtype):
            y = run(own)
        assert y.dtype == dtype
        with backward_runs() if run is module else torch.autocast("cpu", enabled=False):
            y.float().backward(g)
        found.append([own.grad, *grads_in(module)])
        exact = copy.deepcopy(module).double()
    assert isinstance(exact, tw.FusedMLP)
    wide = x.double().requires_grad_()
    reference = torch.autograd.grad(by_hand(exact, wide), [wide, *exact.parameters()], g.double())
    for ours, eagers, right in zip(*found, reference, strict=True):
        assert ours is not None
        assert eagers is not None
        assert ours.dtype == torch.float32
        error, allowed = ((t.double() - right).square().mean().sqrt() for t in (ours, eagers))
        assert error <= 1.5 * allowed + 1e-6
        assert allowed < 0.1 * right.square().mean().sqrt()


@keeping
def test_a_gradient_scaler_scales_and_skips(keep: str) -> None:
    ended = []
    for module, run in twins(keep):
        torch.manual_seed(1)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
        for step in range(4):
            optimizer.zero_grad()
            x, target = torch.randn(9, 13), torch.randn(9, 7)
            if step == 2:
                x[0, 0] = torch.inf  # this step is left out, and the scale is halved
            before = [p.detach().clone() for p in module.parameters()]
            with torch.autocast("cpu", dtype=torch.float16):
                loss = F.mse_loss(run(x).float(), target)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            moved = [not torch.equal(a, b) for a, b in zip(before, module.parameters())]  # noqa: B905
            assert moved == [step != 2] * len(before)
        assert scaler.get_scale() == 2.0**7
        ended.append([p.detach() for p in module.parameters()])
    all_close(*ended, rtol=1e-2, atol=1e-3)


@keeping
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_modules_of_every_dtype_train(dtype: torch.dtype, keep: str) -> None:
    mlp = mlp_of(keep, dtype=dtype)
    x = torch.randn(9, 13).to(dtype)
    with backward_runs():
        mlp(x).square().sum().backward()
    for parameter in mlp.parameters():
        assert parameter.grad is not None
        assert parameter.grad.dtype == dtype


# ---- checkpoints ----


@keeping
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_blocks(use_reentrant: bool, keep: str) -> None:
    """The same bits as without: the forward that runs again is the same forward."""
    mlp, x = mlp_of(keep), torch.randn(9, 13, requires_grad=True)
    inputs = [x, *mlp.parameters()]
    expected = torch.autograd.grad(mlp(x).square().sum(), inputs)
    y = checkpoint(mlp, x, use_reentrant=use_reentrant)
    with backward_runs():
        y.square().sum().backward()
    same_bits([t.grad for t in inputs], expected)


# ---- optimizers ----

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "sgd fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
}


@keeping
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name: str, to_none: bool, accumulate: int, keep: str) -> None:
    ended = []
    for module, run in twins(keep, dtype=torch.float64):
        torch.manual_seed(2)
        optimizer = OPTIMIZERS[name](list(module.parameters()))
        for _ in range(3):
            optimizer.zero_grad(set_to_none=to_none)
            for _ in range(accumulate):
                loss = (run(torch.randn(9, 13).double()) - 1).square().mean()
                loss.backward()
            nn.utils.clip_grad_norm_(module.parameters(), 0.5)
            optimizer.step()
        ended.append([p.detach() for p in module.parameters()])
    all_close(*ended)


@keeping
def test_training_and_evaluation_in_turn(keep: str) -> None:
    """Packed copies come with eval and go with train; none outlives the weights it is of."""
    mlp, x = mlp_of(keep), torch.randn(9, 13)
    optimizer = torch.optim.AdamW(mlp.parameters(), lr=0.05, fused=True)
    for _ in range(3):
        mlp.train()
        assert mlp.packed_bytes == 0
        optimizer.zero_grad()
        with backward_runs():
            (mlp(x) - 1).square().mean().backward()
        mlp.eval()
        with torch.no_grad():
            stale = mlp(x)
            assert mlp.packed_bytes > 0
        with backward_runs():  # gradients in eval come from the weights themselves
            mlp(x).sum().backward()
        optimizer.step()
        with torch.no_grad():
            expected = by_hand(mlp, x)
            torch.testing.assert_close(mlp(x), expected)
        assert not torch.allclose(stale, expected)


# ---- torch.compile ----


@pytest.fixture
def own_compilations() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def recording() -> tuple[Callable[..., Any], list[list[str]]]:
    """A backend that runs graphs as they are, and the ops of each: forward's, then backward's."""
    graphs: list[list[str]] = []

    def note(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        graphs.append([str(n.target) for n in graph.graph.nodes if n.op == "call_function"])
        return graph

    return aot_autograd(fw_compiler=note, bw_compiler=note), graphs


@pytest.mark.usefixtures("own_compilations")
@keeping
@pytest.mark.parametrize("gated", [False, True])
def test_the_compiled_step_has_our_backward(gated: bool, keep: str) -> None:
    (mlp, _), (plain, run) = twins(keep, gated=gated, activation="silu")
    x, target = torch.randn(9, 13), torch.randn(9, 7)
    backend, graphs = recording()

    def loss(x: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(mlp(x), target)

    compiled = torch.compile(loss, fullgraph=True, backend=backend)
    for _ in range(2):
        mlp.zero_grad()
        value = compiled(x, target)
        with backward_runs():
            value.backward()
    F.mse_loss(run(x), target).backward()
    all_close(grads_in(mlp), grads_in(plain))
    forward, backward = graphs
    assert [t for t in forward if "torchweld" in t] == ["torchweld.chain_saving.default"]
    assert [t for t in backward if "torchweld" in t] == ["torchweld.chain_backward.default"]
    assert not [t for t in forward + backward if "mm" in t.split(".")]


@pytest.mark.usefixtures("own_compilations")
@keeping
def test_a_compiled_step_with_its_optimizer(keep: str) -> None:
    ended = []
    for module, run in twins(keep):
        torch.manual_seed(4)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

        def step(
            x: Tensor,
            run: Callable[[Tensor], Tensor] = run,
            optimizer: torch.optim.Optimizer = optimizer,
        ) -> Tensor:
            optimizer.zero_grad()
            loss = (run(x) - 1).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        stepping = torch.compile(step, backend="aot_eager") if run is module else step
        ended.append([stepping(torch.randn(9, 13)) for _ in range(3)])
    all_close(*ended)


@pytest.mark.usefixtures("own_compilations")
@pytest.mark.slow
@keeping
def test_inductor_trains(keep: str) -> None:
    (mlp, _), (plain, run) = twins(keep)
    model = torch.compile(nn.Sequential(nn.LayerNorm(13), mlp), fullgraph=True)
    x = torch.randn(9, 13)
    for _ in range(2):
        mlp.zero_grad()
        loss = model(x).square().sum()
        with backward_runs():
            loss.backward()
    run(F.layer_norm(x, (13,))).square().sum().backward()
    all_close(grads_in(mlp), grads_in(plain))


# ---- threads, forks, memory, no kernels ----


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
    expected = [torch.autograd.grad(m(x).square().sum(), list(m.parameters())) for m, x in tasks]

    def train(mlp: tw.FusedMLP, x: Tensor, right: tuple[Tensor, ...]) -> None:
        for _ in range(10):
            loss = mlp(x).square().sum()
            with backward_runs():
                found = torch.autograd.grad(loss, list(mlp.parameters()))
            same_bits(found, right)

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
        for _ in range(2):
            assert all(torch.equal(a, b) for a, b in zip(grads(), expected))
        run = ops.compiled.last_run()
        assert run["threads"] == 1 and run["pass"] == "backward", run
        status = 0
    finally:
        os._exit(status)
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
assert all(torch.equal(a, b) for a, b in zip(grads(), expected))
assert ops.compiled.last_run()["threads"] == 2
print(code)
"""


def test_a_forked_child_trains_alone() -> None:
    assert run_python(AFTER_FORK) == "0\n"


LIMITED = """
import sys, torch, torchweld as tw
from torchweld import ops
torch.set_num_threads(2)
torch.ones(1 << 20).add_(1)  # the pool is there
failed = 0
for rows, sizes in ((8, (768, 1536, 768)), (64, (768, 3072, 768)), (512, (64, 64, 64))):
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
