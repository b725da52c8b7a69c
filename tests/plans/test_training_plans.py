"""Plans for training: what is tried, what is chosen, what is kept, and what is never welded."""

from __future__ import annotations

import functools
import json
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.bench_samples import FakeCompare
from tests.support.helpers import ISAS
from tests.support.module_zoo import Conv1D
from torch import Tensor, nn
from torch.nn.functional import dropout

import torchweld as tw
from torchweld.cli.main import run as torchweld
from torchweld.core.blocks import parse_spec
from torchweld.core.errors import TorchweldError
from torchweld.core.measured_speed import Speed
from torchweld.core.not_measured import NotMeasured
from torchweld.numerics.numerical_rule import check_block
from torchweld.ops import backends
from torchweld.ops.backends import Abilities, BackendMode, Form, reference_backend
from torchweld.ops.backends.backend import check_build
from torchweld.ops.backends.cpu_backend import NaturalRunner
from torchweld.plans import choice_timing, choice_verifying, whole_model
from torchweld.plans.alike_blocks import alike_blocks
from torchweld.plans.choice_timing import Timed, none_timed, with_saved_bytes
from torchweld.plans.choice_verifying import verify_choice
from torchweld.plans.kernel_choice import choices_for, choose, over_saving_of
from torchweld.plans.plan import Plan, Trial, Verdict
from torchweld.plans.plan_options import PlanOptions
from torchweld.welds.weld_decisions import Choice, Decision

pytestmark = pytest.mark.skipif(not ISAS, reason="no compiled kernels on this machine")
SAVES, RECOMPUTES = Choice(backend="cpu"), Choice(backend="cpu", recompute=True)
M, K, H, N = 6, 16, 64, 24
X = torch.randn(M, K)


def mlp(dropout: float = 0.0) -> nn.Sequential:
    return nn.Sequential(nn.Linear(K, H), nn.GELU(), nn.Dropout(dropout), nn.Linear(H, N))


class Two(nn.Module):
    """Two blocks that differ in nothing but their dropout."""

    def __init__(self, *dropout: float) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(map(mlp, dropout))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([block(x).sort().values for block in self.blocks])


# ---- what is tried ----


@pytest.mark.parametrize(
    ("recompute", "tried"),
    [(None, [SAVES, RECOMPUTES]), (False, [SAVES]), (True, [RECOMPUTES])],
)
def test_saving_and_recomputing_are_both_tried(recompute: bool | None, tried: list[Choice]) -> None:
    found = choices_for(True, False, True, [X], recompute)
    assert list(found) == tried
    made = tw.plan(mlp().train(), X, training=True, force=True, recompute=recompute)
    assert made.planned[0].tunings[0].chosen == tried[0]


def test_inference_tries_nothing_for_a_backward() -> None:
    assert not any(choice.recompute for choice in choices_for(False, True, True, [X]))


@pytest.mark.parametrize("choice", [SAVES, RECOMPUTES])
@pytest.mark.parametrize("probability", [0.0, 0.3])
def test_both_are_verified_with_their_gradients(choice: Choice, probability: float) -> None:
    model = mlp(probability).train()
    (block,) = tw.find(model, X, training=True)
    found = verify_choice(model, block, block.calls[0], choice, training=True)
    assert found.verified


def test_wrong_dropout_is_not_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp(0.3).train()
    (block,) = tw.find(model, X, training=True)

    def late(self: NaturalRunner, x: Tensor) -> Tensor:
        """Drops after the last layer instead of before it."""
        return dropout(reference_backend.chain(x, self._tensors, parse_spec(block.form)), 0.3)

    monkeypatch.setattr(NaturalRunner, "__call__", late)
    found = verify_choice(model, block, block.calls[0], SAVES, training=True)
    assert (found.verified, found.verdict) == (False, "wrong")


