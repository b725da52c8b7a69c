"""What torchweld's ops for training have to do, from the shapes that a recording has."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.support.dispatched_ops import ops_of
from tests.support.helpers import ISAS
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import torchweld as tw
from torchweld.profiles.accounting.op_costs import work_of
from torchweld.profiles.attributing.op_kinds import kind_of
from torchweld.profiles.profile import Op
from torchweld.profiles.profile import Tensor as Shape

pytestmark = pytest.mark.skipif(not ISAS, reason="no compiled kernels on this machine")
K, H, N = 8, 24, 12
SHAPES = [(6, K), (N, K), (2, 3, K)]  # with N rows, saved values look like weights
MLPS: dict[str, dict[str, object]] = {
    "plain": {"sizes": (K, H, N)},
    "no bias": {"sizes": (K, H, N), "bias": False},
    "gated": {"sizes": (K, H, N), "gated": True},
    "deep": {"sizes": (K, H, H, N), "dropout": 0.5},
    "one": {"sizes": (K, N)},
}


def ours(run: Callable[[], object]) -> list[Op]:
    return [op for op in ops_of(run) if op.name.startswith("torchweld::")]


def counted(run: Callable[[], object]) -> int:
    """The FLOPs that torch's counter finds, by the formulas of the ops."""
    with FlopCounterMode(display=False) as counter:
        run()
    total: int = counter.get_total_flops()
    return total


def step(model: nn.Module, x: Tensor) -> Callable[[], None]:
    def run() -> None:
        model.zero_grad()
        model(x).sum().backward()

    return run


@pytest.mark.parametrize("frozen", ["nothing", "x", "weights"])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", MLPS)
def test_shapes_and_memory_tell_the_flops_of_a_step(
    kind: str, shape: tuple[int, ...], recompute: bool, frozen: str
) -> None:
    model = tw.FusedMLP(**MLPS[kind], recompute=recompute)  # type: ignore[arg-type]
    model.requires_grad_(frozen != "weights")
    run = step(model, torch.randn(shape, requires_grad=frozen != "x"))
    works = [work_of(op, kind_of(op.name)) for op in ours(run)]
    assert sum(work.flops or 0 for work in works) == counted(run)


@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_from_the_pool_count_too(recompute: bool) -> None:
    """They come from memory of ours, which torch's allocator does not know."""
    model = tw.FusedMLP((256, 512, 256), recompute=recompute)
    run = step(model, torch.randn(2, 256, requires_grad=True))
    run()
    assert tw.gradient_memory().in_use
    (backward,) = [op for op in ours(run) if op.name == "torchweld::chain_backward"]
    assert 512 * 256 * 4 in [size for _, size in backward.written]
    works = [work_of(op, kind_of(op.name)) for op in ours(run)]
    assert sum(work.flops or 0 for work in works) == counted(run)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_group(shape: tuple[int, ...]) -> None:
    layers = [tw.Layer(torch.randn(n, K, requires_grad=True)) for n in (5, 7, 7)]
    x = torch.randn(shape, requires_grad=True)

    def run() -> None:
        torch.cat(tw.linears(x, layers), -1).sum().backward()

    works = [work_of(op, kind_of(op.name)) for op in ours(run)]
    assert sum(work.flops or 0 for work in works) == counted(run)


def test_without_memory_all_gradients_count() -> None:
    x = torch.randn(6, K, requires_grad=True)
    model = tw.FusedMLP((K, H, N), recompute=False)
    (backward,) = (op for op in ours(step(model, x)) if op.name.endswith("backward"))
    told, backward.written = work_of(backward, "fused"), ()
    untold = work_of(backward, "fused")
    assert untold.flops == told.flops == 2 * 2 * 6 * H * (K + N)
    assert untold.written_bytes == 4 * (6 * K + H * (K + N))


def test_masks_are_random_numbers() -> None:
    assert kind_of("torchweld::dropout_mask") == "random"
    for name in ("training", "saving", "backward"):
        assert kind_of(f"torchweld::chain_{name}") == "fused"


@pytest.mark.parametrize(
    "name", ["chain_saving", "group_saving", "chain_backward", "group_backward", "dropout_mask"]
)
def test_arguments_that_do_not_fit_are_survived(name: str) -> None:
    """Traces hold anything: scalars for tensors, no shapes, no arguments."""
    shapes = [None, (), (0,), (3,), (0, 4), (2, 3), (3, 2), (2, 3, 4)]
    odd = [
        None if shape is None else Shape(shape=shape, dtype="float32", strides=None)
        for shape in shapes
    ]
    for count in range(5):
        for shift in range(len(odd)):
            given = tuple(odd[(shift + i) % len(odd)] for i in range(count))
            op = Op(
                name=f"torchweld::{name}",
                module=0,
                parent=-1,
                phase="backward",
                start_us=0.0,
                raw_us=1.0,
                total_us=1.0,
                self_us=1.0,
                inputs=given,
            )
            work = work_of(op, kind_of(op.name))
            assert work.flops is None or work.flops >= 0
            assert work.read_bytes >= 0 <= work.written_bytes
