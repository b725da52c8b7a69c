"""Kept runs on a page: speed-ups over time, apart by machine, whatever somebody edited."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.made_comparisons import comparison

from torchweld.core.not_measured import NotMeasured
from torchweld.core.records import to_plain
from torchweld.gates.gate_outcome import Outcome, TimeVerdict
from torchweld.history import Fingerprint, History, fingerprint_here, history_store, of_comparison
from torchweld.pages import history_view
from torchweld.pages.history_view import GatedNow, history_plots
from torchweld.pages.run_view import run_page
from torchweld.plans.plan import Plan

HERE = fingerprint_here()


@pytest.fixture
def history(tmp_path: Path) -> Iterator[History]:
    with History.open(tmp_path / "history.sqlite", create=True) as opened:
        yield opened


def keep_fuse(history: History, name: str, speedup: float | NotMeasured) -> None:
    run = history.begin(name, "fuse", "gpt", {"quick": True})
    data = {"workload": "1x64", "speedup": speedup, "interval": [1.0, 9.0], "verdict": "faster"}
    if isinstance(speedup, NotMeasured):
        data = {"workload": "1x64", "speed": speedup, "verdict": "not measured"}
    run.add("1x64", to_plain(data), {"log_ratios": [0.0, 0.0], "control_log_ratios": [0.0]})
    made = Plan(model="Gpt", structure="", training=False, fingerprint="", torch="", planned=())
    run.add("plan", {"plan": to_plain(made)})
    run.finish()


def keep_gate(history: History) -> None:
    run = history.begin("main", "gate", "gpt", {})
    for number, speedup in enumerate((2.0, 2.2, 2.4)):
        data, samples = of_comparison(comparison(speedup))
        run.add(f"time of 1x64 ({number})", {"workload": "1x64", **data}, samples)
    run.add("time of 1x64 (9)", {"workload": "1x64", "speedup": "edited"})
    run.finish()


def test_runs_of_one_thing_are_one_plot_oldest_first(history: History) -> None:
    keep_fuse(history, "a", 1.5)
    keep_gate(history)
    keep_fuse(history, "a", NotMeasured("too busy"))
    (plot,) = history_plots(history.runs())
    assert plot.title == "gpt: 1x64"
    assert [(p.kind, p.verdict, p.speedup) for p in plot.points] == [
        ("fuse", "", 1.5),
        ("gate", "accepted", 2.2),
        ("fuse", "", NotMeasured("too busy")),
    ]
    low, high = plot.points[1].interval or (0.0, 0.0)
    assert low < 2.0 < 2.4 < high  # all comparisons of the baseline
    assert plot.points[0].interval == (1.0, 9.0)
    assert plot.points[0].run < plot.points[2].run


def test_machines_are_never_in_one_plot(history: History, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_fuse(history, "a", 1.5)

    def elsewhere() -> Fingerprint:
        return replace(HERE, key="elsewhere")

    monkeypatch.setattr(history_store, "fingerprint_here", elsewhere)
    keep_fuse(history, "a", 3.0)
    plots = history_plots(history.runs())
    assert [plot.title for plot in plots] == [
        f"gpt: 1x64, machine {HERE.key}",
        "gpt: 1x64, machine elsewhere",
    ]


def test_a_bench_has_a_plot_for_each_cell_of_its_first_backend(history: History) -> None:
    run = history.begin("b", "bench", "a grid", {"backends": ["cpu", "torch"]})
    run.add("8 rows", {"cpu": {"speedup": 2.0, "low": 1.9, "high": 2.1}, "torch": {"speedup": 9.0}})
    run.add("odd", {"cpu": {"speedup": -1.0, "low": None}})
    plots = history_plots(history.runs())
    assert [(p.title, p.points[0].speedup) for p in plots] == [
        ("8 rows, cpu", 2.0),
        ("odd, cpu", NotMeasured("the run does not say")),
    ]
    assert plots[0].points[0].interval == (1.9, 2.1)


def test_what_a_gate_finds_now_is_the_last_point(history: History) -> None:
    keep_gate(history)
    time = TimeVerdict(
        workload="1x64",
        verdict="slower",
        reason="",
        against="",
        speedup=1.1,
        interval=(1.0, 1.2),
    )
    outcome = Outcome(
        baseline="main",
        what="gpt",
        accepted="",
        changes=(),
        lost=(),
        welded=(1, 1),
        times=(time,),
        notes=(),
        accept_command="",
    )
    now = GatedNow(outcome=outcome, created="2026-11-18", fingerprint=HERE)
    (plot,) = history_plots(history.runs(), now)
    assert (plot.points[-1].verdict, plot.points[-1].speedup) == ("failed", 1.1)
    assert plot.points[-1].interval == (1.0, 1.2)


def test_of_many_plots_those_with_most_points_are_kept(
    history: History, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = history.begin("b", "bench", "a grid", {"backends": ["cpu"]})
    run.add("once", {"cpu": {"speedup": 2.0}})
    for _ in range(2):
        keep_fuse(history, "a", 1.5)
    monkeypatch.setattr(history_view, "MOST_PLOTS", 1)
    (plot,) = history_plots(history.runs())
    assert plot.title == "gpt: 1x64"


def test_a_kept_run_is_a_page(history: History) -> None:
    keep_fuse(history, "a", 1.5)
    (run,) = history.runs()
    page = run_page(run)
    assert page.title == "a: gpt"
    assert page.verdict.startswith("Gpt: nothing was welded")
    (strip,) = page.strips
    assert (strip.name, strip.ratios, strip.control) == ("1x64", (1.0, 1.0), (1.0,))
    assert (strip.speedup, strip.interval, strip.verdict) == (1.5, (1.0, 9.0), "faster")
    assert dict(page.environment)["CPU"] == HERE.cpu
    assert page.history
    assert any("quick True" in note for note in page.notes)


def test_a_kept_profile_of_an_earlier_version_says_that_it_has_figures_alone(
    history: History,
) -> None:
    run = history.begin("p", "profile", "gpt", {"steps": 3})
    run.add("step", {"step_us": 1234.5})
    (kept,) = history.runs()
    page = run_page(kept)
    assert "a step takes 1.23 ms" in page.verdict
    assert "unfinished" in page.verdict
    assert any("kept with the figures of a profile alone" in note for note in page.notes)