@pytest.mark.parametrize("transposed", [False, True])
def test_a_wide_head_is_verified_on_some_of_its_columns(
    transposed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged: list[Sequence[int]] = []

    def looked_at(
        candidate: Any, x: Tensor, tensors: Sequence[Tensor], *rest: Any, **by: Any
    ) -> Any:
        judged.append([t.numel() for t in tensors])
        return check_block(candidate, x, tensors, *rest, **by)

    monkeypatch.setattr(choice_verifying, "check_block", looked_at)
    model = nn.Sequential(Conv1D(K, 9001) if transposed else nn.Linear(K, 9001)).train()
    (block,) = tw.find(model, X, training=True)
    found = verify_choice(model, block, block.calls[0], SAVES, training=True)
    assert found.verified
    assert {error.tensor for error in found.errors} == {"output", "grad x", "grad 0", "grad 1"}
    assert judged == [[3001 * K, 3001]]


@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_a_wrong_gradient_of_a_wide_head_is_noticed(
    wrong: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(nn.Linear(K, 9001)).train()
    (block,) = tw.find(model, X, training=True)

    def off(self: NaturalRunner, x: Tensor) -> Tensor:
        given = [x, *self._tensors]
        given[wrong] = given[wrong].detach() + (given[wrong] - given[wrong].detach()) * 1.01
        return reference_backend.chain(given[0], given[1:], parse_spec(block.form))

    monkeypatch.setattr(NaturalRunner, "__call__", off)
    found = verify_choice(model, block, block.calls[0], SAVES, training=True)
    assert (found.verified, found.verdict) == (False, "wrong")


def test_a_dropout_of_everything_cannot_be_served() -> None:
    model = mlp(1.0).train()
    (block,) = tw.find(model, X, training=True)
    found = verify_choice(model, block, block.calls[0], SAVES, training=True)
    assert (found.verdict, found.reason) == ("cannot serve", "its dropout leaves nothing")


def test_blocks_that_drop_differently_are_tuned_apart() -> None:
    model = Two(0.1, 0.1, 0.2).train()
    blocks = tw.find(model, X, training=True)
    assert [len(one.blocks) for one in alike_blocks(model, blocks, training=True)] == [2, 1]
    assert [len(one.blocks) for one in alike_blocks(model, blocks, training=False)] == [3]


def test_recompute_is_for_training() -> None:
    with pytest.raises(TorchweldError, match="recompute=True says what is kept for a backward"):
        tw.plan(mlp().eval(), X, recompute=True)
    with pytest.raises(TorchweldError, match="recompute is 'no'; expected True, False or None"):
        PlanOptions(training=True, recompute="no")  # type: ignore[arg-type]


def test_the_command_says_that_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert torchweld(["fuse", "policy", "--no-recompute"]) == 2
    assert "--no-recompute says what is kept for a backward; give --training too" in (
        capsys.readouterr().err
    )


# ---- what is chosen ----


def trial(
    choice: Choice, speedup: float, verdict: Verdict = "faster", over: float | None = None
) -> Trial:
    ends = (0.98 * speedup, 1.02 * speedup)
    return Trial(
        choice=choice,
        verified=True,
        verdict=verdict,
        speed=Speed(speedup=speedup, interval=ends, before_us=100.0, after_us=100.0 / speedup),
        error_ratio=0.5,
        over_saving=NotMeasured("not timed beside it") if over is None else over,
    )


@pytest.mark.parametrize(
    ("recomputing", "chosen"),
    [
        (trial(RECOMPUTES, 2.1), RECOMPUTES),  # faster than saving
        (trial(RECOMPUTES, 1.97), RECOMPUTES),  # slower by less than 2 %
        (trial(RECOMPUTES, 1.95), SAVES),
        (trial(RECOMPUTES, 1.9, over=0.99), RECOMPUTES),  # round by round it is known better
        (trial(RECOMPUTES, 2.1, over=0.97), RECOMPUTES),  # the faster, whatever the rounds say
        (trial(RECOMPUTES, 1.99, over=0.97), SAVES),
        (trial(RECOMPUTES, 1.99, "same"), SAVES),  # not faster than the original beyond noise
    ],
)
def test_less_memory_wins_unless_it_costs_more_than_two_per_cent(
    recomputing: Trial, chosen: Choice
) -> None:
    found = choose(M, [trial(SAVES, 2.0), recomputing])
    assert found.chosen == chosen
    assert "the original's speed" in found.reason


def test_the_reason_says_why_less_is_kept() -> None:
    found = choose(M, [trial(SAVES, 2.0), trial(RECOMPUTES, 1.99)])
    assert found.reason == (
        "1.99 times the original's speed; keeping more than the input gains too little"
    )


def test_what_is_slower_forward_and_backward_is_not_chosen() -> None:
    slow = [trial(SAVES, 0.9, "slower"), trial(RECOMPUTES, 0.8, "slower")]
    assert choose(M, slow).chosen is None
    assert choose(M, [slow[0], trial(RECOMPUTES, 1.1)]).chosen == RECOMPUTES


def test_recomputing_is_compared_with_saving_round_by_round() -> None:
    def timed(*ratios: float) -> Timed:
        speed = trial(SAVES, math.exp(sorted(ratios)[1])).speed
        return Timed(verdict="faster", speed=speed, log_ratios=ratios)

    both = {SAVES: timed(1.0, 0.1, 0.6), RECOMPUTES: timed(0.9, 0.0, 0.5)}
    assert over_saving_of(RECOMPUTES, both) == pytest.approx(math.exp(-0.1))
    assert isinstance(over_saving_of(SAVES, both), NotMeasured)
    assert isinstance(over_saving_of(RECOMPUTES, {RECOMPUTES: both[RECOMPUTES]}), NotMeasured)
    apart = {**both, SAVES: timed(1.0, 0.1, 0.6, 0.2)}
    assert isinstance(over_saving_of(RECOMPUTES, apart), NotMeasured)


class SlyRunner:
    """Right numbers. Its forward gives what it gave before; its backward takes its time."""

    copied_bytes = 0

    def __init__(self, block: Form, tensors: Sequence[Tensor]) -> None:
        self._tensors, self._known = list(tensors), None

        class Sly(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, known: Tensor, *given: Tensor) -> Tensor:
                ctx.save_for_backward(*given)
                return known

            @staticmethod
            def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
                time.sleep(0.02)
                with torch.enable_grad():
                    given = [t.detach().requires_grad_() for t in ctx.saved_tensors]
                    y = reference_backend.chain(given[0], given[1:], block.forms)
                return None, *torch.autograd.grad(y, given, grad)

        def run(x: Tensor) -> Tensor:
            if self._known is None:
                with torch.no_grad():
                    self._known = reference_backend.chain(x, self._tensors, block.forms)
            y: Tensor = Sly.apply(self._known.view_as(self._known), x, *self._tensors)
            return y

        self._run = run

    def __call__(self, x: Tensor) -> Tensor:
        return self._run(x)


class SlyBackend:
    name = "sly"
    abilities = Abilities(
        devices=None,
        modes=(BackendMode(name="late", planned=("training",)),),
        needs="patience",
        trains=True,
        deterministic=True,
    )

    def unavailable(self) -> list[str]:
        return []

    def unsupported_reasons(self, *_: object) -> list[str]:
        return []

    def build(self, block: Form, tensors: Sequence[Tensor], mode: str | None = None) -> SlyRunner:
        check_build(self, block, tensors, mode)
        return SlyRunner(block, tensors)


def test_a_block_that_is_faster_forward_and_slower_with_its_backward_is_never_welded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(backends, "BACKENDS", (SlyBackend(), reference_backend.BACKEND))
    model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 64)).train()
    made = tw.plan(model, torch.randn(64, 256), training=True, budget_s=4, remember=False)
    (tuning,) = made.planned[0].tunings
    (tried,) = tuning.trials
    assert tried.verified
    assert tried.verdict in ("slower", "not measured")  # the latter on a busy machine
    assert tuning.chosen is None
    assert made.decisions == ()


