"""`tw.profiling` inside a user's own loop."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from torchweld.core.errors import NotMeasuredError, TorchweldError
from torchweld.core.not_measured import NotMeasured
from torchweld.profiles.profile_doubts import doubt
from torchweld.profiles.recording import profile_building
from torchweld.profiles.recording.loop_profile import profiling
from torchweld.profiles.recording.torch_profiler import Recorder
from torchweld.timing.core_waiting import CoreWaiting

pytestmark = pytest.mark.usefixtures("brief_profiles")


def attached(model: nn.Module) -> bool:
    return any("forward" in module.__dict__ for module in model.modules())


def test_a_few_steps_of_a_training_loop_are_profiled_and_the_others_left_alone() -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    watched = []
    with profiling(model, wait=2, active=2) as p:
        for _ in range(20):
            watched.append(attached(model))
            optimizer.zero_grad()
            model(torch.randn(4, 16)).square().mean().backward()
            optimizer.step()
            p.step()
    # The second step that passes is the untouched one of the first round. Of two steps under the
    # profiler the first warms up: ops, modules; shapes and memory at last.
    a_round = [False, False, False, True, True]
    expected = [False, *a_round, False, *a_round, True, True]
    assert watched == expected + [False] * (20 - len(expected))
    found = p.profile
    assert found.timing is not None
    assert found.about.training
    places = {(found.modules[op.module].path, op.phase) for op in found.ops}
    assert {("0", "forward"), ("0", "backward"), ("optimizer", "optimizer")} <= places
    assert found.memory is not None
    assert [check.what for check in found.timing.checks] == ["held-out steps"]
    assert p.profile is found


def test_a_loop_that_is_too_short_says_how_long_it_must_be() -> None:
    model = nn.Linear(4, 4)
    with profiling(model, wait=2, active=2) as p:
        for _ in range(4):
            model(torch.ones(4))
            p.step()
    assert not attached(model)
    with pytest.raises(NotMeasuredError, match="4 steps were seen and 14 are needed"):
        _ = p.profile


def test_a_loop_that_breaks_leaves_the_model_and_the_profiler_free() -> None:
    model = nn.Linear(4, 4)

    def loop() -> None:
        with profiling(model, wait=1, active=2) as p:
            for _ in range(20):
                model(torch.ones(4))
                if attached(model):
                    raise RuntimeError("on purpose")
                p.step()

    with pytest.raises(RuntimeError, match="on purpose"):
        loop()
    assert not attached(model)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        model(torch.ones(4))


def test_wrong_schedules_are_refused() -> None:
    with pytest.raises(TorchweldError, match="wait is 0"):
        profiling(nn.Linear(2, 2), wait=0)
    with pytest.raises(TorchweldError, match="active is 1"):
        profiling(nn.Linear(2, 2), active=1)


def run(model: nn.Module, p: profiling, steps: int = 20) -> None:
    for _ in range(steps):
        model(torch.ones(4))
        p.step()


def test_another_profiler_is_reported_when_the_profile_is_asked_for() -> None:
    model = nn.Linear(4, 4)
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with profiling(model, wait=1, active=2) as p, torch.profiler.profile(activities=cpu) as theirs:
        run(model, p)
    assert not attached(model)
    assert any(event.name == "aten::linear" for event in theirs.events())
    with pytest.raises(TorchweldError, match="a torch profiler is running already"):
        _ = p.profile


def test_of_two_nested_blocks_one_is_profiled_and_the_other_says_why_not() -> None:
    model = nn.Linear(4, 4)
    with profiling(model, wait=1, active=2) as outer, profiling(model, wait=2, active=2) as inner:
        for _ in range(20):
            model(torch.ones(4))
            outer.step()
            inner.step()
    assert not attached(model)
    assert outer.profile.ops
    with pytest.raises(TorchweldError, match="a torch profiler is running already"):
        _ = inner.profile


def test_a_step_without_an_op_does_not_break_the_loop() -> None:
    with profiling(nn.Linear(4, 4), wait=1, active=2) as p:
        for _ in range(20):
            p.step()
    with pytest.raises(NotMeasuredError, match="ran no op"):
        _ = p.profile


def test_an_error_that_is_not_ours_is_told_later_as_one_of_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(self: Recorder) -> None:
        raise RuntimeError("kineto is not well")

    monkeypatch.setattr(Recorder, "start", broken)
    model = nn.Linear(4, 4)
    with profiling(model, wait=1, active=2) as p:
        run(model, p)
    assert not attached(model)
    with pytest.raises(TorchweldError, match=r"step 1 .*RuntimeError: kineto is not well"):
        _ = p.profile


def test_a_step_outside_the_block_is_refused_at_once() -> None:
    p = profiling(nn.Linear(4, 4))
    with pytest.raises(TorchweldError, match=r"with tw\.profiling"):
        p.step()
    with p:
        pass
    p.step()  # the block is over, and a step after it only counts
    with pytest.raises(TorchweldError, match="entered twice"), p:
        pass


def test_a_loop_that_ends_with_its_last_recording_has_no_check() -> None:
    model = nn.Linear(4, 4)
    with profiling(model, wait=1, active=2) as p:
        run(model, p, steps=13)
    assert p.profile.timing is not None
    assert p.profile.timing.checks == ()


def test_a_loop_whose_clock_disagrees_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(4, 4)
    with profiling(model, wait=1, active=2) as p:
        run(model, p)
    samples = p._samples
    samples.rounds = [dataclasses.replace(r, plain_us=1e6) for r in samples.rounds]
    monkeypatch.setattr(profile_building, "doubt", doubt)  # as it is
    assert isinstance(p.profile.step_us, NotMeasured)
    assert "steps took 1.00 s without the profiler" in p.profile.step_us.reason


def test_corrected_times_that_miss_the_clock_are_noticed() -> None:
    model = nn.Linear(4, 4)
    with profiling(model, wait=1, active=2) as p:
        run(model, p)
    samples = p._samples
    samples.rounds = [dataclasses.replace(r, plain_us=1e6) for r in samples.rounds]
    assert any("% off those without it" in notice for notice in p.profile.notices)


def test_a_loop_that_others_disturbed_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CoreWaiting, "lost", lambda self: 0.9)
    monkeypatch.setattr(profile_building, "doubt", doubt)
    model = nn.Linear(4, 4)
    with profiling(model, wait=1, active=2) as p:
        run(model, p)
    assert isinstance(p.profile.step_us, NotMeasured)
    assert p.profile.timing is not None
    assert p.profile.timing.disturbed == p.profile.timing.rounds == 2
