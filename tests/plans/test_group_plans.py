"""Groups in plans: tried against their members one by one, said in words, saved and applied."""

from __future__ import annotations

import json
import pickle
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.support.helpers import ISAS, fixed, kernel_runs
from tests.support.swap_blocks import PACKED
from torch import Tensor, nn

import torchweld as tw
from torchweld.core.errors import TorchweldError
from torchweld.core.measured_speed import Speed
from torchweld.core.not_measured import NotMeasured
from torchweld.plans import group_tuning
from torchweld.plans.choice_timing import Timed
from torchweld.plans.kernel_choice import TunedBlocks
from torchweld.plans.measurement_cache import MeasurementCache
from torchweld.plans.plan import Plan, Tuning, Verdict
from torchweld.plans.plan_options import PlanOptions
from torchweld.plans.time_budget import TimeBudget
from torchweld.welds.swapping.swap import stats
from torchweld.welds.weld_decisions import Choice, Decision

pytestmark = [
    pytest.mark.skipif(not ISAS, reason="no compiled kernels on this machine"),
    pytest.mark.usefixtures("one_thread"),
]

K, LAYERS = 24, 2
X = fixed(4, K)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(K, K), nn.Linear(K, 8), nn.Linear(K, 8)
        self.out = nn.Linear(K, K)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.q(x) + (self.k(x) * self.v(x)).sum(-1, keepdim=True)
        y: Tensor = self.out(mixed)
        return y


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attention() for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def forced(inputs: Any = X) -> Plan:
    return tw.plan(Model().eval(), inputs, force=True)


def close(found: Tensor, expected: Tensor) -> bool:
    return torch.allclose(found, expected, rtol=1e-4, atol=1e-5)


# ---- from find to undo ----


def test_groups_are_planned_saved_applied_and_undone(tmp_path: Path) -> None:
    model = Model().eval()
    made = tw.plan(model, X, force=True)
    assert [group.name for group in made.groups] == ["layers.0#0", "layers.1#0"]
    assert [one.block.path for one in made.members(made.groups[0])] == [
        f"layers.0.{name}" for name in "qkv"
    ]
    made.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == made
    assert pickle.loads(pickle.dumps(made)) == made
    with torch.no_grad():
        expected = model(X)
        tw.apply(model, Plan.load(tmp_path / "plan.json"))
        model(X)
        with kernel_runs("packed", calls=2 * LAYERS):  # q, k and v as one; out
            assert close(model(X), expected)
        assert stats(model)["layers.1.k"].gathered == 1
        tw.undo(model)
        with kernel_runs(calls=0):
            assert torch.equal(model(X), expected)


def test_the_text_shows_groups() -> None:
    text = str(forced())
    assert "welded 8 of 8 Linears and 2 of 2 groups that share an input" in text
    assert "layers.*: q, k, v" in text
    assert "group of 3" in text
    assert "the speed-up of a group is over its members one by one" in text


def test_a_model_is_fused_with_groups_and_says_so() -> None:
    model = Model().eval()
    tw.apply(model, forced())
    assert len(tw.plan_of(model).groups) == LAYERS  # type: ignore[union-attr]


def test_plans_without_groups_load(tmp_path: Path) -> None:
    made = forced()
    made.save(tmp_path / "plan.json")
    data = json.loads((tmp_path / "plan.json").read_text())
    assert data["torchweld_plan"] == Plan.FORMAT.version
    del data["groups"]
    data["torchweld_plan"] = 2
    (tmp_path / "plan.json").write_text(json.dumps(data))
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == replace(made, groups=())
    assert all(decision.in_group == () for decision in loaded.decisions)
    state = {name: value for name, value in made.__dict__.items() if name != "groups"}
    earlier = Plan.__new__(Plan)
    earlier.__setstate__(state)
    assert earlier.groups == ()


