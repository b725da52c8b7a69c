"""Plans that are timed: remembered, interrupted, made again; what they leave behind."""

from __future__ import annotations

import copy
import itertools
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.made_profiles import make_peaks
from torch import nn
from torch.profiler import profile

import torchweld as tw
from torchweld import ops
from torchweld.core.measured_speed import Speed
from torchweld.core.not_measured import NotMeasured
from torchweld.machine import measured_peaks
from torchweld.models import MODELS
from torchweld.models.gpt import GptConfig
from torchweld.numerics.model_check import compare_results
from torchweld.plans import (
    choice_timing,
    kernel_choice,
    planner,
    speed_ceiling,
    time_budget,
    whole_model,
)
from torchweld.plans.choice_verifying import verify_choice
from torchweld.plans.measurement_cache import MeasurementCache
from torchweld.plans.plan import Plan, Trial, Tuning
from torchweld.profiles.profile import About, Module, Profile
from torchweld.report.plan_text import sentence
from torchweld.timing import Comparison
from torchweld.welds.swapping.swap import decisions_of, stats, welded_paths
from torchweld.welds.weld_decisions import Choice

ROOT = (Module(path="", kind="Policy"),)
NATURAL, PACKED = Choice(backend="cpu"), Choice(backend="cpu", packed=True)


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "torchweld"


