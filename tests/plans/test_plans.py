"""Plans: what is found is verified, decided about, saved, applied and undone."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.support.measured import measured
from torch import nn

from torchweld.core.errors import TorchweldError
from torchweld.core.measured_speed import Speed
from torchweld.core.not_measured import NotMeasured
from torchweld.models import MODELS
from torchweld.plans.measurement_cache import MeasurementCache
from torchweld.plans.plan import Plan, Planned, Trial, Tuning, Verdict, Whole, structure_of
from torchweld.plans.planner import apply, fuse, plan, plan_of
from torchweld.report.plan_text import sentence
from torchweld.welds.found_blocks import Block
from torchweld.welds.swapping.swap import stats, undo, welded_paths
from torchweld.welds.weld_decisions import Choice

PACKED = Choice(backend="cpu", packed=True)
DATA = Path(__file__).parents[1] / "data"


@pytest.fixture(scope="module")
def gpt_plan() -> Plan:
    model, inputs = MODELS["gpt"].build()
    return plan(model, inputs, force=True)


def test_all_that_verifies_is_planned_by_force(gpt_plan: Plan) -> None:
    paths = {one.block.path for one in gpt_plan.planned}
    assert {"layers.0.mlp", "layers.0.attention.qkv", "head"} <= paths
    for one in gpt_plan.planned:
        (tuning,) = one.tunings
        assert tuning.best is not None
        assert tuning.best.verified
        assert 0 < measured(tuning.best.error_ratio) <= 1
    assert len(gpt_plan.decisions) == len(gpt_plan.planned)


def test_planning_leaves_the_model_as_it_was() -> None:
    model, inputs = MODELS["policy"].build()
    model.train()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    before = [(type(module), dict(module.__dict__)) for module in model.modules()]
    plan(model, inputs, force=True)
    after = [(type(module), dict(module.__dict__)) for module in model.modules()]
    assert [kind for kind, _ in before] == [kind for kind, _ in after]
    assert [set(names) for _, names in before] == [set(names) for _, names in after]
    assert model.training
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())


SPEED = Speed(speedup=1.1, interval=(1.05, 1.2), before_us=10.0, after_us=9.0)


@pytest.mark.parametrize("speed", [SPEED, NotMeasured("the machine is busy")])
def test_a_plan_is_shown_saved_and_kept_with_what_was_measured_and_what_not(
    gpt_plan: Plan, tmp_path: Path, speed: Speed | NotMeasured
) -> None:
    verdict: Verdict = "faster" if isinstance(speed, Speed) else "not measured"
    first, *others = gpt_plan.planned
    (tuning,) = first.tunings
    trial = replace(tuning.trials[0], verdict=verdict, speed=speed)
    tried = replace(tuning, trials=(trial, *tuning.trials[1:]))
    whole = Whole(
        workload="tokens", verdict=verdict, speed=speed, error_ratio=NotMeasured("no numbers")
    )
    made = replace(gpt_plan, planned=(replace(first, tunings=(tried,)), *others), whole=(whole,))
    made.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == made
    assert str(Plan.load(tmp_path / "plan.json")) == str(made)
    assert made.details() == Plan.load(tmp_path / "plan.json").details()
    memory = MeasurementCache(tmp_path / "tuning.json")
    memory.keep("block", tried)
    assert memory.notice == ""
    kept = MeasurementCache(tmp_path / "tuning.json").recall("block", Tuning)
    assert kept is not None
    assert replace(kept, remembered=None) == tried


def test_a_file_with_a_verdict_and_no_speed_is_refused(gpt_plan: Plan, tmp_path: Path) -> None:
    gpt_plan.save(tmp_path / "plan.json")
    data = json.loads((tmp_path / "plan.json").read_text())
    data["planned"][0]["tunings"][0]["trials"][0]["verdict"] = "faster"
    (tmp_path / "plan.json").write_text(json.dumps(data))
    with pytest.raises(TorchweldError, match="'faster' without a measured speed"):
        Plan.load(tmp_path / "plan.json")


def test_plans_of_the_first_format_load_as_what_they_were() -> None:
    made = Plan.load(DATA / "plan_1_measured.json")
    (one,) = made.planned
    best = one.tunings[0].best
    assert best is not None
    assert isinstance(best.speed, Speed)
    assert best.speed.speedup == pytest.approx(3.78, abs=0.01)
    (whole,) = made.whole
    assert isinstance(whole.speed, Speed)
    assert isinstance(whole.predicted, NotMeasured)  # it said 1.00, below what was measured
    assert "3.78x faster" in sentence(made)
    with (DATA / "plan_1_measured.pickle").open("rb") as file:
        assert pickle.load(file) == made
    assert "by force: nothing was timed" in sentence(Plan.load(DATA / "plan_0_1.json"))


def test_a_plan_comes_back_as_it_was_and_applies_without_measuring(
    gpt_plan: Plan, tmp_path: Path
) -> None:
    gpt_plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == gpt_plan
    model, inputs = MODELS["gpt"].build()
    with torch.no_grad():
        expected = inputs.call(model)
        apply(model, loaded)
        assert plan_of(model) == gpt_plan
        got = inputs.call(model)
        assert set(welded_paths(model)) == {d.block.path for d in gpt_plan.decisions}
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
        assert sum(one.copied_bytes for one in stats(model).values()) > 0
        undo(model)
        assert torch.equal(inputs.call(model), expected)


def test_a_plan_for_another_model_is_refused_or_skipped(gpt_plan: Plan) -> None:
    model, _ = MODELS["bert"].build()
    with pytest.raises(TorchweldError, match="another Gpt"):
        apply(model, gpt_plan)
    assert welded_paths(model) == []
    assert welded_paths(apply(model, gpt_plan, on_mismatch="skip")) == []


def test_a_plan_of_another_machine_can_be_verified_again(gpt_plan: Plan) -> None:
    from dataclasses import replace

    model, _ = MODELS["gpt"].build()
    elsewhere = replace(gpt_plan, fingerprint="0" * 12)
    with pytest.raises(TorchweldError, match="another machine"):
        apply(model, elsewhere)
    apply(model, elsewhere, on_mismatch="verify")
    assert len(welded_paths(model)) == len(gpt_plan.decisions)


def test_an_unknown_way_to_treat_mismatches_is_named(gpt_plan: Plan) -> None:
    with pytest.raises(TorchweldError, match="did you mean 'verify'"):
        apply(nn.Linear(2, 2), gpt_plan, on_mismatch="verfy")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda data: data.clear(), "not a plan"),
        (lambda data: data.update(torchweld_plan=9), "format 9"),
        (lambda data: data.update(planned=3), "damaged"),
        (lambda data: data["planned"][0]["block"].update(path=7), "damaged"),
        (lambda data: data.update(code="import os"), "damaged"),
    ],
)
def test_a_file_that_is_no_plan_is_refused(
    gpt_plan: Plan, tmp_path: Path, change: object, complaint: str
) -> None:
    path = tmp_path / "plan.json"
    gpt_plan.save(path)
    data = json.loads(path.read_text())
    change(data)  # type: ignore[operator]
    path.write_text(json.dumps(data))
    with pytest.raises(TorchweldError, match=complaint):
        Plan.load(path)


def test_rows_between_two_measured_counts_take_the_choice_of_both() -> None:
    def tuning(rows: int, choice: Choice | None) -> Tuning:
        return Tuning(rows=rows, count=1, trials=(), chosen=choice, reason="")

    block = Block(
        path="mlp",
        kind="Mlp",
        form="identity",
        tensors=("weight",),
        argument="x",
        in_features=2,
        out_features=2,
        dtype="float32",
        covers=(),
    )
    planned = Planned(
        block=block,
        tunings=(tuning(64, None), tuning(1, PACKED), tuning(8, PACKED), tuning(128, None)),
    )
    assert planned.by_rows() == ((1, 8, PACKED), (64, 128, None))


def test_a_model_without_linears_is_left_alone_and_the_plan_says_so() -> None:
    model = nn.Sequential(nn.ReLU(), nn.Conv1d(2, 2, 1))
    made = plan(model, torch.randn(1, 2, 4), force=True)
    assert made.decisions == ()
    assert sentence(made) == "nothing was welded: no block was found that can be welded"
    assert sentence(made) in str(made)


def test_a_measured_plan_keeps_its_figures_and_only_what_is_faster() -> None:
    model, inputs = MODELS["policy"].build()
    fuse(model, inputs, budget_s=3)
    made = plan_of(model)
    assert made is not None
    for one in made.planned:
        for tuning in one.tunings:
            assert len(tuning.trials) == 3
            best = tuning.best
            if best is not None:
                assert isinstance(best.speed, Speed)
                assert best.verdict == "faster"
                assert best.speed.speedup > 1
    assert len(welded_paths(model)) == len(made.decisions)
    assert str(made)


def test_a_wrong_kernel_is_never_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    from torchweld.plans import kernel_choice

    def wrong(*args: object) -> Trial:
        choice = args[3]
        assert isinstance(choice, Choice)
        why = NotMeasured("output: off")
        return Trial(choice=choice, verified=False, verdict="wrong", speed=why, error_ratio=9.0)

    monkeypatch.setattr(kernel_choice, "verify_choice", wrong)
    model, inputs = MODELS["policy"].build()
    made = plan(model, inputs, force=True)
    assert made.decisions == ()
    assert "wrong (output: off)" in made.planned[0].tunings[0].reason


def test_training_plans_verify_gradients() -> None:
    model, inputs = MODELS["policy"].build()
    made = plan(model, inputs, training=True, force=True)
    assert made.training
    for decision in made.decisions:
        assert decision.choices == (Choice(backend="cpu"),)
    apply(model, made)
    model.train()
    output = inputs.call(model)
    output.sum().backward()
    fused = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    undo(model)
    model.zero_grad()
    inputs.call(model).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(fused[name], parameter.grad, rtol=1e-4, atol=1e-5)


def test_the_structure_of_a_model_is_its_names_shapes_and_types() -> None:
    one, _ = MODELS["policy"].build(seed=0)
    other, _ = MODELS["policy"].build(seed=1)
    assert structure_of(one) == structure_of(other)
    assert structure_of(one) != structure_of(other.double())


def test_what_blocks_depend_on_is_told_on_request() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)).eval()
    told = plan(model, torch.randn(3, 8), force=True).dependencies().splitlines()
    assert told[:2] == ["the model (Sequential)", "  calls: any rows"]
    assert "  1.approximate" in told
    assert "  GELU.forward" in told
