"""The pool of weight gradients: reused from step to step, limited, and given back on request."""

from __future__ import annotations

import gc
import resource
from collections.abc import Iterator

import pytest
import torch
from tests.support.helpers import ISAS, last_run
from torch import nn

import torchweld as tw
from torchweld.core.errors import TorchweldError

SIZES = (512, 1024, 512)
WEIGHT_BYTES = 512 * 1024 * 4


@pytest.fixture(autouse=True)
def own_limit() -> Iterator[None]:
    limit = tw.gradient_memory().limit
    gc.collect()
    tw.release_gradient_memory()
    yield
    tw.limit_gradient_memory(limit)
    tw.release_gradient_memory()


def step(mlp: nn.Module, rows: int = 4) -> None:
    mlp.zero_grad(set_to_none=True)
    mlp(torch.randn(rows, SIZES[0])).sum().backward()


def test_freed_gradients_are_used_again() -> None:
    mlp = tw.FusedMLP(SIZES).train()
    before = tw.gradient_memory().in_use
    step(mlp)
    assert tw.gradient_memory().in_use - before == 2 * WEIGHT_BYTES
    first = {p.data_ptr() for n, p in mlp.named_parameters() if "weight" in n}
    places = {p.grad.data_ptr() for n, p in mlp.named_parameters() if "weight" in n}  # type: ignore[union-attr]
    mlp.zero_grad(set_to_none=True)
    assert tw.gradient_memory().in_use == before
    assert tw.gradient_memory().idle >= 2 * WEIGHT_BYTES
    step(mlp)
    again = {p.grad.data_ptr() for n, p in mlp.named_parameters() if "weight" in n}  # type: ignore[union-attr]
    assert again == places
    assert not again & first


def test_steps_do_not_fault_anew() -> None:
    mlp = tw.FusedMLP(SIZES).train()
    for _ in range(3):
        step(mlp)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        step(mlp)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    assert faults < 2 * WEIGHT_BYTES // resource.getpagesize()  # one step's worth, over five


def test_idle_memory_is_given_back() -> None:
    mlp = tw.FusedMLP(SIZES).train()
    step(mlp)
    mlp.zero_grad(set_to_none=True)
    assert tw.gradient_memory().idle > 0
    tw.release_gradient_memory()
    assert tw.gradient_memory().idle == 0
    step(mlp)


def test_gradients_survive_a_release_and_the_model() -> None:
    mlp = tw.FusedMLP(SIZES).train()
    step(mlp)
    grad = mlp.up.weight.grad
    assert grad is not None
    copy = grad.clone()
    del mlp
    gc.collect()
    tw.release_gradient_memory()
    assert torch.equal(grad, copy)


def test_a_limit_of_nothing_turns_the_pool_off() -> None:
    tw.limit_gradient_memory(0)
    mlp = tw.FusedMLP(SIZES).train()
    before = tw.gradient_memory()
    step(mlp)
    assert tw.gradient_memory() == before
    mlp.zero_grad(set_to_none=True)
    assert tw.gradient_memory().idle == 0


def test_no_more_than_the_limit_stays_idle() -> None:
    mlps = [tw.FusedMLP((2048, 6144, 2048)).train() for _ in range(2)]  # a slab each
    tw.limit_gradient_memory(110 << 20)
    for mlp in mlps:
        mlp(torch.randn(1, 2048)).sum().backward()
    for mlp in mlps:
        mlp.zero_grad(set_to_none=True)
    assert 0 < tw.gradient_memory().idle <= 110 << 20


@pytest.mark.parametrize("rows", [4, 2000])
def test_many_rows_leave_gradients_to_malloc(rows: int) -> None:
    mlp = tw.FusedMLP(SIZES).train()
    before = tw.gradient_memory().in_use
    step(mlp, rows)
    assert (tw.gradient_memory().in_use > before) is (rows == 4)


@pytest.mark.parametrize("limit", [-1, 1.5, True, "1GB", None])
def test_a_limit_that_is_no_number_of_bytes_is_refused(limit: object) -> None:
    with pytest.raises(TorchweldError, match="limit"):
        tw.limit_gradient_memory(limit)  # type: ignore[arg-type]


# ---- autocast ----


def cast_step(mlp: nn.Module, x: torch.Tensor, retain: bool = False) -> None:
    mlp.zero_grad(set_to_none=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = mlp(x)
    y.float().square().sum().backward(retain_graph=retain)


@pytest.mark.parametrize("recompute", [None, False, True])
def test_autocast_takes_copies_and_gradients_from_the_pool(recompute: bool | None) -> None:
    """16-bit copies while the graph lives; then the gradients, in the parameters' type."""
    mlp = tw.FusedMLP(SIZES, recompute=recompute).train()
    x = torch.randn(4, SIZES[0])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = mlp(x)
    assert tw.gradient_memory().in_use == WEIGHT_BYTES  # of both, at half the size
    y.sum().backward()
    del y
    assert tw.gradient_memory().in_use == 2 * WEIGHT_BYTES
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in mlp.parameters())


def test_casts_from_the_pool_change_no_bit() -> None:
    mlp = tw.FusedMLP(SIZES).train()
    x = torch.randn(4, SIZES[0])
    cast_step(mlp, x, retain=True)
    pooled = [p.grad.clone() for p in mlp.parameters() if p.grad is not None]
    tw.limit_gradient_memory(0)
    cast_step(mlp, x)
    for p, grad in zip(mlp.parameters(), pooled, strict=True):
        assert p.grad is not None
        assert torch.equal(p.grad, grad)


def test_second_derivatives_go_through_the_casts() -> None:
    mlp = tw.FusedMLP(SIZES).train()
    x = torch.randn(4, SIZES[0], requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = mlp(x)
    weight = mlp.up.weight
    (first,) = torch.autograd.grad(y.float().square().sum(), weight, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x)
    assert first.dtype == torch.float32
    assert second.isfinite().all()
    assert second.abs().sum() > 0


def test_an_edit_between_the_passes_gives_eager_s_gradients() -> None:
    """Autocast's copies are made in the forward; eager's products read them too."""
    mlp = tw.FusedMLP(SIZES).train()
    x = torch.randn(4, SIZES[0])
    cast_step(mlp, x)
    wanted = [p.grad.clone() for p in mlp.parameters() if p.grad is not None]
    mlp.zero_grad(set_to_none=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = mlp(x)
    with torch.no_grad():
        mlp.up.weight.mul_(3)
    y.float().square().sum().backward()
    for p, grad in zip(mlp.parameters(), wanted, strict=True):
        assert p.grad is not None
        assert torch.equal(p.grad, grad)


@pytest.mark.skipif(not ISAS, reason="no compiled kernels on this machine")
@pytest.mark.parametrize("trained", ["up.bias", "down.weight", "none"])
def test_autocast_computes_no_gradient_of_what_is_frozen(trained: str) -> None:
    mlp = tw.FusedMLP(SIZES).train()
    for name, parameter in mlp.named_parameters():
        parameter.requires_grad_(name == trained)
    x = torch.randn(4, SIZES[0], requires_grad=True)
    with torch.autocast("cpu", dtype=torch.float16):  # by our kernels everywhere, which count
        y = mlp(x)
    y.sum().backward()
    # The gradient goes through both layers to x; a weight takes one product more.
    assert last_run()["products"] == 2 + (trained == "down.weight")
    assert [n for n, p in mlp.named_parameters() if p.grad is not None] == (
        [] if trained == "none" else [trained]
    )
