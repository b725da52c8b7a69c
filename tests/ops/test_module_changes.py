"""FusedMLP after its user has changed it: parametrised, hooked, replaced, transformed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.helpers import ISAS, kernel_runs
from tests.support.mlps import LowRank, by_hand, same_as_by_hand
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.hooks import RemovableHandle

import torchweld as tw

pytestmark = [
    pytest.mark.skipif(not ISAS, reason="no compiled kernels on this machine"),
    pytest.mark.usefixtures("one_thread"),
]


class Doubled(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return 2 * w


def test_parametrized_weights() -> None:
    """The weight is a new tensor at each access: read where it lies, never packed."""
    mlp, x = tw.FusedMLP((7, 9, 5)).eval(), torch.randn(4, 7)
    with torch.no_grad():
        plain = mlp(x)
        parametrize.register_parametrization(mlp.up, "weight", Doubled())
        same_as_by_hand(mlp, x, "natural")
        assert not torch.allclose(mlp(x), plain)
        mlp.get_parameter("up.parametrizations.weight.original").mul_(3.0)
        same_as_by_hand(mlp, x, "natural")
    same_as_by_hand(mlp, x, "natural")
    mlp(x).sum().backward()
    assert mlp.get_parameter("up.parametrizations.weight.original").grad is not None
    parametrize.remove_parametrizations(mlp.up, "weight")
    with torch.no_grad():
        same_as_by_hand(mlp, x, "packed")


def test_weight_norm_and_orthogonal() -> None:
    for wrap in (parametrizations.weight_norm, parametrizations.orthogonal):
        mlp = tw.FusedMLP((7, 9, 5), gated=True).eval()
        wrap(mlp.gate)
        with torch.no_grad():
            same_as_by_hand(mlp, torch.randn(4, 7), "natural")


def called_one_by_one(mlp: tw.FusedMLP, x: Tensor, because: str) -> Tensor:
    """It says so once, then does it silently: a second warning would be an error here."""
    with kernel_runs(calls=0):
        with pytest.warns(UserWarning, match=f"runs its children one by one, because {because}"):
            y: Tensor = mlp(x)
        assert torch.equal(mlp(x), y)
    return y


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("kind", ["forward", "forward pre", "full backward"])
def test_hooks_on_children_are_called(kind: str, gated: bool, grad: bool) -> None:
    mlp, x = tw.FusedMLP((7, 9, 5), gated=gated).eval(), torch.randn(4, 7)
    x.requires_grad_(grad)
    seen: list[str] = []
    registers: dict[str, Callable[[Any], RemovableHandle]] = {
        "forward": mlp.up.register_forward_hook,
        "forward pre": mlp.up.register_forward_pre_hook,
        "full backward": mlp.up.register_full_backward_hook,
    }
    with torch.set_grad_enabled(grad):
        before = mlp(x)
        handle = registers[kind](lambda *_: seen.append("seen"))
        if kind == "full backward" and not grad:  # nothing will call it
            with kernel_runs("packed"):
                assert torch.equal(mlp(x), before)
            return
        words = "backward hooks" if kind == "full backward" else f"{kind} hooks"
        y = called_one_by_one(mlp, x, f"up has {words}")
        torch.testing.assert_close(y, before)
        if kind == "full backward":
            y.sum().backward()
        assert len(seen) == (1 if kind == "full backward" else 2)
        handle.remove()
        same_as_by_hand(mlp, x, "natural" if grad else "packed")


def test_a_hook_may_change_the_result() -> None:
    mlp, x = tw.FusedMLP((7, 9, 5)).eval(), torch.randn(4, 7)
    mlp.down.register_forward_hook(lambda module, args, y: y + 1.0)
    with torch.no_grad():
        y = called_one_by_one(mlp, x, "down has forward hooks")
        torch.testing.assert_close(y, by_hand(mlp, x))


def test_hooks_on_the_module_itself_do_not_stop_fusion() -> None:
    mlp, x, seen = tw.FusedMLP((7, 9, 5)).eval(), torch.randn(4, 7), []
    mlp.register_forward_hook(lambda module, args, y: seen.append(y))
    with torch.no_grad():
        same_as_by_hand(mlp, x, "packed")
    assert len(seen) == 1


class Shouting(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 10 * super().forward(x)


class Quiet(nn.Linear):
    """A subclass that computes what Linear computes."""


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("which", ["up", "down"])
@pytest.mark.parametrize(
    ("replacement", "name"),
    [(LowRank, "LowRank"), (lambda old: nn.Sequential(old, nn.ReLU()), "Sequential")],
)
def test_a_replaced_child_is_called(
    replacement: Callable[[nn.Linear], nn.Module], name: str, which: str, gated: bool
) -> None:
    mlp, x = tw.FusedMLP((7, 9, 5), gated=gated).eval(), torch.randn(4, 7)
    with torch.no_grad():
        before = mlp(x)
        original = getattr(mlp, which)
        setattr(mlp, which, replacement(original))
        y = called_one_by_one(mlp, x, f"{which} is a {name}")
        torch.testing.assert_close(y, by_hand(mlp, x))
        assert not torch.allclose(y, before)
        setattr(mlp, which, original)
        with kernel_runs("packed"):
            assert torch.equal(mlp(x), before)


def test_a_child_in_the_list_may_be_replaced_too() -> None:
    mlp, x = tw.FusedMLP((7, 6, 6, 5)).eval(), torch.randn(4, 7)
    with torch.no_grad():
        mlp(x)
        layer = mlp.layers[1]
        assert isinstance(layer, nn.Linear)
        mlp.layers[1] = LowRank(layer)
        torch.testing.assert_close(called_one_by_one(mlp, x, "1 is a LowRank"), by_hand(mlp, x))
        mlp.layers[1] = nn.Linear(6, 6)
        same_as_by_hand(mlp, x, "packed")


def test_a_child_with_a_forward_of_its_own_is_called() -> None:
    mlp, x = tw.FusedMLP((7, 9, 5)).eval(), torch.randn(4, 7)
    with torch.no_grad():
        mlp(x)
        plain = mlp.up.forward
        mlp.up.forward = lambda x: 10 * plain(x)  # type: ignore[assignment, method-assign]
        y = called_one_by_one(mlp, x, "up has a forward of its own")
        torch.testing.assert_close(y, by_hand(mlp, x))
        del mlp.up.forward
        same_as_by_hand(mlp, x, "packed")
        mlp.up = Shouting(7, 9)
        torch.testing.assert_close(called_one_by_one(mlp, x, "up is a Shouting"), by_hand(mlp, x))
        mlp.up = Quiet(7, 9)
        same_as_by_hand(mlp, x, "natural", "packed")


def test_a_replaced_child_keeps_dropout_and_gradients() -> None:
    mlp = tw.FusedMLP((7, 9, 5), dropout=0.5)
    adapter = LowRank(mlp.up)
    mlp.up = adapter  # type: ignore[assignment]
    x = torch.randn(4, 7)
    torch.manual_seed(1)
    with pytest.warns(UserWarning, match="up is a LowRank"):
        y = mlp(x)
    torch.manual_seed(1)
    torch.testing.assert_close(y, by_hand(mlp, x))
    y.sum().backward()
    assert adapter.a.weight.grad is not None


def test_a_child_of_other_sizes_or_bias() -> None:
    mlp, x = tw.FusedMLP((7, 9, 5)).eval(), torch.randn(4, 7)
    with torch.no_grad():
        mlp(x)
        mlp.up, mlp.down = nn.Linear(7, 12), nn.Linear(12, 3, bias=False)
        same_as_by_hand(mlp, x, "natural", "packed")
        mlp.up.bias = None  # type: ignore[assignment]
        same_as_by_hand(mlp, x, "natural", "packed")
    mlp.train()
    same_as_by_hand(mlp, x, "natural")


def test_functional_call() -> None:
    mlp, x = tw.FusedMLP((7, 9, 5)).eval(), torch.randn(4, 7)
    other = tw.FusedMLP((7, 9, 5)).eval()
    state: dict[str, Tensor] = dict(other.named_parameters())
    with torch.no_grad():
        before = mlp(x)
        with kernel_runs():
            y = torch.func.functional_call(mlp, state, (x,))
        torch.testing.assert_close(y, by_hand(other, x))
        with kernel_runs("packed"):
            assert torch.equal(mlp(x), before)


def test_an_ensemble_by_vmap_over_functional_call() -> None:
    base = tw.FusedMLP((7, 9, 5)).eval()
    models = [tw.FusedMLP((7, 9, 5)) for _ in range(3)]
    params, buffers = torch.func.stack_module_state(models)
    x = torch.randn(4, 7)

    def run(params: dict[str, Tensor], x: Tensor) -> Tensor:
        y: Tensor = torch.func.functional_call(base, (params, buffers), (x,))
        return y

    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            ys = torch.func.vmap(run, in_dims=(0, None))(params, x)
            for y, model in zip(ys, models, strict=True):
                torch.testing.assert_close(y, by_hand(model, x))


def test_forward_mode_in_eval_without_gradients() -> None:
    mlp, x = tw.FusedMLP((7, 9, 5), dtype=torch.float64).eval(), torch.randn(4, 7).double()
    direction = torch.randn_like(x)
    with torch.no_grad():
        mlp(x)
        got = torch.func.jvp(mlp, (x,), (direction,))
        expected = torch.func.jvp(lambda x: by_hand(mlp, x), (x,), (direction,))
    torch.testing.assert_close(got, expected)


def test_a_tensor_subclass_goes_through_its_own_door() -> None:
    seen: list[str] = []

    class Logged(Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(str(function))
            return super().__torch_function__(function, types, args, kwargs or {})

    mlp = tw.FusedMLP((7, 9, 5)).eval()
    x = torch.randn(4, 7)
    with torch.no_grad(), kernel_runs("natural"):
        y = mlp(x.as_subclass(Logged))
    assert isinstance(y, Logged)
    assert any("chain" in name for name in seen)
    torch.testing.assert_close(y.as_subclass(Tensor), by_hand(mlp, x))


def test_inside_a_model_that_trains() -> None:
    """The loss falls as it does with plain layers: the same steps from the same start."""
    torch.manual_seed(0)
    mlp = tw.FusedMLP((8, 32, 4), activation="silu")
    plain = nn.Sequential(copy.deepcopy(mlp.up), nn.SiLU(), copy.deepcopy(mlp.down))
    x, target = torch.randn(64, 8), torch.randn(64, 4)
    losses = []
    for model in (mlp, plain):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(20):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), target)
            loss.backward()
            optimizer.step()
        losses.append(loss.detach())
    torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-5)
    assert losses[0] < 0.9 * F.mse_loss(torch.zeros_like(target), target)
