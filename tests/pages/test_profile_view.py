"""One side of a page says what the profile and its account say."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from tests.models.test_models import small
from tests.support.block_profiles import Call, blocks, make, on_device
from tests.support.made_profiles import make_faults
from tests.support.made_traces import TRACES
from tests.support.measured import measured

from torchweld.core.not_measured import NotMeasured
from torchweld.core.records import from_plain, json_text
from torchweld.findings import diagnose
from torchweld.pages.page_records import ModuleRow, PageSide
from torchweld.pages.profile_view import side_of
from torchweld.profiles.accounting.time_account import account
from torchweld.profiles.profile import Profile
from torchweld.profiles.recording.live_profile import profile as take
from torchweld.profiles.recording.trace_profile import read_trace

HOSTILE = "<script>alert(1)</script>\x1b\u202e</td>&amp;"


def rows_of(profile: Profile, **more: Any) -> dict[str, ModuleRow]:
    return {row.path: row for row in side_of(profile, **more).modules}


def test_a_side_has_the_figures_of_the_step() -> None:
    profile = replace(blocks(training=True), faults=make_faults(12.5), notices=("a notice",))
    side, found = side_of(profile, "before"), account(profile)
    assert (side.name, side.about, side.step_us) == ("before", profile.about, profile.step_us)
    assert (side.account, side.explained) == (found.step, found.explained)
    assert side.findings == diagnose(profile, found)
    assert side.findings
    assert side.faults_per_step == 12.5
    assert side.notices == ("a notice", *found.notices)


def test_given_findings_are_not_diagnosed_again() -> None:
    assert side_of(blocks(), findings=()).findings == ()


@pytest.mark.parametrize("training", [False, True])
def test_a_row_has_the_figures_of_its_module(training: bool) -> None:
    profile = blocks(training=training)
    found = account(profile)
    rows = side_of(profile).modules
    assert [row.path for row in rows] == [module.path for module in profile.modules]
    for row, module, accounted in zip(rows, profile.modules, found.modules, strict=True):
        assert (row.kind, row.extra, row.parent) == (module.kind, module.extra, module.parent)
        assert row.calls == module.calls
        times = (row.forward_us, row.backward_us, row.time_us, row.own_us)
        expected = (module.forward_us, module.backward_us, module.total_us, module.self_us)
        assert times == pytest.approx(expected, abs=5.1e-4)
        assert (row.launches, row.flops) == (accounted.launches, accounted.flops)
        assert row.moved_bytes == accounted.moved_bytes
        assert row.round_trip_bytes == accounted.round_trip_bytes
        assert row.roofline_us == pytest.approx(accounted.roofline_us, abs=5.1e-4)
        assert row.bound == accounted.bound
        whole = measured(accounted.split).total_us
        assert measured(row.split).total_us == pytest.approx(whole, abs=0.004)
    assert rows[0].flops > 0


def test_with_a_device_its_time_decides() -> None:
    profile = on_device(blocks(2, live=False))
    found, rows = account(profile), side_of(profile).modules
    for row, accounted in zip(rows, found.modules, strict=True):
        assert row.time_us == pytest.approx(measured(accounted.split).total_us, abs=5.1e-4)
        assert row.own_us == pytest.approx(measured(accounted.own).total_us, abs=5.1e-4)
    # Every op without ops inside has a kernel of 5 µs, and a gap of 1 µs before it.
    assert {row.path: row.time_us for row in rows}["layers.1.mlp.up"] == pytest.approx(6.0)


def test_a_step_that_was_not_measured_has_counts_and_a_reason() -> None:
    reason = NotMeasured("the machine was busy")
    profile = replace(blocks(), step_us=reason)
    side = side_of(profile)
    assert side.step_us == side.account == side.explained == reason
    assert side.flame is None
    assert side.findings == ()
    for row in side.modules:
        assert {row.forward_us, row.backward_us, row.time_us, row.own_us, row.split} == {reason}
    assert side.modules[0].flops == account(profile).modules[0].flops > 0


# ---- what became of modules ----


def test_what_lies_in_a_welded_block_is_part_of_it() -> None:
    fates: dict[str, Any] = {
        "layers.0.mlp": ("welded", "cpu packed"),
        "layers.1.mlp": ("left", "not faster"),
        "head": ("not measured", "the machine was busy"),
    }
    rows = rows_of(blocks(), fates=fates)
    told = {path: (row.fate, row.why) for path, row in rows.items() if row.fate}
    parts = {f"layers.0.mlp.{child}": ("part", "") for child in ("up", "act", "down")}
    assert told == {**fates, **parts}


# ---- names and files ----


def test_hostile_names_are_kept_as_they_are() -> None:
    profile = make([("", HOSTILE), (HOSTILE, HOSTILE, HOSTILE)], [Call(name="x", path=HOSTILE)])
    row = rows_of(profile)[HOSTILE]
    assert (row.kind, row.extra) == (HOSTILE, HOSTILE)


def read_back(side: PageSide) -> PageSide:
    return from_plain(PageSide, json.loads(json_text(side)))


@pytest.mark.parametrize("name", ["a100_alexnet_inference", "mi250_toy_training", "cpu_only"])
def test_a_side_of_a_trace_reads_back_as_it_was(name: str) -> None:
    side = side_of(read_trace(TRACES / f"{name}.json.gz"))
    assert read_back(side) == side


@pytest.mark.usefixtures("uncorrected_profiles")
def test_a_side_of_a_live_step_reads_back_as_it_was() -> None:
    model, inputs = small("gpt")
    side = side_of(take(model, inputs, training=True, steps=2), "after")
    assert read_back(side) == side
