"""What is said about other work on the machine."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.busy import busy_cores as burning

from torchweld.core.not_measured import NotMeasured
from torchweld.machine import machine_load


def test_a_burning_process_is_noticed() -> None:
    with burning(1):
        found = machine_load.busy_cores(0.5)
    assert not isinstance(found, NotMeasured)
    assert found > 0.4  # one core's worth, where nothing else takes it
    assert "cores" in machine_load.load_words(found)


def test_this_process_is_not_counted() -> None:
    """Beside whatever else runs here, its own work is not the work of others."""
    meter, begun = machine_load.LoadMeter(), machine_load._counters()
    sum(range(30_000_000))
    now, others = machine_load._counters(), meter.busy_cores()
    assert isinstance(begun, machine_load._Counters)
    assert isinstance(now, machine_load._Counters)
    assert not isinstance(others, NotMeasured)
    elapsed_s = now.clock_s - begun.clock_s
    everything = (now.busy_s - begun.busy_s) / elapsed_s
    own = (now.own_s - begun.own_s) / elapsed_s
    assert now.own_s - begun.own_s > 0.1  # it did work, however busy the machine was
    assert others <= everything - own + 0.1


@pytest.mark.parametrize("busy", [0.0, 0.1, NotMeasured("no such file")])
def test_a_quiet_machine_and_an_unknown_one_say_nothing(busy: float | NotMeasured) -> None:
    assert machine_load.load_words(busy) == ""


def test_a_system_that_does_not_tell_is_not_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(machine_load, "STAT", tmp_path / "nothing")
    assert isinstance(machine_load.busy_cores(0.01), NotMeasured)
