"""`tw.profiling` inside a user's own loop."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from torchweld.errors import NotMeasuredError, TorchweldError
from torchweld.profiler.loop import profiling

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
    # two pass, the second of them untouched for the first round; then ops, modules, untouched, ops,
    # modules; then shapes and memory
    expected = [False, False, False, True, False, False, True, True]
    assert watched == expected + [False] * (20 - len(expected))
    found = p.profile
    assert found.about.training
    places = {(found.modules[op.module].path, op.phase) for op in found.ops}
    assert {("0", "forward"), ("0", "backward"), ("optimizer", "optimizer")} <= places
    assert found.memory is not None
    assert p.profile is found


def test_a_loop_that_is_too_short_says_how_long_it_must_be() -> None:
    model = nn.Linear(4, 4)
    with profiling(model, wait=2, active=2) as p:
        for _ in range(4):
            model(torch.ones(4))
            p.step()
    assert not attached(model)
    with pytest.raises(NotMeasuredError, match="4 steps were seen and 8 are needed"):
        _ = p.profile


def test_a_loop_that_breaks_leaves_the_model_and_the_profiler_free() -> None:
    model = nn.Linear(4, 4)

    def loop() -> None:
        with profiling(model, wait=1, active=2) as p:
            for _ in range(9):
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
    with pytest.raises(TorchweldError, match="active 1"):
        profiling(nn.Linear(2, 2), active=1)
