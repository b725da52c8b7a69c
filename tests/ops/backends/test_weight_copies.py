"""Modes that keep a copy of the weights (packed, mkldnn) never compute with old ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from tests.support.helpers import kernel_runs
from torch import Tensor, nn

from torchweld.core.blocks import parse_spec
from torchweld.core.errors import UnsupportedError
from torchweld.ops.backends import BACKENDS, Backend, Form, Runner, reference_backend
from torchweld.ops.backends.weight_watch import WeightWatch, watchable

NAMED = {backend.name: backend for backend in BACKENDS}
COPYING = [
    pytest.param(
        NAMED[name],
        mode,
        id=f"{name}-{mode}",
        marks=pytest.mark.skipif(
            bool(
                NAMED[name].unsupported_reasons(
                    Form(kind="chain", forms=parse_spec("gelu"), sizes=((1, 1),)),
                    (),
                    torch.float32,
                    torch.device("cpu"),
                    mode,
                )
            ),
            reason="not available on this machine",
        ),
    )
    for name, mode in (("cpu", "packed"), ("torch", "mkldnn"))
]
FORMS = parse_spec("gelu/b;identity/b")


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(24, 40), nn.GELU(), nn.Linear(40, 17))


def built(backend: Backend, mode: str, model: nn.Module) -> Runner:
    tensors = list(model.parameters())
    return backend.build(Form.of("chain", FORMS, tensors), tensors, mode)


def optimizer_step(kind: str) -> Callable[[nn.Module], None]:
    def step(model: nn.Module) -> None:
        with torch.enable_grad():
            loss = model(torch.randn(4, 24)).square().sum()
            model.zero_grad()
            loss.backward()
        options: dict[str, Any] = {kind: True} if kind else {}
        torch.optim.AdamW(model.parameters(), lr=0.1, **options).step()

    return step


def load_copy(model: nn.Module) -> None:
    model.load_state_dict(mlp().state_dict())


def through_numpy(model: nn.Module) -> None:
    weight = model.get_parameter("0.weight").detach().numpy()
    weight += numpy.float32(1.0)


def one_block_of_rows(model: nn.Module) -> None:
    model.get_parameter("0.weight").data[10:13] += 1.0


def one_block_of_columns(model: nn.Module) -> None:
    model.get_parameter("0.weight").data[:, 5:7] += 1.0


def new_data(model: nn.Module) -> None:
    for p in model.parameters():
        p.data = torch.randn_like(p)


def new_data_again_and_again(model: nn.Module) -> None:
    for _ in range(30):  # the allocator gives old addresses back
        new_data(model)


EDITS: dict[str, Callable[[nn.Sequential], object]] = {
    "optimizer": optimizer_step(""),
    "foreach optimizer": optimizer_step("foreach"),
    "fused optimizer": optimizer_step("fused"),
    "load_state_dict": load_copy,
    "in place": lambda model: model.get_parameter("0.weight").mul_(2.0),
    "bias in place": lambda model: model.get_parameter("2.bias").add_(1.0),
    "through .data": lambda model: model.get_parameter("2.weight").data.mul_(2.0),
    "bias through .data": lambda model: model.get_parameter("0.bias").data.add_(1.0),
    "through numpy": through_numpy,
    "rows": one_block_of_rows,
    "columns": one_block_of_columns,
    "new data": new_data,
    "new data again": new_data_again_and_again,
    "nn.init": lambda model: nn.init.ones_(model.get_parameter("0.weight")),
}


@torch.no_grad()
@pytest.mark.parametrize(("backend", "mode"), COPYING)
@pytest.mark.parametrize("edit", list(EDITS))
def test_stale_weights_are_never_used(backend: Backend, mode: str, edit: str) -> None:
    model, x = mlp(), torch.randn(3, 24)
    run = built(backend, mode, model)
    torch.testing.assert_close(run(x), model(x))
    before = run(x)
    EDITS[edit](model)
    after = run(x)
    torch.testing.assert_close(after, model(x))
    assert isinstance(after, Tensor)
    assert isinstance(before, Tensor)
    assert not torch.allclose(after, before)


@pytest.mark.parametrize(("backend", "mode"), COPYING)
@torch.inference_mode()
def test_inference_tensors_without_versions_are_watched_too(backend: Backend, mode: str) -> None:
    model, x = mlp(), torch.randn(3, 24)
    weight = model.get_parameter("0.weight")
    assert weight.is_inference()
    run = built(backend, mode, model)
    torch.testing.assert_close(run(x), model(x))
    weight.mul_(2.0)
    torch.testing.assert_close(run(x), model(x))


@torch.no_grad()
@pytest.mark.parametrize(("backend", "mode"), COPYING)
def test_the_copy_is_kept_while_nothing_changes(
    backend: Backend, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = mlp(), torch.randn(3, 24)
    run = built(backend, mode, model)
    made = 0

    def counting(self: WeightWatch, tensors: list[Tensor], *, contents: bool) -> None:
        nonlocal made
        made += 1
        original(self, tensors, contents=contents)

    original = WeightWatch.__init__
    monkeypatch.setattr(WeightWatch, "__init__", counting)
    first, second = run(x), run(x)
    assert isinstance(first, Tensor)
    assert isinstance(second, Tensor)
    assert torch.equal(second, first)
    assert made == 0
    model.get_parameter("0.weight").add_(1.0)
    run(x)
    run(x)
    assert made == 1


@pytest.mark.parametrize(("backend", "mode"), COPYING)
def test_its_memory_is_told(backend: Backend, mode: str) -> None:
    model = mlp()
    weights = sum(p.nbytes for p in model.parameters() if p.dim() == 2)
    assert weights <= built(backend, mode, model).copied_bytes < 4 * weights
    assert backend.build(*natural(model)).copied_bytes == 0


def natural(model: nn.Module) -> tuple[Form, list[Tensor]]:
    tensors: list[Tensor] = list(model.parameters())
    return Form.of("chain", FORMS, tensors), tensors


@pytest.mark.parametrize(("backend", "mode"), COPYING)
def test_gradients_are_eagers(backend: Backend, mode: str) -> None:
    model, x = mlp(), torch.randn(3, 24, requires_grad=True)
    y = built(backend, mode, model)(x)
    assert isinstance(y, Tensor)
    inputs = [x, *model.parameters()]
    grads = torch.autograd.grad(y.square().sum(), inputs)
    expected = torch.autograd.grad(model(x).square().sum(), inputs)
    for grad, other in zip(grads, expected, strict=True):
        torch.testing.assert_close(grad, other)


@torch.no_grad()
@pytest.mark.parametrize(("backend", "mode"), COPYING)
def test_autocast_is_eagers(backend: Backend, mode: str) -> None:
    model, x = mlp(), torch.randn(3, 24)
    run = built(backend, mode, model)
    with torch.autocast("cpu", torch.bfloat16):
        y = run(x)
        expected = model(x)
    assert isinstance(y, Tensor)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y, expected, atol=0.01, rtol=0.02)  # hidden values may be fp32


@pytest.mark.parametrize(("backend", "mode"), COPYING)
def test_what_cannot_be_watched_is_refused(backend: Backend, mode: str) -> None:
    class Odd(Tensor):
        pass

    tensors = [t.detach().as_subclass(Odd) for t in mlp().parameters()]
    with pytest.raises(UnsupportedError, match=f"mode {mode}.*keeps a copy.*another mode"):
        backend.build(Form.of("chain", FORMS, tensors), tensors, mode)


@pytest.mark.skipif(bool(NAMED["cpu"].unavailable()), reason="needs the compiled kernels")
@torch.no_grad()
def test_the_kernels_that_run_are_those_of_the_mode() -> None:
    model, x = mlp(), torch.randn(3, 24)
    natural_run, packed_run = (built(NAMED["cpu"], mode, model) for mode in ("natural", "packed"))
    with kernel_runs("natural", "repacked"):
        natural_run(x)
    with kernel_runs("packed"):
        packed_run(x)
    with torch.enable_grad(), kernel_runs("natural", "repacked"):
        packed_run(x)


# ---- the watch itself ----


@pytest.mark.parametrize(
    "shape", [(1,), (15,), (16,), (1000,), (1, 1), (3, 5), (3, 100), (100, 3), (64, 64), (257, 431)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_an_unseen_edit_of_a_whole_tensor_is_noticed(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    for tensor in (torch.randn(shape).to(dtype), torch.randn(shape[::-1]).to(dtype).movedim(0, -1)):
        watch = WeightWatch([tensor], contents=True)
        assert watch.unchanged()
        tensor.data.mul_(2.0)
        assert not watch.unchanged()


def test_short_dimensions_are_seen_element_by_element() -> None:
    tensor = torch.randn(3, 5)
    for index in range(15):
        watch = WeightWatch([tensor], contents=True)
        tensor.data.view(-1)[index] += 1.0
        assert not watch.unchanged(), index


def test_nan_is_not_a_change_and_minus_zero_is() -> None:
    tensor = torch.tensor([torch.nan, 0.0])
    watch = WeightWatch([tensor], contents=True)
    assert watch.unchanged()
    tensor.data[1] = -0.0
    assert not watch.unchanged()


def test_without_contents_only_the_place_counts() -> None:
    tensor = torch.randn(4, 4)
    watch = WeightWatch([tensor], contents=False)
    tensor.mul_(2.0)
    assert watch.unchanged()
    tensor.data = tensor.data.t()
    assert not watch.unchanged()
    tensor.data = tensor.data.t()
    assert watch.unchanged()
    tensor.data = tensor.data[:2]
    assert not watch.unchanged()


def test_a_counted_edit_is_noticed_wherever_it_is() -> None:
    tensor = torch.randn(64, 64)
    watch = WeightWatch([tensor], contents=True)
    tensor[1, 2] += 1.0
    assert not watch.unchanged()


def test_an_address_given_back_by_the_allocator_does_not_deceive() -> None:
    tensor = torch.randn(64, 64)
    watch = WeightWatch([tensor], contents=False)
    for _ in range(50):
        tensor.data = torch.empty(64, 64)
        assert not watch.unchanged()


def test_watchable_is_what_has_memory_of_its_own() -> None:
    assert watchable([torch.randn(2), nn.Parameter(torch.randn(2))])
    assert not watchable([torch.randn(2).to_sparse()])
    seen = []

    def look(t: Tensor) -> Tensor:
        seen.append(watchable([t]))
        return t

    torch.vmap(look)(torch.randn(2, 3))
    assert seen == [False]


@torch.no_grad()
@pytest.mark.parametrize(("backend", "mode"), COPYING)
def test_a_group_and_odd_layouts(backend: Backend, mode: str) -> None:
    forms = parse_spec("identity/b;silu/t;gelu/b/interleaved;relu/separate")
    whole = torch.randn(40, 24)
    tensors = [
        whole[::2],
        torch.randn(40)[::2],
        torch.randn(24, 9),
        torch.randn(14, 24),
        torch.randn(14),
        torch.randn(5, 48)[:, ::2],
        torch.randn(24, 5).t(),
    ]
    run = backend.build(Form.of("group", forms, tensors), tensors, mode)
    for x in (torch.randn(24), torch.randn(2, 3, 24), torch.randn(24, 6).t(), torch.randn(0, 24)):
        for y, expected in zip(run(x), reference_backend.group(x, tensors, forms), strict=True):
            torch.testing.assert_close(y, expected)
            assert y.is_contiguous()
