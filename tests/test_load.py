"""What is said about other work on the machine."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.busy import busy_cores as burning

from torchweld import load
from torchweld.not_measured import NotMeasured


def test_a_burning_process_is_noticed() -> None:
    with burning(1):
        found = load.busy_cores(0.5)
    assert not isinstance(found, NotMeasured)
    assert found > 0.4  # one core's worth, where nothing else takes it
    assert "cores" in load.load_words(found)


def test_this_process_is_not_counted() -> None:
    before, own = load._busy_s(), load._own_s()
    sum(range(20_000_000))
    used, mine = load._busy_s() - before, load._own_s() - own
    assert mine > 0
    assert used >= mine - 0.05  # what is counted for all contains what is counted for us


@pytest.mark.parametrize("busy", [0.0, 0.1, NotMeasured("no such file")])
def test_a_quiet_machine_and_an_unknown_one_say_nothing(busy: float | NotMeasured) -> None:
    assert load.load_words(busy) == ""


def test_a_system_that_does_not_tell_is_not_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(load, "STAT", tmp_path / "nothing")
    assert isinstance(load.busy_cores(0.01), NotMeasured)
