"""Roofline plots: the machine's peaks, and points that say what the account says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.support.block_profiles import blocks, fused_blocks, on_device
from tests.support.made_profiles import make_peaks
from tests.support.made_traces import TRACES
from tests.support.measured import measured

from torchweld.core.not_measured import NotMeasured
from torchweld.models import MODELS
from torchweld.models.gpt import GptConfig
from torchweld.pages.page_records import PageSide, RoofPoint
from torchweld.pages.profile_view import side_of, with_fates
from torchweld.pages.welded_modules import welded_modules
from torchweld.plans.planner import apply, plan
from torchweld.profiles.accounting.time_account import account, roofline
from torchweld.profiles.recording.live_profile import profile as take
from torchweld.profiles.recording.trace_profile import read_trace

WELDED: dict[str, Any] = {f"layers.{i}.mlp": ("welded", "cpu packed") for i in range(4)}


def blocks_in(side: PageSide) -> dict[str, RoofPoint]:
    return {point.name: point for point in side.points if point.block}


def test_roofs_are_the_peaks_of_the_machine() -> None:
    peaks = make_peaks(gflops=123.0, gbps=[50.0, 40.0, 30.0, 20.0, 10.0], threads=1)
    roofs = side_of(replace(blocks(), peaks=peaks)).roofs
    assert {roof.name: roof.gflops for roof in roofs if roof.gflops is not None} == {
        "float32": 123.0
    }
    assert [roof.gbps for roof in roofs if roof.gbps is not None] == [50.0, 40.0, 30.0, 20.0, 10.0]
    assert roofs[-1].name == "memory"


def test_peaks_of_another_number_of_threads_are_no_roofs() -> None:
    assert side_of(replace(blocks(), peaks=make_peaks(threads=7))).roofs == ()
    assert side_of(replace(blocks(), peaks=None)).roofs == ()


def test_roofs_of_a_device_are_its_published_peaks() -> None:
    profile = read_trace(TRACES / "a100_training_step.json.gz")
    roofs = side_of(profile).roofs
    assert profile.device is not None
    known = {**profile.device.peak_gflops, "memory": profile.device.peak_gbps}
    assert {"float32", "tf32", "memory"} <= {roof.name for roof in roofs}
    for roof in roofs:
        assert known[roof.name] == (roof.gbps if roof.name == "memory" else roof.gflops)


@pytest.mark.parametrize("training", [False, True])
def test_points_are_the_rows_of_the_op_table(training: bool) -> None:
    profile = blocks(training=training)
    rows = {(row.name, row.phase): row for row in roofline(profile, account(profile))}
    points = [point for point in side_of(profile).points if not point.block]
    assert {point.name for point in points} >= {"aten::addmm", "aten::gelu"}
    for point in points:
        row = rows[point.name, point.phase]  # type: ignore[index]  # a phase, read as text
        assert (point.calls, point.flops) == (row.calls, row.flops)
        assert (point.moved_bytes, point.bound) == (row.moved_bytes, row.bound)
        assert point.time_us == pytest.approx(measured(row.self_us), abs=5.1e-4)
        if row.gflops is not None:
            assert 1e-3 * point.flops / point.time_us == pytest.approx(row.gflops, rel=1e-3)
        assert point.of_roofline == pytest.approx(row.of_roofline, abs=5.1e-5)


def test_on_a_device_points_have_the_time_of_their_kernels() -> None:
    side = side_of(on_device(blocks(2, live=False)))
    # The peaks of the example are not known, so its points have no roofline.
    products = next(point for point in side.points if point.name == "aten::addmm")
    assert products.time_us == pytest.approx(5.0 * products.calls)
    assert products.of_roofline is None


def test_blocks_have_points_of_the_same_name_before_and_after() -> None:
    before, after = side_of(blocks(), fates=WELDED), side_of(fused_blocks(), fates=WELDED)
    assert set(blocks_in(before)) == set(blocks_in(after)) == set(WELDED)
    rows = {row.path: row for row in before.modules}
    for path, point in blocks_in(before).items():
        assert point.time_us == pytest.approx(measured(rows[path].split).total_us, abs=1e-6)
        assert (point.flops, point.calls) == (rows[path].flops, rows[path].calls)
        assert point.flops > 0
        assert point.time_us > blocks_in(after)[path].time_us


@pytest.mark.usefixtures("uncorrected_profiles")
@pytest.mark.parametrize("training", [False, True])
def test_blocks_of_a_welded_model_have_points_on_both_sides(training: bool) -> None:
    # Weight gradients from 256 KB on may come from a pool, and are not seen to be made.
    config = GptConfig(vocab=256, context=16, width=96, layers=2, heads=2, tokens=8)
    model, inputs = MODELS["gpt"].build(config=config)
    before = take(model, inputs, training=training, steps=2)
    model = apply(model, plan(model, inputs, force=True, training=training))
    after = side_of(take(model, inputs, training=training, steps=2))
    welded = {after.modules[i].path for i in welded_modules(after)}
    assert {"layers.0.mlp", "layers.1.mlp", "layers.0.attention.qkv", "head"} <= welded
    told: dict[str, Any] = dict.fromkeys(welded, ("welded", "cpu"))
    sides = side_of(before, fates=told), after
    originals, fused = ({row.path: row for row in side.modules} for side in sides)
    for path in welded:
        assert fused[path].calls == originals[path].calls == 1
        # Of a packed block, biases and padding count as products, and activations do not.
        assert fused[path].flops == pytest.approx(originals[path].flops, rel=0.03)
        assert fused[path].moved_bytes > 0
    for side, rows in zip(sides, (originals, fused), strict=True):
        # The correction may leave nothing of a module as small as these.
        timed = {path for path in welded if measured(rows[path].split).total_us >= 0.001}
        assert timed <= set(blocks_in(side)) <= welded
        assert timed


def test_a_module_that_runs_an_op_of_ours_is_a_block_without_being_told() -> None:
    assert set(blocks_in(side_of(fused_blocks()))) == set(WELDED)
    assert blocks_in(side_of(blocks())) == {}


def test_fates_that_are_told_later_make_the_same_side() -> None:
    told, later = side_of(blocks(), fates=WELDED), with_fates(side_of(blocks()), WELDED)
    assert told == later
    assert with_fates(told, {}) == told


def test_a_step_that_was_not_measured_has_no_points() -> None:
    profile = replace(blocks(), step_us=NotMeasured("the machine was busy"))
    assert side_of(profile, fates=WELDED).points == ()
