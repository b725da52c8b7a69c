"""A backend that raises while it is verified or timed is a trial with its reason, not the end."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchweld as tw
from torchweld.ops.backends import backend_named
from torchweld.plans import choice_timing
from torchweld.plans.plan import Trial
from torchweld.welds.weld_decisions import Choice

X = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))
FAILED = "it failed while it was verified: "


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 13), nn.ReLU(), nn.Linear(13, 7)).eval()


def trials_of(plan: tw.Plan) -> dict[Choice, Trial]:
    return {one.choice: one for one in plan.planned[0].tunings[0].trials}


ERRORS = {
    "RuntimeError: Failed to find C compiler.": RuntimeError("Failed to find C compiler.\nmore"),
    "AssertionError": AssertionError(),
    "ImportError: libcuda.so: cannot open": ImportError("libcuda.so: cannot open"),
    "OutOfMemoryError: no memory": torch.OutOfMemoryError("no memory"),
}


@pytest.mark.parametrize("said", ERRORS)
@pytest.mark.parametrize("where", ["build", "call", "backward"])
def test_the_plan_goes_on_with_the_others(
    monkeypatch: pytest.MonkeyPatch, where: str, said: str, tmp_path: Path
) -> None:
    backend = backend_named("cpu")
    right = backend.build

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, y: Tensor) -> Tensor:
            return y.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            raise ERRORS[said]

    def build(form: Any, tensors: Sequence[Tensor], mode: str | None = None) -> Any:
        if where == "build":
            raise ERRORS[said]
        runner = right(form, tensors, mode)

        class Runner:
            copied_bytes = 0

            def __call__(self, x: Tensor) -> Any:
                if where == "call":
                    raise ERRORS[said]
                y = runner(x)
                assert isinstance(y, Tensor)
                return Fails.apply(y) if y.requires_grad else y

        return Runner()

    monkeypatch.setattr(backend, "build", build)
    training = where == "backward"
    made = tw.plan(mlp().train(training), X, force=True, training=training)
    found = trials_of(made)
    failed = [trial for choice, trial in found.items() if choice.backend == "cpu"]
    assert failed
    for trial in failed:
        assert (trial.verified, trial.verdict) == (False, "cannot serve")
        assert trial.reason == FAILED + said
    assert training or len(found) > len(failed)
    made.save(tmp_path / "plan.json")
    assert tw.Plan.load(tmp_path / "plan.json") == made


def test_what_failed_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not remembered: another time there may be a compiler, or memory."""
    backend = backend_named("cpu")
    with monkeypatch.context() as patch:
        patch.setattr(backend, "build", lambda *_: (_ for _ in ()).throw(RuntimeError("not now")))
        first = tw.plan(mlp(), X, budget_s=2.0)
    assert any(t.reason == f"{FAILED}RuntimeError: not now" for t in trials_of(first).values())
    second = tw.plan(mlp(), X, budget_s=2.0)
    assert not any(t.reason.startswith(FAILED) for t in trials_of(second).values())


def test_a_backend_that_fails_when_it_is_timed_is_not_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = choice_timing.time_ways

    def time_ways(model: Any, runs: Any, rest: Any, ways: Any, **by: Any) -> Any:
        if Choice(backend="cpu") in ways:
            raise RuntimeError("out of resource: shared memory")
        return right(model, runs, rest, ways, **by)

    monkeypatch.setattr(choice_timing, "time_ways", time_ways)
    found = trials_of(tw.plan(mlp(), X, budget_s=3.0, remember=False))
    trial = found[Choice(backend="cpu")]
    assert (trial.verified, trial.verdict) == (True, "not measured")
    said = "it failed while it was timed: RuntimeError: out of resource: shared memory"
    assert trial.reason == said