@pytest.mark.parametrize(
    ("spoil", "what"),
    [
        (lambda groups: groups[0].update(name="layers.7#0"), "does not have two of its blocks"),
        (lambda groups: groups[0].update(name=""), "does not have two of its blocks"),
        (lambda groups: groups.append(groups[0]), "plans a group twice"),
        (lambda groups: groups[0]["tunings"][0].update(rows=0), "rows"),
    ],
)
def test_damaged_groups_are_refused(
    spoil: Callable[[list[Any]], object], what: str, tmp_path: Path
) -> None:
    forced().save(tmp_path / "plan.json")
    data = json.loads((tmp_path / "plan.json").read_text())
    spoil(data["groups"])
    (tmp_path / "plan.json").write_text(json.dumps(data))
    with pytest.raises(TorchweldError, match=what):
        Plan.load(tmp_path / "plan.json")


def test_an_edited_group_is_not_applied() -> None:
    model = Model().eval()
    made = tw.plan(model, X, force=True)
    tuning = replace(made.groups[0].tunings[0], chosen=Choice(backend="torch"))
    edited = replace(made, groups=(replace(made.groups[0], tunings=(tuning,)), *made.groups[1:]))
    with pytest.raises(TorchweldError, match=r"layers.0#0: .* chosen what no trial has verified"):
        tw.apply(model, edited)
    assert not stats(model)


# ---- what is tried ----


def test_training_and_many_rows_have_no_groups() -> None:
    assert tw.plan(Model(), X, training=True, force=True).groups == ()
    assert forced(fixed(group_tuning.MOST_ROWS + 1, K)).groups == ()
    both = forced([X, fixed(group_tuning.MOST_ROWS + 1, K)])
    assert [[t.rows for t in group.tunings] for group in both.groups] == [[4]] * LAYERS


def test_tables_know_nothing_of_groups() -> None:
    made = tw.plan(Model().eval(), X, measure=False)
    assert {group.outcome for group in made.groups} == {"not known"}
    assert not any(group.welded for group in made.groups)


def test_without_packing_there_are_no_groups() -> None:
    """Blocks without copies cannot be stale, and a group would read weights before their turn."""
    assert tw.plan(Model().eval(), X, force=True, packing=False).groups == ()
    assert {t.choice for group in forced().groups for t in group.tunings[0].trials} == {PACKED}


# ---- what is chosen ----


def timed(verdict: Verdict, speedup: float, copied: int = 0) -> Timed:
    speed: Speed | NotMeasured = NotMeasured("a busy machine")
    if verdict != "not measured":
        speed = Speed(
            speedup=speedup, interval=(speedup, speedup), before_us=10.0, after_us=10.0 / speedup
        )
    return Timed(verdict=verdict, speed=speed, copied_bytes=copied)


def tuned_with(
    monkeypatch: pytest.MonkeyPatch, found: Callable[..., dict[Choice, Timed]], single: Any = PACKED
) -> TunedBlocks:
    """Groups timed as `found` says, of members that run singly as `single` says."""
    monkeypatch.setattr(group_tuning, "time_ways", found)
    model = Model().eval()
    planned = tuple(
        replace(one, tunings=tuple(replace(t, chosen=single) for t in one.tunings))
        for one in tw.plan(model, X, force=True).planned
    )
    end_s = time.perf_counter() + 10
    budget = TimeBudget(blocks_end_s=end_s, groups_end_s=end_s, end_s=end_s, untimed=(None,))
    tuned = TunedBlocks(planned=planned, training=False)
    return group_tuning.tune_groups(model, tuned, PlanOptions(), budget, MeasurementCache(None))


def test_a_group_is_timed_against_its_members_as_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Sequence[Decision], Mapping[Choice, Sequence[Decision]]]] = []

    def time_ways(
        model: nn.Module, runs: Any, baseline: Any, ways: Any, **_: Any
    ) -> dict[Choice, Timed]:
        assert len(runs) == LAYERS
        seen.append((baseline, ways))
        return {PACKED: timed("faster", 1.2, 3000)}

    found = tuned_with(monkeypatch, time_ways)
    ((baseline, ways),) = seen
    assert {d.by_rows for d in baseline} == {((4, 4, PACKED),)}
    assert {d.in_group for d in ways[PACKED]} == {((4, 4, PACKED),)}
    for group in found.groups:
        assert group.by_rows() == ((4, 4, PACKED),)
        assert group.tunings[0].reason == "1.20 times the speed of its members one by one"
        copied = group.copied_bytes  # what the members keep by themselves costs nothing more
        assert copied < 3000
    in_group = [d.block.path for d in found.decisions if d.in_group]
    assert in_group == [f"layers.{i}.{name}" for i in range(LAYERS) for name in "qkv"]


