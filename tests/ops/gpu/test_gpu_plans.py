"""Plans that name a way of a GPU, with Triton's interpreter standing in for the device.

The plan verifies the way, the welded model runs its kernels, forward and backward, and what cannot
serve says why.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchweld as tw
from torchweld.cli.main import run
from torchweld.ops import backends
from torchweld.ops.backends import gpu_backends
from torchweld.ops.gpu import gpu_support, gpu_ways
from torchweld.ops.gpu.gpu_launches import forget, launched
from torchweld.plans.plan import Trial
from torchweld.welds.weld_decisions import Choice

pytestmark = pytest.mark.usefixtures("gpu")

FORWARD = {
    "cublas": {"torchweld_pointwise"},
    "triton": {"torchweld_linear"},
    "triton-narrow": {"torchweld_narrow"},
}
BACKWARD = {
    "cublas": {"torchweld_pointwise_backward"},
    "triton": {"torchweld_linear_backward"},
    "triton-narrow": {"torchweld_linear_backward"},
}
Prefer = Callable[[str], None]


class GatedMlp(nn.Module):
    """Gate and up are two Linears, with biases."""

    def __init__(self, K: int, H: int) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(K, H), nn.Linear(K, H), nn.Linear(H, K)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: nn.Sequential(nn.Linear(7, 11), nn.GELU(), nn.Linear(11, 7)),
    "gated": lambda: GatedMlp(7, 9),
}


@pytest.fixture
def prefer(monkeypatch: pytest.MonkeyPatch) -> Prefer:
    """Puts a backend before all others, as the first one that plans try."""

    def put_first(name: str) -> None:
        row = backends.backend_named(name)
        rest = [one for one in backends.BACKENDS if one is not row]
        monkeypatch.setattr(backends, "BACKENDS", (row, *rest))

    return put_first


def trials_of(plan: tw.Plan) -> dict[str, Trial]:
    (planned,) = plan.planned
    return {one.choice.backend: one for one in planned.tunings[0].trials}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("name", FORWARD)
def test_a_welded_model_runs_the_kernels_of_its_plan(
    prefer: Prefer, name: str, kind: str, tmp_path: Path
) -> None:
    prefer(name)
    model, x = MODELS[kind]().eval(), torch.randn(5, 7)
    with torch.no_grad():
        expected = model(x)
    made = tw.plan(model, x, force=True)
    (planned,) = made.planned
    assert planned.tunings[0].chosen == Choice(backend=name)
    trial = trials_of(made)[name]
    assert trial.verified
    assert [error.tensor for error in trial.errors] == ["output"]
    made.save(tmp_path / "plan.json")
    loaded = tw.Plan.load(tmp_path / "plan.json")
    assert loaded == made
    tw.apply(model, loaded)
    forget()
    with torch.no_grad():
        torch.testing.assert_close(model(x), expected)
    assert set(launched()) == FORWARD[name]
    assert tw.stats(model)[""].fused == 1
    tw.undo(model)
    forget()
    with torch.no_grad():
        assert torch.equal(model(x), expected)
    assert launched() == []


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("name", FORWARD)
def test_a_model_welded_for_training_runs_them_forward_and_backward(
    prefer: Prefer, name: str, kind: str, recompute: bool
) -> None:
    prefer(name)
    model, x = MODELS[kind](), torch.randn(5, 7, requires_grad=True)
    leaves = [x, *model.parameters()]
    y = model(x)
    wanted = torch.autograd.grad(y.square().sum(), leaves)
    made = tw.plan(model, x, training=True, force=True, recompute=recompute)
    assert made.planned[0].tunings[0].chosen == Choice(backend=name, recompute=recompute)
    judged = {error.tensor for error in trials_of(made)[name].errors}
    assert len(judged) == 2 + len(list(model.parameters()))  # output, x and every parameter
    tw.apply(model, made)
    forget()
    found = model(x)
    torch.testing.assert_close(found, y)
    assert set(launched()) == FORWARD[name]
    forget()
    grads = torch.autograd.grad(found.square().sum(), leaves)
    for ours, eager in zip(grads, wanted, strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-5)
    again = set(launched()) & FORWARD[name]
    # The pointwise kernel also computes a hidden value anew from what was kept.
    assert bool(again) is recompute or name == "cublas"
    assert set(launched()) >= BACKWARD[name]


@pytest.mark.parametrize("name", FORWARD)
def test_a_wrong_forward_is_refused_with_the_numbers(
    prefer: Prefer, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefer(name)
    way = type(gpu_ways.WAYS[gpu_backends_way(name)])
    right = way.forward

    def wrong(self: Any, layers: Any, x: Tensor, saved: Any, masks: Any) -> Tensor:
        return right(self, layers, x, saved, masks) * 1.001

    monkeypatch.setattr(way, "forward", wrong)
    model, x = MODELS["plain"]().eval(), torch.randn(5, 7)
    made = tw.plan(model, x, force=True)
    trial = trials_of(made)[name]
    assert (trial.verified, trial.verdict) == (False, "wrong")
    assert trial.reason.startswith("output: ")
    chosen = made.planned[0].tunings[0].chosen
    assert chosen is not None
    assert chosen.backend != name


@pytest.mark.parametrize("name", FORWARD)
def test_a_wrong_backward_is_refused_for_training_alone(
    prefer: Prefer, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefer(name)
    way: Any = type(gpu_ways.WAYS[gpu_backends_way(name)])
    right = way.hidden_gradients

    def wrong(self: Any, *given: Any, **by: Any) -> Any:
        made = right(self, *given, **by)
        made.gate.mul_(1.001)
        return made

    monkeypatch.setattr(way, "hidden_gradients", wrong)
    model, x = MODELS["plain"](), torch.randn(5, 7)
    trial = trials_of(tw.plan(model, x, training=True, force=True))[name]
    assert (trial.verified, trial.verdict) == (False, "wrong")
    assert not trial.reason.startswith("output: ")
    assert {error.tensor for error in trial.errors if not error.ok}
    assert trials_of(tw.plan(model.eval(), x, force=True))[name].verified


def gpu_backends_way(name: str) -> str:
    return next(b._way for b in gpu_backends.BACKENDS if b.name == name)  # type: ignore[attr-defined]


def test_a_plan_has_the_reasons_of_those_that_cannot_serve(
    prefer: Prefer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_support, "has_cuda_kernels", lambda: False)
    for name in ("triton", "triton-narrow", "cuda"):
        prefer(name)
    wide = nn.Sequential(nn.Linear(7, 300), nn.GELU(), nn.Linear(300, 7)).eval()
    found = trials_of(tw.plan(wide, torch.randn(2, 7), force=True))
    assert found["cuda"].verdict == found["triton-narrow"].verdict == "cannot serve"
    assert found["triton-narrow"].reason == "a layer is 300 wide; it takes up to 256"
    assert found["cuda"].reason.startswith("torchweld was built without its CUDA kernels")
    assert found["triton"].verified


def test_dropout_is_left_to_others(prefer: Prefer) -> None:
    prefer("triton")
    model = nn.Sequential(nn.Linear(7, 9), nn.GELU(), nn.Dropout(0.2), nn.Linear(9, 7))
    found = trials_of(tw.plan(model, torch.randn(4, 7), training=True, force=True))
    assert found["triton"].reason == "it does not apply dropout inside a block"
    chosen = [name for name, trial in found.items() if trial.verified]
    assert not set(chosen) & set(FORWARD)


def test_a_measured_plan_times_every_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which one is faster is the machine's affair."""
    monkeypatch.setattr(gpu_support, "has_cuda_kernels", lambda: False)
    model, x = MODELS["plain"]().eval(), torch.randn(3, 7)
    found = trials_of(tw.plan(model, x, budget_s=4.0, remember=False))
    for name in FORWARD:
        assert found[name].verified
        assert found[name].verdict in ("faster", "slower", "same", "behind", "not measured")
    assert found["cuda"].verdict == "cannot serve"


def test_info_lists_them_and_why_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def listed() -> dict[str, list[str]]:
        assert run(["info", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)["backends"]
        return {one["name"]: one["reasons"] for one in found}

    monkeypatch.setattr(gpu_support, "has_cuda_kernels", lambda: False)
    here = listed()
    assert [here[name] for name in FORWARD] == [[], [], []]
    (reason,) = here["cuda"]
    assert reason.startswith("torchweld was built without its CUDA kernels")
    assert reason.endswith("; build it where torch has CUDA and nvcc is found")
    monkeypatch.setattr(gpu_support, "device_problems", lambda: ("torch finds no GPU",))
    monkeypatch.setattr(gpu_support, "triton_version", lambda: None)
    none = listed()
    for name in FORWARD:
        assert none[name] == ["torch finds no GPU", "Triton is not installed; pip install triton"]
    assert none["cuda"][0] == "torch finds no GPU"
    assert run(["info"]) == 0
    out = capsys.readouterr().out
    assert "triton-narrow cannot be used here: torch finds no GPU; Triton is not" in out
