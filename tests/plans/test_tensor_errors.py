"""The errors of single tensors in a plan: whose they are, which are kept, and what was before."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from torchweld.core.not_measured import NotMeasured
from torchweld.plans import kernel_choice
from torchweld.plans.choice_verifying import verify_choice
from torchweld.plans.kernel_choice import tuning_of
from torchweld.plans.plan import Plan, TensorError, Trial, Tuning
from torchweld.plans.plan_options import PlanOptions
from torchweld.plans.planner import plan, plan_with_rounds
from torchweld.welds.finding.find import find
from torchweld.welds.weld_decisions import Choice

NATURAL, PACKED = Choice(backend="cpu"), Choice(backend="cpu", packed=True)
ERROR = TensorError(tensor="output", eager=1e-7, fused=2e-7, of_allowed=0.5)
X = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 13), nn.ReLU(), nn.Linear(13, 7))


def trial(choice: Choice, verified: bool = True) -> Trial:
    why = NotMeasured("")
    return Trial(
        choice=choice,
        verified=verified,
        verdict="not known" if verified else "wrong",
        speed=why,
        error_ratio=0.5,
        errors=(ERROR,),
    )


def test_a_trial_has_the_error_of_the_output() -> None:
    model = mlp().eval()
    (block,) = (one for one in find(model, X) if not one.path)
    found = verify_choice(model, block, block.calls[0], NATURAL, training=False)
    (error,) = found.errors
    assert error.tensor == "output"
    assert 0 < error.eager < 1e-5
    assert 0 < error.fused < 1e-5
    assert error.of_allowed == pytest.approx(found.error_ratio, rel=1e-3)
    assert error.ok


def test_in_training_every_gradient_has_one() -> None:
    made = plan(mlp().train(), X, training=True, force=True)
    (one,) = (one for one in made.planned if not one.block.path)
    best = one.tunings[0].best
    assert best is not None
    assert [error.tensor for error in best.errors] == [
        "output",
        "grad x",
        *(f"grad {i}" for i in range(len(one.block.tensors))),
    ]
    assert all(error.ok and error.of_allowed <= 1 for error in best.errors)


def test_only_errors_of_the_choice_and_of_what_is_wrong_are_kept() -> None:
    tuning = tuning_of(3, [trial(NATURAL), trial(PACKED)], PACKED, "faster")
    assert [one.errors for one in tuning.trials] == [(), (ERROR,)]
    tuning = tuning_of(3, [trial(NATURAL, verified=False), trial(PACKED)])
    assert [one.errors for one in tuning.trials] == [(ERROR,), ()]


def test_the_whole_model_has_errors_too_and_rounds_if_they_are_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fresh = kernel_choice.choose

    def choose(rows: int, trials: list[Trial], over: str = "") -> Tuning:
        found = fresh(rows, trials, over)
        good = next(one.choice for one in trials if one.verified)
        return found if found.chosen is not None else replace(found, chosen=good)

    monkeypatch.setattr(kernel_choice, "choose", choose)
    options = PlanOptions(budget_s=2.0, rounds=True)
    for _ in range(2):  # the second time, all times are remembered
        made = plan_with_rounds(mlp().eval(), X, options)
        (whole,) = made.wholes
        assert whole.comparison is not None
        assert [error.tensor for error in whole.whole.errors] == ["output 0"]
        assert 0 < whole.whole.errors[0].of_allowed <= 1


def test_plans_without_errors_load(tmp_path: Path) -> None:
    made = plan(mlp().eval(), X, force=True)
    data = json.loads(made.to_json())
    data["torchweld_plan"] = 4
    for planned in data["planned"]:
        for tuning in planned["tunings"]:
            for one in tuning["trials"]:
                del one["errors"]
    (tmp_path / "plan.json").write_text(json.dumps(data))
    old = Plan.load(tmp_path / "plan.json")
    assert old.decisions == made.decisions
    assert all(t.errors == () for p in old.planned for one in p.tunings for t in one.trials)
