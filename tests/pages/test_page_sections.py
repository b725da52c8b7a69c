"""Which sections a report has: that of the built-in GPT, fused, and that of a GPU's trace."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.bench_samples import FakeCompare

from torchweld import findings
from torchweld.cli.main import run
from torchweld.pages.page_reading import read_page
from torchweld.pages.page_records import Curve, CurvePlot, HistoryPlot, Page
from torchweld.pages.page_sections import SECTIONS, device_lanes, sections_of
from torchweld.plans import choice_timing, whole_model

TRACES = Path(__file__).parents[1] / "traces"


def test_the_report_of_the_fused_gpt_has_all_but_a_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, brief_profiles: None
) -> None:
    for place in (choice_timing, whole_model):
        monkeypatch.setattr(place, "compare", FakeCompare())
    # So small a model has little to find; how much it is depends on the machine.
    monkeypatch.setattr(findings, "LEAST_SHARE", 0.0)
    report, history = tmp_path / "gpt.html", tmp_path / "history.sqlite"
    # Nothing is timed; a busy machine only must not run out of its time.
    command = ["fuse", "gpt", "--budget", "600", "--report", str(report)]
    assert run([*command, "--save", "main", "--history", str(history)]) == 0
    page = read_page(report)
    assert sections_of(page) == tuple(one for one in SECTIONS if one != "device")
    assert device_lanes(page) == ()
    assert [side.name for side in page.sides] == ["before", "after"]
    for side in page.sides:
        assert side.flame is not None
        assert side.timeline is not None
        assert side.timeline.lanes
        assert side.memory is not None
        assert side.points
        fates = {row.path: row.fate for row in side.modules}
        assert fates["layers.0.mlp"] == "welded"
        assert fates.get("layers.0.mlp.up", "part") == "part"  # no longer called after
        assert fates["layers.0.attention"] == "left"
        assert fates["layers.0.norm1"] == ""
    assert page.diff is not None
    assert {"welded", "gone", "new"} <= set(page.diff.state)
    assert page.command.startswith("torchweld fuse gpt --budget 600 --report ")
    assert {row.outcome for row in page.blocks} == {"welded", "refused"}
    assert any(strip.name.startswith("the whole model") for strip in page.strips)
    assert any(strip.name.startswith("layers.0.mlp") for strip in page.strips)
    assert any(row.block.startswith("layers.*.mlp") for row in page.errors)
    assert any(row.block.startswith("the whole model") for row in page.errors)


def test_the_report_of_an_a100_has_its_streams(tmp_path: Path) -> None:
    report = tmp_path / "a100.html"
    trace = TRACES / "a100_training_step.json.gz"
    assert run(["report", str(trace), "--out", str(report)]) == 0
    page = read_page(report)
    assert device_lanes(page)
    (side,) = page.sides
    assert side.device_flame is not None
    assert set(SECTIONS) - set(sections_of(page)) == {
        *("bench", "history", "numerics", "samples"),  # a trace has no comparisons
        "memory",  # nor was memory recorded in this one
    }


def test_a_page_of_nothing_has_its_verdict() -> None:
    assert sections_of(Page(title="a", verdict="nothing.")) == ("verdict",)


def test_plots_without_points_make_no_section() -> None:
    curves = (CurvePlot(title="a", source="bench", curves=(Curve(name="cpu packed", points=()),)),)
    history = (HistoryPlot(title="a", points=()),)
    page = Page(title="a", verdict="nothing.", curves=curves, history=history)
    assert sections_of(page) == ("verdict",)