@pytest.fixture
def steady(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without noise: whatever is welded is twice as fast. Every side runs once."""

    def compare(*sides: Any, names: Any, **_: Any) -> Any:
        for side in sides:
            side.time(1)
        found = [
            Comparison(
                baseline=names[0],
                candidate=name,
                verdict="faster",
                reason="made up",
                speedup=2.0,
                interval=(1.9, 2.1),
                confidence=0.99,
                rounds=20,
                discarded=0,
                baseline_us=1000.0,
                candidate_us=500.0,
                noise=0.0,
                threshold=0.01,
                cold=False,
                threads=1,
                seed=0,
                elapsed_s=1.0,
                log_ratios=(0.7,),
                control_log_ratios=(0.0,),
            )
            for name in names[1:]
        ]
        return found if len(found) > 1 else found[0]

    monkeypatch.setattr(choice_timing, "compare", compare)
    monkeypatch.setattr(whole_model, "compare", compare)
    monkeypatch.setattr(speed_ceiling, "compare", compare)
    monkeypatch.setattr(planner, "load_words", lambda: "")
    made = make_peaks(threads=torch.get_num_threads())
    monkeypatch.setattr(measured_peaks, "peaks", lambda measure=False: made)


def policy() -> tuple[nn.Module, Any]:
    return MODELS["policy"].build()


def test_copies_can_be_declined(own_cache: Path, steady: None) -> None:
    model, inputs = policy()
    tw.fuse(model, inputs, budget_s=4.0, packing=False)
    made = tw.plan_of(model)
    assert made is not None
    assert made.copied_bytes == 0
    tried = [t.choice for one in made.planned for tuning in one.tunings for t in tuning.trials]
    assert NATURAL in tried
    assert PACKED not in tried
    with torch.no_grad():
        inputs.call(model)
    assert tw.packed_bytes(model) == 0
    assert all(not one.originals for one in stats(model).values())


# ---- remembering ----


def test_a_second_plan_takes_the_times_of_the_first(
    own_cache: Path, steady: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, inputs = policy()
    first = tw.plan(model, inputs, budget_s=6)
    assert first.decisions, str(first)
    assert list(own_cache.glob("tuning-*.json"))

    def never(*args: object, **kwargs: object) -> None:
        raise AssertionError("timed again")

    monkeypatch.setattr(kernel_choice, "time_choices", never)
    second = tw.plan(model, inputs, budget_s=6)
    assert second.decisions == first.decisions
    assert all(t.remembered for one in second.planned for t in one.tunings)
    assert all(one.remembered for one in second.whole)
    assert "measured less than a minute ago, by an earlier plan" in sentence(second)
    assert "* measured less than a minute ago" in str(second)
    with pytest.raises(AssertionError, match="timed again"):
        tw.plan(model, inputs, budget_s=6, remember=False)


def test_what_was_remembered_is_verified_with_the_weights_of_today(
    own_cache: Path, steady: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, inputs = policy()
    assert tw.plan(model, inputs, budget_s=6).decisions

    def wrong(*args: Any) -> Trial:
        off = NotMeasured("off")
        return replace(verify_choice(*args), verified=False, verdict="wrong", speed=off)

    monkeypatch.setattr(kernel_choice, "verify_choice", wrong)
    assert tw.plan(model, inputs, budget_s=6).decisions == ()


@pytest.mark.parametrize(
    "content",
    [
        *("", "{", "[1]", '{"torchweld_tuning": 2, "entries": {"a": 3}}'),
        '{"torchweld_tuning": 1, "entries": {}}',
    ],
)
def test_a_damaged_memory_counts_as_empty(tmp_path: Path, content: str) -> None:
    path = tmp_path / "tuning.json"
    path.write_text(content)
    memory = MeasurementCache(path)
    speed = Speed(speedup=2.0, interval=(1.9, 2.1), before_us=2.0, after_us=1.0)
    tried = Trial(choice=NATURAL, verified=True, verdict="faster", speed=speed, error_ratio=0.1)
    kept = Tuning(rows=1, count=1, trials=(tried,), chosen=NATURAL, reason="")
    assert memory.recall("a", Tuning) is None
    memory.keep("a", kept)
    found = MeasurementCache(path).recall("a", Tuning)
    assert found is not None
    assert found.remembered
    assert replace(found, remembered=None) == kept
    assert MeasurementCache(path).recall("b", Tuning) is None


def test_a_memory_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    memory = MeasurementCache(tmp_path / "file" / "tuning.json")
    memory.keep("a", Tuning(rows=1, count=1, trials=(), chosen=None, reason=""))
    assert "not kept" in memory.notice


def test_ctrl_c_keeps_what_was_measured_and_leaves_the_model(
    own_cache: Path, steady: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, inputs = MODELS["dlrm"].build()
    before = [(type(module), sorted(module.__dict__)) for module in model.modules()]
    calls: list[int] = []

    def interrupted(*args: Any) -> dict[Choice, choice_timing.Timed]:
        if calls:
            raise KeyboardInterrupt
        calls.append(1)
        # What really comes out may be "not measured", on a busy machine, and is not kept then.
        slow = choice_timing.Timed(verdict="behind", speed=NotMeasured("far behind"))
        return dict.fromkeys(args[3], slow)

    monkeypatch.setattr(kernel_choice, "time_choices", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tw.plan(model, inputs, budget_s=6)
    assert [(type(module), sorted(module.__dict__)) for module in model.modules()] == before
    (kept,) = own_cache.glob("tuning-*.json")
    assert json.loads(kept.read_text())["entries"]


# ---- what a plan leaves ----


def test_a_welded_model_is_planned_as_it_was_and_stays_welded() -> None:
    model, inputs = policy()
    tw.apply(model, tw.plan(model, inputs, force=True))
    paths, decisions, made = welded_paths(model), decisions_of(model), tw.plan_of(model)
    again = tw.plan(model, inputs, force=True)
    assert made is not None
    assert tw.plan_of(model) == made
    assert {d.block.path for d in again.decisions} == set(paths)
    assert decisions_of(model) == decisions


def test_undo_leaves_no_trace_of_a_plan() -> None:
    model, inputs = policy()
    before = [dict(module.__dict__) for module in model.modules()]
    tw.fuse(model, inputs, budget_s=2)
    tw.undo(model)
    assert tw.plan_of(model) is None
    assert [dict(module.__dict__) for module in model.modules()] == before


def test_a_copy_of_a_welded_model_has_its_plan() -> None:
    model, inputs = policy()
    made = tw.plan(model, inputs, force=True)
    assert tw.plan_of(copy.deepcopy(tw.apply(model, made))) == made


def test_training_plans_weld_what_trains() -> None:
    config = GptConfig(layers=1, width=48, heads=4, context=16, tokens=5, vocab=70)
    model, inputs = MODELS["gpt"].build(config=config)
    made = tw.plan(model, inputs, training=True, force=True)
    assert any(call.training for one in made.planned for call in one.block.calls)
    tw.apply(model.train(), made)
    inputs.call(model).sum().backward()
    assert ops.compiled is None or all(not one.originals for one in stats(model).values())


def test_a_plan_is_made_inside_inference_mode() -> None:
    model, inputs = policy()
    with torch.inference_mode():
        made = tw.plan(model, inputs, force=True)
    assert made.decisions
    tw.apply(model, made)
    with torch.inference_mode():
        inputs.call(model)
    assert all(not one.originals for one in stats(model).values())


def test_a_model_on_meta_is_planned_and_the_plan_says_what_it_could_not_do() -> None:
    config = GptConfig(layers=1, width=48, heads=4, context=16, tokens=5, vocab=70)
    with torch.device("meta"):
        model = MODELS["gpt"].make(config)
    made = tw.plan(model.eval(), torch.zeros(1, 5, dtype=torch.int64, device="meta"))
    assert made.planned
    assert made.decisions == ()
    assert any("on meta" in t.reason for one in made.planned for t in one.tunings)
    assert any("meta" in notice for notice in made.notices)


def test_a_whole_that_disagrees_keeps_nothing(
    steady: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        whole_model,
        "compare_results",
        lambda *args: [replace(one, ok=False, reason="is off") for one in compare_results(*args)],
    )
    model, inputs = policy()
    made = tw.plan(model, inputs, budget_s=6, remember=False)
    assert made.decisions == ()
    assert sentence(made) == "nothing was welded: the welded model gave other numbers"
    assert any("is off" in notice for notice in made.notices)


def test_torch_compile_is_tried_on_request() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    x = torch.randn(3, 8)
    made = tw.plan(model, x, with_compile=True, budget_s=3, remember=False)
    backends = {t.choice.backend for one in made.planned for u in one.tunings for t in u.trials}
    assert "compile" in backends
    plain = tw.plan(model, x, force=True)
    assert not any(d.choices == (Choice(backend="compile"),) for d in plain.decisions)


# ---- carrying out ----


def test_a_changed_activation_is_noticed_when_a_plan_is_applied() -> None:
    def make(act: nn.Module) -> nn.Module:
        return nn.Sequential(nn.Sequential(nn.Linear(8, 16), act, nn.Linear(16, 8)), nn.Tanh())

    made = tw.plan(make(nn.GELU()), torch.randn(3, 8), force=True)
    assert made.decisions
    other = make(nn.ReLU())
    with pytest.raises(tw.TorchweldError, match=r"computes relu/b;tanh/b"):
        tw.apply(other, made)
    assert welded_paths(other) == []
    changed = {d.block.path for d in made.decisions}
    assert not changed & set(welded_paths(tw.apply(other, made, on_mismatch="skip")))


def test_a_plan_that_does_not_fit_leaves_a_welded_model_as_it_was() -> None:
    model, inputs = policy()
    tw.apply(model, tw.plan(model, inputs, force=True))
    paths = welded_paths(model)
    other, others = MODELS["mixer"].build()
    with pytest.raises(tw.TorchweldError, match="does not fit"):
        tw.apply(model, tw.plan(other, others, force=True))
    assert welded_paths(model) == paths
    assert tw.plan_of(model) is not None


def test_applying_twice_is_applying_once() -> None:
    model, inputs = policy()
    made = tw.plan(model, inputs, force=True)
    with torch.no_grad():
        expected = inputs.call(tw.apply(model, made))
        assert torch.equal(inputs.call(tw.apply(model, made)), expected)
    assert len(welded_paths(model)) == len(made.decisions)


def test_a_compiled_model_is_welded_inside() -> None:
    model, inputs = policy()
    compiled: Any = torch.compile(model, backend="eager")
    tw.apply(compiled, tw.plan(model, inputs, force=True))
    assert welded_paths(model)
    assert tw.plan_of(compiled) is not None
    tw.undo(compiled)
    assert not welded_paths(model)


def test_a_plan_that_cannot_be_saved_is_said(tmp_path: Path) -> None:
    model, inputs = policy()
    made = tw.plan(model, inputs, force=True)
    with pytest.raises(tw.TorchweldError, match="cannot be written"):
        made.save(tmp_path / "none" / "plan.json")


@pytest.mark.parametrize("inputs", [None, [], torch.randn(3, 7)])
def test_inputs_that_the_model_does_not_take(inputs: Any) -> None:
    model, _ = policy()
    with pytest.raises(tw.TorchweldError):
        tw.plan(model, inputs)
    assert not welded_paths(model)


# ---- the ceiling ----


def test_a_stub_computes_nothing_and_reads_its_weights_outside_of_the_clock() -> None:
    """The clock goes on by a second whenever somebody looks."""
    model = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4, dtype=torch.float32)).eval()
    blocks = list(tw.find(model, torch.randn(3, 8)))
    assert [block.path for block in blocks] == [""]
    x, outputs = torch.randn(3, 8), []
    ticks = itertools.count()
    side = speed_ceiling.StubSide(
        model, blocks, lambda: outputs.append(model(x)), lambda: next(ticks)
    )
    with profile() as recorded:
        # Three looks at each call: the stub's two, and one of the side before or after.
        assert side.time(1) == 2.0
        assert side.time(2) == 3.0
    names = [event.name for event in recorded.events()]
    assert "aten::addmm" not in names
    assert names.count("aten::sum") == 3 * 4
    assert {y.shape for y in outputs} == {(3, 4)}
    assert "forward" not in model.__dict__


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_all_bytes_of_a_weight_are_read(dtype: torch.dtype) -> None:
    weight = torch.zeros(7, 6, dtype=dtype)
    for view in (weight, weight.t(), weight[2:]):
        numbers = speed_ceiling._memory_of(view)
        assert numbers.dtype is torch.float32
        assert numbers.data_ptr() <= view.data_ptr() < numbers.data_ptr() + 4
        assert 0 <= view.nbytes - numbers.nbytes < 8


# ---- telling ----


def test_a_plan_fits_into_a_hundred_columns() -> None:
    model, inputs = MODELS["llama"].build()
    made = tw.plan(model, inputs, force=True)
    assert max(map(len, str(made).splitlines())) <= 100


def test_the_verdict_comes_first_and_details_on_request(
    steady: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whole_model, "welding_bound", lambda profile: 2.5)
    model, inputs = policy()
    profile = Profile(about=About(source="live", what="p"), step_us=1.0, modules=ROOT, ops=())
    made = tw.plan(model, inputs, budget_s=6, remember=False, profile=profile)
    (found,) = made.whole
    assert found.predicted == 2.5
    assert isinstance(found.promised, float)
    assert found.promised > 1
    assert found.time_share == pytest.approx(0.5)
    assert made.flops_share == pytest.approx(1.0)
    verdict, account, *_ = str(made).splitlines()
    assert verdict == "welded 1 of 1 MLPs: 2.00x faster (1.90–2.10) at 1x64 float32"
    assert "100 % of the model's FLOPs and 50 % of its time welded" in account
    assert "of eager's" in account
    for name in ("predicted", "promised", "ceiling"):
        assert name not in str(made)
        assert name in made.details()
    assert "2.50x: the most that welding can win, by the profile" in made.details()


def test_a_plan_by_force_tells_the_memory_of_its_copies() -> None:
    model, inputs = MODELS["mixer"].build()
    made = tw.plan(model, inputs, force=True)
    tw.apply(model, made)
    with torch.inference_mode():
        inputs.call(model)
    assert made.copied_bytes == sum(one.copied_bytes for one in stats(model).values()) > 0


def test_fuse_leaves_a_plan_and_one_line_whatever_came_of_it(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def busy(*args: Any) -> dict[Choice, choice_timing.Timed]:
        unknown = choice_timing.Timed(verdict="not measured", speed=NotMeasured("too busy"))
        return dict.fromkeys(args[3], unknown)

    monkeypatch.setattr(kernel_choice, "time_choices", busy)
    model, inputs = policy()
    with caplog.at_level("INFO", "torchweld"):
        tw.fuse(model, inputs, quick=True)
    made = tw.plan_of(model)
    assert made is not None
    assert made.decisions == ()
    assert made.outcomes == {"not measured": 1}
    (line,) = caplog.records
    assert line.levelname == "WARNING"
    assert "1 of 1 block could not be measured (too busy)" in line.getMessage()
    assert any("--budget 32" in notice and "--no-measure" in notice for notice in made.notices)
    tw.fuse(model := nn.Sequential(nn.ReLU()), torch.randn(2, 2))
    assert "no block was found" in str(tw.plan_of(model))


def test_load_on_the_machine_is_said_first(
    steady: None, monkeypatch: pytest.MonkeyPatch, own_cache: Path
) -> None:
    monkeypatch.setattr(planner, "load_words", lambda: "This machine is busy: very.")
    model, inputs = policy()
    made = tw.plan(model, inputs, budget_s=4)
    assert str(made).startswith("This machine is busy: very.\n")


def test_a_plan_from_before_a_field_was_added_is_read(tmp_path: Path) -> None:
    model, inputs = policy()
    made = tw.plan(model, inputs, force=True)
    made.save(tmp_path / "plan.json")
    data = json.loads((tmp_path / "plan.json").read_text())
    for one in data["planned"]:
        for own in one["tunings"]:
            own.pop("remembered", None)
    (tmp_path / "plan.json").write_text(json.dumps(data))
    assert Plan.load(tmp_path / "plan.json") == made


# ---- steps that take long ----


class Slow(nn.Module):
    """A Linear, and a step of a fifth of a second around it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(64, 64), nn.LayerNorm(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.2 if len(x) == 1 else 0.0)
        y: torch.Tensor = self.norm(self.linear(x))
        return y


def test_a_whole_that_cannot_be_timed_leaves_its_time_to_the_blocks(
    own_cache: Path, steady: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    deadlines: list[float] = []
    real = kernel_choice.tune

    def tune(model: Any, blocks: Any, options: Any, budget: Any, memory: Any) -> Any:
        deadlines.append(budget.blocks_end_s - time.perf_counter())
        return real(model, blocks, options, budget, memory)

    monkeypatch.setattr(planner, "tune", tune)
    made = tw.plan(Slow().eval(), torch.randn(1, 64), budget_s=4.0)
    assert 4.0 * (1 - time_budget.UNTIMED_SHARE) - 1.0 < deadlines[0] <= 3.6
    assert [d.block.path for d in made.decisions] == ["linear"]
    (one,) = made.whole
    assert one.verdict == "not measured"
    assert "a step takes 0.2 s, too long for the 1.6 s it has" in one.reason
    assert not isinstance(one.error_ratio, NotMeasured)
    assert one.error_ratio > 0.0  # verified all the same
    assert "the whole model was not measured" in str(made)

    # One that is quick is timed beside it, and needs time for that.
    both = tw.plan(Slow().eval(), [torch.randn(1, 64), torch.randn(2, 64)], budget_s=6.0)
    assert deadlines.pop() <= 6.0 * (1 - time_budget.WHOLE_SHARE)
    assert [one.verdict for one in both.whole] == ["not measured", "faster"]

    enough = tw.plan(Slow().eval(), torch.randn(1, 64), budget_s=20.0)
    assert deadlines[1] <= 20.0 * (1 - time_budget.WHOLE_SHARE)
    assert enough.whole[0].verdict == "faster"


def test_a_block_whose_rounds_cannot_fit_is_not_begun(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice_timing, "seconds_of", lambda run: 0.9)
    model = nn.Sequential(nn.Linear(64, 64)).eval()
    made = tw.plan(model, torch.randn(1, 64), budget_s=8.0)
    (one,) = made.planned
    assert one.tunings[0].unmeasured
    assert "a call takes 0.9 s, and timing it 9 s; " in one.tunings[0].reason
    assert "original  not measured" in str(made)
