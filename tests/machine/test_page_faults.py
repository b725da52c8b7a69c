"""Page faults are counted where the system counts them, and one is priced by touching pages."""

from __future__ import annotations

import mmap

import pytest

from torchweld.core.not_measured import NotMeasured
from torchweld.machine import page_faults
from torchweld.machine.page_faults import (
    PROBED_BYTES,
    UNCOUNTED,
    FaultCount,
    FaultMeter,
    allocator,
    fault_cost,
)

COST = fault_cost()
counted = pytest.mark.skipif(isinstance(COST, NotMeasured), reason=str(COST))
FRESH_BYTES = 16 << 20


def touch_fresh_memory() -> None:
    with mmap.mmap(-1, FRESH_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as region:
        for at in range(0, FRESH_BYTES, mmap.PAGESIZE):
            region[at] = 1


def taken_by_touching() -> FaultCount:
    meter = FaultMeter()
    touch_fresh_memory()
    taken = meter.taken()
    assert isinstance(taken, FaultCount)
    return taken


@counted
def test_every_fresh_page_is_one_fault() -> None:
    assert not isinstance(COST, NotMeasured)
    expected = FRESH_BYTES // COST.bytes
    assert expected <= taken_by_touching().faults < 2 * expected + 1000


@counted
def test_memory_that_was_touched_already_takes_none() -> None:
    kept = bytearray(b"x" * FRESH_BYTES)
    meter = FaultMeter()
    for at in range(0, FRESH_BYTES, mmap.PAGESIZE):
        kept[at] = 1
    taken = meter.taken()
    assert isinstance(taken, FaultCount)
    assert taken.faults < 100


@counted
def test_the_kernel_s_time_grows_with_the_faults() -> None:
    """It is counted in ticks, so it takes many of them to be sure of one."""
    meter = FaultMeter()
    for _ in range(20):
        touch_fresh_memory()
    taken = meter.taken()
    assert isinstance(taken, FaultCount)
    assert taken.system_us > 0


@counted
def test_a_fault_has_a_price_and_brings_at_least_a_page() -> None:
    assert not isinstance(COST, NotMeasured)
    assert COST.us > 0
    assert mmap.PAGESIZE <= COST.bytes <= PROBED_BYTES


def test_without_counters_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_faults, "resource", None)
    assert FaultMeter().taken() == UNCOUNTED
    assert fault_cost() == UNCOUNTED


def test_counters_that_stand_still_count_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some sandboxes give every process zero faults, which must not pass for none."""
    monkeypatch.setattr(page_faults, "_faults_of_thread", lambda: 7)
    assert fault_cost() == UNCOUNTED


def test_a_system_without_memory_for_the_probe_gives_a_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused() -> tuple[float, int]:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(page_faults, "_trial", refused)
    cost = fault_cost()
    assert isinstance(cost, NotMeasured)
    assert "Cannot allocate memory" in cost.reason


def test_a_preloaded_allocator_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_PRELOAD", "/usr/lib/libomp.so:/usr/lib/libjemalloc.so.2")
    assert allocator() == "libjemalloc.so.2"
    monkeypatch.delenv("LD_PRELOAD")
    assert "jemalloc" not in allocator()