def test_members_left_as_they_are_can_be_welded_as_a_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def time_ways(
        model: nn.Module, runs: Any, baseline: Any, ways: Any, **_: Any
    ) -> dict[Choice, Timed]:
        assert not baseline
        return {PACKED: timed("faster", 1.3)}

    found = tuned_with(monkeypatch, time_ways, None)
    assert {d.by_rows for d in found.decisions} == {((4, 4, None),)}
    assert {d.in_group for d in found.decisions} == {((4, 4, PACKED),)}
    made = replace(forced(), planned=found.planned, groups=found.groups)
    text = str(made)
    assert "welded 0 of 8 Linears and 2 of 2 groups" in text
    assert "2 blocks left as they are" in text  # out, and not q, k and v


@pytest.mark.parametrize(
    ("verdict", "words"),
    [
        ("same", "measured and no faster than its members one by one, beyond noise"),
        ("slower", "measured and no faster than its members one by one, beyond noise"),
        ("not measured", r"not measured \(a busy machine\)"),
    ],
)
def test_a_group_that_is_not_faster_is_not_welded(
    verdict: Verdict, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = tuned_with(monkeypatch, lambda *_, **__: {PACKED: timed(verdict, 1.0)})
    assert not any(group.welded for group in found.groups)
    assert not any(decision.in_group for decision in found.decisions)
    made = replace(forced(), planned=found.planned, groups=found.groups)
    text = " ".join(str(made).split())
    pattern = rf"2 groups run member by member: {words}: layers\.\*"
    assert re.search(pattern, text), text


def test_times_of_groups_are_remembered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model, calls = Model().eval(), list[int]()

    def time_ways(*_: Any, **__: Any) -> dict[Choice, Timed]:
        calls.append(1)
        return {PACKED: timed("faster", 1.2)}

    monkeypatch.setattr(group_tuning, "time_ways", time_ways)
    end_s = time.perf_counter() + 10
    budget = TimeBudget(blocks_end_s=end_s, groups_end_s=end_s, end_s=end_s, untimed=(None,))
    planned = tw.plan(model, X, force=True).planned
    found: list[Tuning] = []
    for _ in range(2):
        tuned = TunedBlocks(planned=planned, training=False)
        memory = MeasurementCache(tmp_path / "kept.json")
        done = group_tuning.tune_groups(model, tuned, PlanOptions(), budget, memory)
        found.append(done.groups[0].tunings[0])
    assert len(calls) == 1
    assert [one.remembered is None for one in found] == [True, False]
    assert found[0].chosen == found[1].chosen == PACKED


def test_wrong_numbers_are_never_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.ops.torchweld.group_of_packed

    ops = SimpleNamespace(
        pack=torch.ops.torchweld.pack,
        group=torch.ops.torchweld.group,
        group_of_packed=lambda *args: [y + 1e-3 for y in real(*args)],
    )
    monkeypatch.setattr(group_tuning, "ops", SimpleNamespace(torchweld=ops))
    made = forced()
    assert {group.tunings[0].chosen for group in made.groups} == {None}
    assert {group.tunings[0].trials[0].verdict for group in made.groups} == {"wrong"}


def test_a_group_that_is_really_timed() -> None:
    """Whatever the verdict is on this machine, it is one, and the plan fits it."""
    model = Model().eval()
    made = tw.plan(model, X, budget_s=2.0, remember=False)
    verdicts = {"faster", "slower", "same", "not measured", "behind"}
    for group in made.groups:
        assert {trial.verdict for trial in group.tunings[0].trials} <= verdicts
        assert group.welded == any(d.in_group for d in made.decisions)
    expected = model(X).detach()
    tw.apply(model, made)
    with torch.no_grad():
        for _ in range(3):
            assert close(model(X), expected)
