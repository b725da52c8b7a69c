"""Timed regions wait for a GPU before the clock starts and before it is read."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from torchweld.bench import concurrent_callers
from torchweld.bench.runtime_server import RuntimeServer
from torchweld.bench.step_costs import faults_and_peak
from torchweld.machine import device_waiting
from torchweld.plans.choice_timing import FaceSide, seconds_of
from torchweld.profiles.recording import live_profile, profile_building
from torchweld.timing import CallableSide

Log = list[str]


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    """What happened, in order, in a process that uses a GPU which is not there."""
    seen: Log = []
    monkeypatch.setattr(device_waiting, "gpu_in_use", lambda: True)
    monkeypatch.setattr(device_waiting, "_used_gpus", list)  # none but the current one
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: seen.append("wait"))
    return seen


def ticking(log: Log) -> Callable[[], float]:
    def clock() -> float:
        log.append("clock")
        return float(len(log))

    return clock


TIMED = ["wait", "clock", "call", "call", "wait", "clock"]


def test_without_a_gpu_nothing_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: pytest.fail("it waited"))
    device_waiting.wait_for_gpu()


def test_every_gpu_that_is_used_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The current one is 0, the model is on 2, and nothing was put on 1 and 3."""
    waited: list[int | None] = []
    monkeypatch.setattr(device_waiting, "gpu_in_use", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda index=None: waited.append(index))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    has_context = {0, 2}.__contains__
    monkeypatch.setattr(torch._C, "_cuda_hasPrimaryContext", has_context, raising=False)
    device_waiting.wait_for_gpu()
    assert waited == [2, None]


def test_callables(log: Log) -> None:
    CallableSide(lambda: log.append("call"), ticking(log)).time(2)
    assert log == TIMED


def test_choices_of_a_plan(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "perf_counter", ticking(log))

    class Shown:
        def show(self) -> None: ...

    FaceSide(cast(Any, Shown()), [lambda: log.append("call")]).time(2)
    assert log == TIMED
    log.clear()
    seconds_of(lambda: log.append("call"))
    assert log == ["call", "wait", "clock", "call", "wait", "clock"]


def test_single_calls(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    server = cast(Any, RuntimeServer.__new__(RuntimeServer))
    server.call = lambda: log.append("call")
    server.show = lambda: None
    monkeypatch.setattr(time, "perf_counter", ticking(log))
    server.latencies(1)
    assert log == ["call", "wait", "clock", "call", "wait", "clock"]


def test_modules_of_a_profile(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    class Inner(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            log.append("inner")
            return x

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def forward(self, x: Tensor) -> Tensor:
            log.append("outer")
            return cast(Tensor, self.inner(x))

    model = Outer()
    monkeypatch.setattr(profile_building, "has_cuda", lambda: True)
    monkeypatch.setattr(time, "perf_counter", ticking(log))
    with live_profile._clocked([("", model)], ["inner"]) as spent:
        model(torch.ones(1))
    assert log == ["outer", "wait", "clock", "inner", "wait", "clock"]
    assert spent == {"inner": 3.0}


def test_callers_at_once(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(concurrent_callers, "gpu_in_use", lambda: True)
    monkeypatch.setattr(time, "perf_counter", ticking(log))
    team = concurrent_callers.Callers(1)
    team.rate(lambda: log.append("call"), 0.0)
    team.end()
    assert log == ["clock", "clock", "call", "wait", "clock"]


def test_page_faults_of_a_step(log: Log) -> None:
    faults_and_peak(lambda: log.append("call"))
    assert log[-2:] == ["call", "wait"]