# ---- what is kept ----


@pytest.mark.parametrize("probability", [0.0, 0.3])
def test_what_is_kept_for_the_backward_is_counted(probability: float) -> None:
    model = mlp(probability).train()
    (block,) = tw.find(model, X, training=True)
    ways = {
        choice: [Decision(block=block, by_rows=((M, M, choice),), training=True)]
        for choice in (SAVES, RECOMPUTES)
    }
    found = with_saved_bytes(
        model, block, X.clone().requires_grad_(), ways, none_timed(list(ways), "not asked for")
    )
    assert not tw.stats(model)  # it is left unwelded
    masks = M * H // 8 if probability else 0  # a bit for each value
    assert found[RECOMPUTES].saved_bytes == 4 * M * K + 8 + masks  # and a checksum
    assert found[SAVES].saved_bytes == 4 * M * (K + H) + masks
    for one in found.values():
        assert isinstance(one.original_saved_bytes, int)
        assert one.original_saved_bytes >= 4 * M * (K + 2 * H)


@functools.cache
def forced_plan() -> Plan:
    return tw.plan(Two(0.25, 0.0).train(), X, training=True, force=True)


def kept_plan(chosen: Choice = RECOMPUTES) -> Plan:
    """A plan by force, with figures as if it had been measured."""
    made = forced_plan()
    found = replace(
        trial(chosen, 1.5), saved_bytes=100_000, original_saved_bytes=400_000, over_saving=1.1
    )
    planned = tuple(
        replace(one, tunings=(replace(one.tunings[0], trials=(found,), chosen=chosen),))
        for one in made.planned
    )
    return replace(made, planned=planned, forced=False)


