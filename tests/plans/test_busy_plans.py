"""Plans on a busy machine, whose load these tests make themselves: useful, and never a lie."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from tests.support.busy import busy_cores
from torch import nn

import torchweld as tw
from torchweld.cli.main import run
from torchweld.core.measured_speed import Speed
from torchweld.core.not_measured import NotMeasured
from torchweld.models import MODELS
from torchweld.plans.known_speeds import SpeedTable, table_here
from torchweld.report.plan_text import sentence
from torchweld.welds.swapping.swap import stats


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.mark.parametrize("burning", [1, 2 * (os.cpu_count() or 1)])
def test_what_is_said_is_what_was_measured(burning: int) -> None:
    """Whatever could be measured beside this load, each block's words fit its figures."""
    model, inputs = MODELS["mixer"].build()
    with busy_cores(burning):
        made = tw.plan(model, inputs, quick=True)
    first = str(made).splitlines()[0]
    assert first.startswith("This machine is busy: other processes use")
    for one in made.planned:
        for tuning in one.tunings:
            verdicts = {trial.verdict for trial in tuning.trials}
            if tuning.outcome == "not measured":
                assert "not measured" in verdicts
                assert tuning.why_unmeasured
            if tuning.outcome == "not faster":
                assert "not measured" not in verdicts
            for trial in tuning.trials:
                timed = trial.verdict in ("faster", "slower", "same")
                assert isinstance(trial.speed, Speed if timed else NotMeasured)
    unmeasured = made.outcomes["not measured"]
    if not made.decisions:
        assert ("could not be measured" in sentence(made)) == bool(unmeasured)
    if unmeasured:
        assert any("--budget" in notice and "--no-measure" in notice for notice in made.notices)


def test_a_large_gain_is_found_beside_a_busy_core() -> None:
    """The policy gains three times and more; a core that others use does not hide that."""
    model, inputs = MODELS["policy"].build()
    with busy_cores(1):
        tw.fuse(model, inputs, budget_s=20)
    made = tw.plan_of(model)
    assert made is not None
    assert made.outcomes == {"welded": 1}, str(made)


def test_the_exit_code_tells_not_measured_from_not_faster(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchweld.plans import kernel_choice
    from torchweld.plans.choice_timing import Timed

    def told(verdict: str, speed: Speed | NotMeasured) -> int:
        def times(*args: object) -> dict[object, Timed]:
            return dict.fromkeys(args[3], Timed(verdict=verdict, speed=speed))  # type: ignore[call-overload, arg-type]

        monkeypatch.setattr(kernel_choice, "time_choices", times)
        return run(["fuse", "policy", "--quick", "--no-profile", "--afresh"])

    assert told("not measured", NotMeasured("too busy")) == 2
    assert "1 of 1 block could not be measured (too busy)" in capsys.readouterr().out
    slow = Speed(speedup=0.8, interval=(0.7, 0.9), before_us=8.0, after_us=10.0)
    assert told("slower", slow) == 0
    assert "no faster than the original" in capsys.readouterr().out


# ---- without timing ----


def test_without_timing_a_table_decides_however_busy_the_machine_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torchweld.plans import choice_timing, kernel_choice

    def never(*args: object, **kwargs: object) -> None:
        raise AssertionError("timed")

    monkeypatch.setattr(choice_timing, "compare", never)
    monkeypatch.setattr(kernel_choice, "time_choices", never)
    table = table_here()
    if isinstance(table, NotMeasured):
        pytest.skip(table.reason)
    model = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)).eval()
    x = torch.randn(8, 512)
    with busy_cores(1):
        tw.fuse(model, x, measure=False)
    made = tw.plan_of(model)
    assert made is not None
    assert made.outcomes == {"welded": 1}, made.details()
    assert "not measured here: by the table for" in sentence(made)
    assert table.date in str(made)
    (one,) = made.planned
    best = one.tunings[0].best
    assert best is not None
    assert best.verdict == "known"
    assert isinstance(best.speed, NotMeasured)
    assert all(isinstance(whole.speed, NotMeasured) for whole in made.whole)
    with torch.inference_mode():
        model(x)
    assert all(not one.originals for one in stats(model).values())


def test_what_no_table_knows_is_left_as_it_is() -> None:
    table = table_here()
    if isinstance(table, NotMeasured):
        pytest.skip(table.reason)
    model = nn.Sequential(nn.Linear(3, 5), nn.GELU(), nn.Linear(5, 3)).eval()
    made = tw.plan(model, torch.randn(2, 3), measure=False)
    assert made.outcomes == {"not known": 1}
    assert "1 of 1 block not known to be faster" in sentence(made)


def test_without_a_table_nothing_is_welded_and_the_plan_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from torchweld.plans import kernel_choice

    why = NotMeasured("no table of speeds for riscv is shipped")
    monkeypatch.setattr(kernel_choice, "table_here", lambda: why)
    model, inputs = MODELS["policy"].build()
    made = tw.plan(model, inputs, measure=False)
    assert made.decisions == ()
    assert made.outcomes == {"not known": 1}
    assert why.reason in sentence(made)
    assert run(["fuse", "policy", "--no-measure"]) == 0
    assert why.reason in " ".join(capsys.readouterr().out.split())


def test_ways_that_exclude_each_other_are_refused() -> None:
    model, inputs = MODELS["policy"].build()
    with pytest.raises(tw.TorchweldError, match="give one of them"):
        tw.plan(model, inputs, force=True, measure=False)
    assert run(["fuse", "policy", "--no-measure", "--quick"]) == 2


def test_tables_are_read_for_the_kernels_in_use() -> None:
    table = table_here()
    assert isinstance(table, (SpeedTable, NotMeasured))
    if isinstance(table, SpeedTable):
        assert table.isa == tw._ops.compiled.isa()
