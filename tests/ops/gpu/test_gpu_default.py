"""What a GPU does without a plan, and what decides about its kernels: flags, tiles, versions.

In Triton's interpreter, on CPU tensors; with `make gpu-test` on a GPU.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.gpu_device import on_real_gpu
from tests.support.helpers import all_within, random_tensors
from torch import Tensor

from torchweld.core.blocks import parse_spec
from torchweld.numerics.numerical_rule import check_block
from torchweld.ops.gpu import gpu_support, gpu_ways, kernel_tiles, tile_tuning, triton_launches
from torchweld.ops.gpu.gpu_launches import forget, launched
from torchweld.ops.gpu.kernel_tiles import Tile

pytestmark = pytest.mark.usefixtures("gpu")
SPEC = "gelu/b;identity/b"


@pytest.fixture
def default_way() -> Iterator[None]:
    """`chain` and its training on CPU tensors are what they are on a GPU."""
    if on_real_gpu():
        yield
        return
    library = torch.library.Library("torchweld", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch tells that the kernels for CPUs are set aside
        gpu_ways.register_default(library, "CPU")
    try:
        yield
    finally:
        library._destroy()


def leaves(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    tensors = random_tensors((7, 9, 5), parse_spec(SPEC), dtype)
    return [t.requires_grad_() for t in (torch.randn(4, 7).to(dtype), *tensors)]


@pytest.mark.usefixtures("default_way")
@pytest.mark.parametrize("op", ["chain", "chain_training"])
def test_chain_takes_torchs_products_and_one_pointwise_kernel(op: str) -> None:
    call = getattr(torch.ops.torchweld, op)
    x, *tensors = leaves()
    with torch.no_grad():
        call(x, tensors, SPEC)
    assert launched() == ["torchweld_pointwise"]
    forget()
    all_within(
        check_block(
            lambda x, tensors: call(x, list(tensors), SPEC),
            x.detach(), [t.detach() for t in tensors], parse_spec(SPEC),
            grads=[torch.randn(4, 5)],
        )
    )  # fmt: skip
    assert set(launched()) == {"torchweld_pointwise", "torchweld_pointwise_backward"}


@pytest.mark.skipif(on_real_gpu(), reason="on a GPU it is not put there by a test")
def test_the_default_is_gone_afterwards() -> None:
    x, *tensors = leaves()
    torch.ops.torchweld.chain(x, tensors, SPEC)
    assert launched() == []


@pytest.mark.parametrize("way", gpu_ways.WAYS)
def test_gradients_only_for_what_needs_them(way: str) -> None:
    x, *tensors = (t.detach() for t in leaves())
    tensors[3].requires_grad_()  # the last bias: nothing below it is computed
    y = torch.ops.torchweld.chain_way(x, tensors, SPEC, way)
    forget()
    (grad,) = torch.autograd.grad(y, [tensors[3]], torch.ones_like(y))
    torch.testing.assert_close(grad, torch.full((5,), 4.0))
    assert launched() == []


@pytest.mark.parametrize("way", gpu_ways.WAYS)
def test_two_backwards_give_the_same_bits(way: str) -> None:
    given = leaves()
    y = torch.ops.torchweld.chain_way(given[0], given[1:], SPEC, way)
    grad = torch.randn_like(y)
    first = torch.autograd.grad(y, given, grad, retain_graph=True)
    second = torch.autograd.grad(y, given, grad)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def kept(mask: Tensor, features: int) -> Tensor:
    bits = (mask[..., None].int() >> torch.arange(8)) & 1
    return bits.flatten(-2)[..., :features].bool()


def test_dropout_masks_follow_the_seed_and_not_the_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.empty(300, 1)
    torch.manual_seed(3)
    first = triton_launches.dropout_mask(x, 37, 0.25)
    again = triton_launches.dropout_mask(x, 37, 0.25)
    monkeypatch.setattr(kernel_tiles, "DROPOUT", Tile(rows=64, columns=2))
    torch.manual_seed(3)
    other_tiles = triton_launches.dropout_mask(x, 37, 0.25)
    assert torch.equal(first, other_tiles)
    assert not torch.equal(first, again)
    share = kept(first, 37).double().mean().item()
    assert abs(share - 0.75) < 5 * (0.75 * 0.25 / (300 * 37)) ** 0.5
    assert not kept(first, 40)[:, 37:].any()


def test_tf32_is_used_if_torch_says_so_and_not_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    launch = triton_launches.launch

    def noted(*given: Any, **by: Any) -> None:
        asked.append(by["PRECISION"])
        launch(*given, **by)

    monkeypatch.setattr(triton_launches, "launch", noted)
    x, *tensors = (t.detach() for t in leaves())
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        for precision in ("ieee", "tf32"):
            torch.backends.cuda.matmul.fp32_precision = precision
            torch.ops.torchweld.chain_way(x, tensors, SPEC, "narrow")
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert asked == ["ieee", "tf32"]


@pytest.mark.parametrize(
    ("version", "works"), [("3.7.1", True), ("3.9.0", True), ("3.8.0", False), (None, False)]
)
def test_other_versions_of_triton_are_told(
    monkeypatch: pytest.MonkeyPatch, version: str | None, works: bool
) -> None:
    monkeypatch.setattr(gpu_support, "triton_version", lambda: version)
    problems = gpu_support.triton_problems()
    assert (problems == []) is works
    assert works or (version or "not installed") in problems[0]


class TunedGpu:
    """Tiles are timed by this table, not by a device."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.timed: list[Tile] = []
        self.ran: list[Tile] = []
        monkeypatch.setattr(tile_tuning, "may_time", lambda near: True)
        monkeypatch.setattr(tile_tuning, "device_seconds", self.seconds)
        monkeypatch.setattr(tile_tuning, "_file", lambda device: folder / "tiles.json")
        tile_tuning._kept.cache_clear()

    def seconds(self, run: Callable[[], None], near: Tensor) -> float:
        run()
        self.timed.append(self.ran.pop())
        return abs(self.timed[-1].rows - 32) + 1e-6 * self.timed[-1].columns

    def product(self, rows: int) -> None:
        x = torch.empty(rows, 4, dtype=torch.bfloat16)
        tile_tuning.run_best("linear", False, x, rows, (64, 4), self.ran.append)


def test_a_new_product_is_timed_once_and_kept_on_disk(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gpu = TunedGpu(monkeypatch, tmp_path)
    gpu.product(100)
    assert tuple(gpu.timed) == kernel_tiles.candidates("linear", False, torch.bfloat16)
    assert [tile.rows for tile in gpu.ran] == [32]
    gpu.product(120)  # of the same class
    assert len(gpu.timed) == 6
    tile_tuning._kept.cache_clear()  # as a new process does
    gpu.product(100)
    assert len(gpu.timed) == 6
    assert [tile.rows for tile in gpu.ran] == [32, 32, 32]
    (tmp_path / "tiles.json").write_text("no tiles")
    tile_tuning._kept.cache_clear()
    gpu.product(100)
    assert len(gpu.timed) == 12
    tile_tuning._kept.cache_clear()


def test_without_timing_the_shape_decides() -> None:
    ran: list[Tile] = []
    x = torch.empty(100, 4, dtype=torch.bfloat16)
    tile_tuning.run_best("linear", False, x, 100, (), ran.append)
    assert ran == [kernel_tiles.stated("linear", False, torch.bfloat16, 100)]
    assert ran[0].rows == 128
    assert kernel_tiles.stated("linear", False, torch.bfloat16, 1).rows == 16