def test_the_text_says_what_is_kept_and_dropped() -> None:
    text = str(kept_plan())
    assert "keeps 25 % of what the original keeps for the backward" in text
    assert "100 kB of 400 kB" in text
    assert "cpu recompute" in text
    assert "gelu/b/drop:0.25;" in text
    assert "gelu/b;identity/b " in text
    assert "kept: for the backward of one call, parameters left out" in text


def test_a_plan_that_does_not_know_says_nothing_of_it() -> None:
    text = str(forced_plan())
    assert "for the backward" not in text
    assert "no copies of weights" in text


def test_such_plans_are_saved_and_loaded(tmp_path: Path) -> None:
    made = kept_plan()
    made.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == made


def test_plans_of_before_save_hidden_values(tmp_path: Path) -> None:
    """Format 3: no choice says what it keeps."""
    made = kept_plan(SAVES)
    made.save(tmp_path / "plan.json")
    data = json.loads((tmp_path / "plan.json").read_text())
    assert data["torchweld_plan"] == Plan.FORMAT.version
    data["torchweld_plan"] = 3
    for planned in data["planned"]:
        for tried in planned["tunings"][0]["trials"]:
            for name in ("saved_bytes", "original_saved_bytes", "over_saving"):
                del tried[name]
    (tmp_path / "plan.json").write_text(json.dumps(data))
    old = Plan.load(tmp_path / "plan.json")
    assert [decision.choices for decision in old.decisions] == [(SAVES,), (SAVES,)]
    model = Two(0.25, 0.0).train()
    tw.apply(model, old)
    model(X).sum().backward()
    assert [one.originals for one in tw.stats(model).values()] == [{}, {}]


def test_a_fused_model_trains_as_the_original_does() -> None:
    """By force, with dropout: from one seed, the losses are the original's."""
    torch.manual_seed(3)
    model = Two(0.25, 0.0).train()
    plain = Two(0.25, 0.0).train()
    plain.load_state_dict(model.state_dict())
    tw.apply(model, kept_plan(RECOMPUTES))
    losses = []
    for one in (model, plain):
        torch.manual_seed(5)
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        own = []
        for _ in range(5):
            optimizer.zero_grad()
            loss = one(X).square().mean()
            loss.backward()
            optimizer.step()
            own.append(loss.detach())
        losses.append(torch.stack(own))
    torch.testing.assert_close(*losses)
    assert all(not one.originals for one in tw.stats(model).values())


def test_gradients_of_the_tuning_do_not_loosen_the_check_of_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tuning takes steps. What they leave in `.grad` once counted as eager's error."""
    for place in (choice_timing, whole_model):
        monkeypatch.setattr(place, "compare", FakeCompare())
    model = nn.Sequential(nn.LayerNorm(K), nn.Linear(K, H), nn.GELU(), nn.Linear(H, N)).train()
    x = torch.randn(M, K)
    model(x).sum().backward()
    before = [parameter.grad for parameter in model.parameters()]
    plan = tw.plan(model, x, training=True, budget_s=600, remember=False)
    (whole,) = plan.whole
    assert {error.tensor for error in whole.errors} >= {"grad 0.weight", "grad 3.weight"}
    assert all(isinstance(error.eager, float) and error.eager < 1e-4 for error in whole.errors)
    assert all(p.grad is g for p, g in zip(model.parameters(), before, strict=True))
