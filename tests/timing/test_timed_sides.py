"""Sides: callables under an injected clock, what counts as preempted, the cache flush."""

import gc
import itertools

import pytest
import torch

from torchweld.core.errors import NotMeasuredError, TorchweldError
from torchweld.timing import CallableSide, core_waiting
from torchweld.timing.timed_sides import CacheFlush, as_side, last_level_cache_bytes, seconds_of


class Ticking:
    """A clock that advances by what the callable under test says it took."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def work(self) -> None:
        self.now_s += 0.25


def test_a_callable_runs_as_often_as_asked() -> None:
    clock = Ticking()
    assert CallableSide(clock.work, clock).time(6) == 1.5


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_waits_while_the_clock_runs(enabled: bool) -> None:
    seen: list[bool] = []
    before = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        CallableSide(lambda: seen.append(gc.isenabled())).time(1)
        assert seen == [False]
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if before else gc.disable)()


def test_garbage_collection_is_restored_after_an_error() -> None:
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError):
        CallableSide(lambda: 1 // 0).time(1)
    assert gc.isenabled()


@pytest.mark.parametrize(
    ("calls", "switches", "preempted"),
    [(1, 0, False), (1, 1000, True), (4000, 1000, False)],
)
def test_preemption_is_judged_by_its_rate(
    monkeypatch: pytest.MonkeyPatch, calls: int, switches: int, preempted: bool
) -> None:
    counts = itertools.cycle([0, switches])
    monkeypatch.setattr(core_waiting, "switches", lambda: next(counts))
    clock = Ticking()
    side = CallableSide(clock.work, clock)
    side.time(calls)
    assert side.preempted is preempted


def test_one_switch_spoils_a_short_block(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = iter([0, 1])
    monkeypatch.setattr(core_waiting, "switches", lambda: next(counts))
    times = iter([0.0, 200e-6])
    side = CallableSide(lambda: None, lambda: next(times))
    side.time(1)
    assert side.preempted


def test_the_system_counts_switches() -> None:
    first = core_waiting.switches()
    assert 0 <= first <= core_waiting.switches()


@pytest.mark.parametrize(("waited_s", "preempted"), [(0.001, False), (0.02, True), (None, True)])
def test_switches_in_a_long_block_count_if_threads_waited(
    monkeypatch: pytest.MonkeyPatch, waited_s: float | None, preempted: bool
) -> None:
    times = iter([0.0, 0.1, 1.0, 1.1])
    side = CallableSide(lambda: None, lambda: next(times))
    side.time(1)  # from now on its blocks are known to be long
    counts, waits = iter([0, 1000]), iter([5.0, None if waited_s is None else 5.0 + waited_s])
    monkeypatch.setattr(core_waiting, "switches", lambda: next(counts))
    monkeypatch.setattr(core_waiting, "waited_s", lambda: next(waits))
    side.time(1)
    assert side.preempted is preempted


def test_a_model_with_a_submodule_called_time_is_a_callable() -> None:
    class Diffusion(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.time = torch.nn.Linear(2, 2)

        def forward(self) -> torch.Tensor:
            return torch.ones(1)

    side = as_side(Diffusion(), "candidate", lambda: 0.0)
    assert isinstance(side, CallableSide)


def test_an_object_with_time_is_driven_as_it_is() -> None:
    side = CallableSide(lambda: None)
    assert as_side(side, "candidate", lambda: 0.0) is side


def test_what_cannot_be_timed_is_refused_by_name() -> None:
    with pytest.raises(TorchweldError, match="fused is a Tensor, which cannot be timed"):
        as_side(torch.ones(1), "fused", lambda: 0.0)


class Reporting:
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def time(self, calls: int) -> float:
        return self.seconds


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_impossible_times_are_refused_by_name(seconds: float) -> None:
    with pytest.raises(NotMeasuredError, match=f"fused reported {seconds} s for 3 calls"):
        seconds_of(Reporting(seconds), 3, "fused")


def test_an_error_names_the_side_and_keeps_the_cause() -> None:
    with pytest.raises(NotMeasuredError, match="fused raised ZeroDivisionError") as caught:
        seconds_of(CallableSide(lambda: 1 // 0), 1, "fused")
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_an_interrupt_passes() -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        seconds_of(CallableSide(interrupted), 1, "fused")


def test_the_flush_is_larger_than_the_last_cache_and_writes_all_of_it() -> None:
    flush = CacheFlush()
    assert flush.size_bytes >= 2 * min(last_level_cache_bytes(), 512 << 20)
    flush()
    assert bool((flush._buffer == 1.0).all())


def test_the_flush_is_bounded() -> None:
    assert CacheFlush(last_level_bytes=1).size_bytes == 64 << 20
