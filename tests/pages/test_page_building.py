"""Pages from what there is, and several pages as one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.support.bench_samples import bench, case, cell, comparison
from tests.support.block_profiles import blocks, fused_blocks
from tests.support.watched_pages import TRACE_FOLDER

from torchweld.cli.recorded_files import load_recorded
from torchweld.core.errors import TorchweldError
from torchweld.core.not_measured import NotMeasured
from torchweld.pages.page_building import joined_pages, page_of
from torchweld.pages.page_records import BlockRow, Page
from torchweld.pages.page_sections import sections_of
from torchweld.plans.plan import Plan

PLAN = Plan(model="Net", structure="", training=False, fingerprint="f", torch="9.9", planned=())
BLOCK = BlockRow(path="layers.1.mlp", what="gelu", outcome="welded", serves="cpu packed", reason="")


def test_nothing_is_no_page() -> None:
    with pytest.raises(TorchweldError, match="nothing to report"):
        page_of()


def test_one_profile_has_its_own_verdict() -> None:
    page = page_of([blocks()], command="torchweld profile net")
    assert page.title == "Net"
    assert page.verdict.startswith("Net: one step takes")
    assert [side.name for side in page.sides] == [""]
    assert page.diff is None
    assert dict(page.environment)["CPU"] == "Example CPU"
    assert page.command == "torchweld profile net"


def test_two_profiles_are_before_and_after() -> None:
    page = page_of([blocks(), fused_blocks()])
    assert [side.name for side in page.sides] == ["before", "after"]
    assert page.diff is not None
    assert page.not_comparable == ()
    assert "before and takes" in page.verdict
    assert "without an interval" in page.verdict


def test_times_that_cannot_be_compared_are_not() -> None:
    other = fused_blocks()
    page = page_of([blocks(), replace(other, about=replace(other.about, cpu="Another"))])
    assert page.not_comparable == ("CPU: Example CPU against Another",)
    assert "cannot be compared: CPU: Example CPU against Another" in page.verdict
    assert dict(page.environment)["CPU"] == "Example CPU · Another"
    unmeasured = replace(other, step_us=NotMeasured("too busy"))
    page = page_of([blocks(), unmeasured])
    assert page.not_comparable == ("after was not measured: too busy",)


def test_times_of_two_devices_are_not_compared_however_the_pages_came() -> None:
    profile = load_recorded(TRACE_FOLDER / "a100_alexnet_inference.json.gz")
    assert profile.device is not None
    other = replace(profile, device=replace(profile.device, name="NVIDIA H100 80GB HBM3"))
    one, two, same = (page_of([taken]) for taken in (profile, other, profile))
    earlier = [
        replace(page, sides=(replace(page.sides[0], device=None),)) for page in (one, two, same)
    ]
    for pages in ((one, two), tuple(earlier[:2]), (one, earlier[1])):
        found = joined_pages(pages).not_comparable
        assert any("H100" in reason and "A100" in reason for reason in found), found
    assert not any("A100" in reason for reason in page_of([profile, profile]).not_comparable)
    for pages in ((one, same), (earlier[0], earlier[2])):
        assert not any("A100" in reason for reason in joined_pages(pages).not_comparable)
    assert page_of([profile, other]).not_comparable == joined_pages((one, two)).not_comparable


def test_two_models_are_both_named() -> None:
    other = fused_blocks()
    page = page_of([blocks(), replace(other, about=replace(other.about, what="Faster"))])
    assert page.title == "Net → Faster"
    assert page.verdict.startswith("Net → Faster: a step took")


def test_the_verdict_of_a_plan_comes_before_those_of_profiles() -> None:
    page = page_of([blocks(), fused_blocks()], plan=PLAN, title="mine", notes=["a note"])
    assert page.verdict == "Net: nothing was welded: no block was found that can be welded."
    assert page.title == "mine"
    assert page.notes == ("a note",)
    assert [side.name for side in page.sides] == ["before", "after"]


def test_a_bench_says_what_it_came_to() -> None:
    page = page_of(bench=bench([cell(case(), {"cpu": comparison()})]))
    assert page.verdict.startswith("cpu is 2.00x as fast as eager at 3 × 8→16→4 gelu fp32")
    assert set(sections_of(page)) == {"verdict", "bench", "numerics", "samples", "environment"}


def test_two_pages_with_profiles_are_before_and_after() -> None:
    first, second = page_of([blocks()]), page_of([fused_blocks()])
    page = joined_pages([first, second])
    assert [side.name for side in page.sides] == ["before", "after"]
    assert page.diff is not None
    assert page.verdict.startswith("Net: a step took")
    again = joined_pages([page, second])
    assert [side.about.what for side in again.sides] == ["Net", "Net"]
    with pytest.raises(TorchweldError, match="more than two of these have a profile"):
        joined_pages([first, second, first])


def test_a_plan_that_comes_later_tells_what_became_of_modules() -> None:
    page = page_of([blocks(), fused_blocks()])
    planned = Page(title="", verdict="", blocks=(BLOCK,))
    found = joined_pages([page, planned])
    for side in found.sides:
        fates = {row.path: (row.fate, row.why) for row in side.modules}
        assert fates["layers.1.mlp"] == ("welded", "cpu packed")
        assert fates.get("layers.1.mlp.up", ("part", "")) == ("part", "")
        assert fates["layers.0.norm"] == ("", "")
    assert found.verdict == page.verdict
    assert joined_pages([found, planned]).blocks == (BLOCK,)  # each once
