"""What a GPU does without a plan, and what decides about its kernels: flags, seeds, versions.

In Triton's interpreter, on CPU tensors; with `make gpu-test` on a GPU.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from tests.support.gpu_device import on_real_gpu
from tests.support.helpers import all_within, random_tensors
from torch import Tensor

from torchweld.core.blocks import parse_spec
from torchweld.machine import gpu_identity
from torchweld.numerics.numerical_rule import check_block
from torchweld.ops.gpu import gpu_support, gpu_ways, kernel_tiles, triton_launches
from torchweld.ops.gpu.gpu_launches import forget, launched
from torchweld.ops.gpu.kernel_tiles import Tile

pytestmark = pytest.mark.usefixtures("gpu")
SPEC = "gelu/b;identity/b"


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


@pytest.fixture
def matmul_precision() -> Iterator[Callable[[str], None]]:
    """Sets torch's flag; what a machine or a user's settings say does not count."""
    flags = torch.backends.cuda.matmul
    before = flags.fp32_precision

    def put(precision: str) -> None:
        flags.fp32_precision = precision

    yield put
    flags.fp32_precision = before


# Triton has TF32 on NVIDIA's GPUs and on one of AMD's.
GPUS = {
    "NVIDIA": (None, "", "tf32"),
    "MI300": ("7.1", "gfx942:sramecc+:xnack-", "tf32"),
    "MI250": ("7.1", "gfx90a:sramecc+:xnack-", "ieee"),
    "MI350": ("7.1", "gfx950", "ieee"),
    "RX 7900": ("7.1", "gfx1100", "ieee"),
}


@pytest.mark.parametrize("gpu_name", GPUS)
@pytest.mark.parametrize("flag", ["ieee", "tf32", "none"])
def test_tf32_is_used_where_triton_has_it(
    monkeypatch: pytest.MonkeyPatch,
    matmul_precision: Callable[[str], None],
    gpu_name: str,
    flag: str,
) -> None:
    hip, arch, with_tf32 = GPUS[gpu_name]
    properties = SimpleNamespace(gcnArchName=arch)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    matmul_precision(flag)
    expected = with_tf32 if flag == "tf32" else "ieee"
    assert triton_launches.fp32_precision(torch.empty(1)) == expected


@pytest.mark.parametrize("way", ["epilogue", "narrow"])
def test_tf32_is_used_if_torch_says_so_and_not_otherwise(
    monkeypatch: pytest.MonkeyPatch, matmul_precision: Callable[[str], None], way: str
) -> None:
    """Forward and backward, on a GPU that has it."""
    monkeypatch.setattr(triton_launches, "_amd_arch", lambda near: "gfx942")
    asked: list[str] = []
    launch = triton_launches.launch

    def noted(*given: Any, **by: Any) -> None:
        if "PRECISION" in by:
            asked.append(by["PRECISION"])
        launch(*given, **by)

    monkeypatch.setattr(triton_launches, "launch", noted)
    given = leaves()
    for precision in ("ieee", "tf32"):
        matmul_precision(precision)
        y = torch.ops.torchweld.chain_way(given[0], given[1:], SPEC, way)
        torch.autograd.grad(y.sum(), given)
    products = 3 if way == "epilogue" else 2  # the backward has one, between the two layers
    assert asked == ["ieee"] * products + ["tf32"] * products


@pytest.mark.parametrize(
    ("version", "works"),
    [
        ("3.7.1", True),
        ("3.9.0", True),
        ("3.7.1+rocm7.1", True),
        ("3.8.0", False),
        ("3.70.0", False),
        (None, False),
    ],
)
def test_other_versions_of_triton_are_told(
    monkeypatch: pytest.MonkeyPatch, version: str | None, works: bool
) -> None:
    monkeypatch.setattr(gpu_support, "triton_version", lambda: version)
    problems = gpu_support.triton_problems()
    assert (problems == []) is works
    assert works or (version or "not installed") in problems[0]


def test_rocms_triton_has_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"pytorch-triton-rocm": "3.7.1"}

    def version(name: str) -> str:
        if name not in there:
            raise importlib.metadata.PackageNotFoundError(name)
        return there[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    gpu_identity.triton_version.cache_clear()
    try:
        assert gpu_identity.triton_version() == "3.7.1"
        there.clear()
        gpu_identity.triton_version.cache_clear()
        assert gpu_identity.triton_version() == triton.__version__
    finally:
        gpu_identity.triton_version.cache_clear()
