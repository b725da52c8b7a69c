"""Timelines of a page: everything has a place, nothing overlaps, merging keeps the time."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.models.test_models import small
from tests.support.block_profiles import Call, blocks, make, on_device
from tests.support.made_traces import TRACES
from tests.support.measured import measured

from torchweld.core.not_measured import NotMeasured
from torchweld.pages.page_records import Lane, Timeline
from torchweld.pages.timeline_view import SEVERAL, Bar, Row, thinned, timeline_of
from torchweld.profiles.profile import Profile
from torchweld.profiles.recording.live_profile import profile as take
from torchweld.profiles.recording.trace_profile import read_trace

REAL = sorted(TRACES.glob("*.json.gz"))


def timeline(profile: Profile, **more: int) -> Timeline:
    found = timeline_of(profile, **more)
    assert found is not None
    for lane in found.lanes:
        columns = (lane.duration_us, lane.name_index, lane.depth, lane.module)
        assert all(len(column) == len(lane.start_us) for column in columns)
        assert list(lane.start_us) == sorted(lane.start_us)
        assert lane.start_us[0] >= 0
        ends = [a + b for a, b in zip(lane.start_us, lane.duration_us, strict=True)]
        assert max(ends) <= found.end_us + 1e-6
    return found


def spans_of(found: Timeline, lane: Lane) -> list[tuple[int, str, float, float]]:
    """Depth, name, start and duration."""
    names = [found.names[i] for i in lane.name_index]
    return list(zip(lane.depth, names, lane.start_us, lane.duration_us, strict=True))


def busy_us(lane: Lane) -> dict[int, float]:
    """By depth."""
    found: dict[int, float] = defaultdict(float)
    for depth, us in zip(lane.depth, lane.duration_us, strict=True):
        found[depth] += us
    return dict(found)


def assert_nested(lane: Lane) -> None:
    """Spans of one depth do not overlap, and each lies inside one of the depth above."""
    ends: dict[int, float] = {}
    for start, us, depth in zip(lane.start_us, lane.duration_us, lane.depth, strict=True):
        assert start >= ends.get(depth, 0.0) - 1e-6
        if depth:
            assert start + us <= ends[depth - 1] + 1e-6
        ends[depth] = start + us


def test_modules_lie_around_their_ops() -> None:
    profile = blocks(1)
    found = timeline(profile)
    (lane,) = found.lanes
    assert_nested(lane)
    spans = {name: (depth, us) for depth, name, _, us in spans_of(found, lane)}
    assert spans["layers"][0] == 0
    assert spans["layers.0.mlp"][0] == 2
    assert spans["layers.0.mlp.up"] == pytest.approx((3, 123.0), abs=0.002)
    up = profile.modules.index(next(m for m in profile.modules if m.path == "layers.0.mlp.up"))
    (linear,) = [
        (depth, us)
        for (depth, name, _, us), module in zip(spans_of(found, lane), lane.module, strict=True)
        if name == "aten::linear" and module == up
    ]
    assert linear == pytest.approx((4, 123.0), abs=0.002)
    assert "laid out anew" in found.note


def test_the_backward_of_a_module_is_named_as_such() -> None:
    profile = blocks(1, training=True)
    found = timeline(profile)
    (lane,) = found.lanes
    assert_nested(lane)
    assert "backward of layers.0.mlp.up" in found.names


@pytest.mark.usefixtures("uncorrected_profiles")
@pytest.mark.parametrize("training", [False, True])
def test_a_live_step_is_laid_out_in_its_own_time(training: bool) -> None:
    model, inputs = small("gpt")
    profile = take(model, inputs, training=training, steps=2)
    found = timeline(profile)
    (lane,) = found.lanes
    assert_nested(lane)
    ops = sum(name.startswith("aten::") for _, name, _, _ in spans_of(found, lane))
    assert ops == sum(op.name.startswith("aten::") for op in profile.ops)
    assert found.end_us >= round(measured(profile.step_us), 3)


@pytest.mark.parametrize("path", REAL, ids=[path.name for path in REAL])
def test_a_real_trace_has_a_lane_for_every_thread_and_stream(path: Path) -> None:
    profile = read_trace(path)
    found = timeline(profile)
    on_host = [lane for lane in found.lanes if not lane.device]
    streams = [lane for lane in found.lanes if lane.device]
    kernels = profile.device.kernels if profile.device is not None else ()
    calls = profile.device.calls if profile.device is not None else ()
    assert len(streams) == len({(kernel.device, kernel.stream) for kernel in kernels})
    threads = {op.thread for op in profile.ops} | {call.thread for call in calls}
    assert len(on_host) == len(threads)
    assert sum(len(lane.start_us) for lane in streams) == len(kernels)
    busy = sum(sum(lane.duration_us) for lane in streams)
    # Each is rounded to 1 ns at both ends.
    expected = sum(kernel.duration_us for kernel in kernels)
    assert busy == pytest.approx(expected, abs=0.001 * len(kernels) + 1e-6)
    spans = sum(len(lane.start_us) for lane in on_host)
    assert spans >= len(profile.ops) + len(calls)
    assert "as recorded" in found.note


def test_what_ran_before_the_first_step_moves_the_axis() -> None:
    profile = read_trace(TRACES / "cpu_only.json.gz")
    earliest = min(op.start_us for op in profile.ops)
    assert earliest < 0
    (lane,) = timeline(profile).lanes
    assert lane.start_us[0] == 0.0


def test_a_kernel_knows_the_module_of_its_op() -> None:
    profile = on_device(blocks(1, live=False))
    (lane,) = (lane for lane in timeline(profile).lanes if lane.device)
    assert profile.device is not None
    assert lane.name == "device 0, stream 7"
    assert lane.module == tuple(profile.ops[kernel.op].module for kernel in profile.device.kernels)
    assert set(lane.depth) == {0}


def test_calls_of_the_runtime_lie_in_their_op() -> None:
    found = timeline(on_device(blocks(1, live=False)))
    lane = next(lane for lane in found.lanes if not lane.device)
    assert_nested(lane)
    assert "cudaLaunchKernel" in found.names


def test_a_step_that_was_not_measured_has_no_timeline() -> None:
    assert timeline_of(replace(blocks(), step_us=NotMeasured("the machine was busy"))) is None


def test_names_are_kept_as_they_are() -> None:
    name = "<script>alert(1)</script>"
    profile = make([("", "Net"), (name, name)], [Call(name=name, path=name)])
    assert timeline(profile).names == (name,)


# ---- too many spans ----


@pytest.mark.parametrize("most", [50, 300, 1000])
def test_thinning_keeps_the_time_of_every_depth(most: int) -> None:
    profile = read_trace(TRACES / "a100_alexnet_inference.json.gz")
    every, fewer = timeline(profile), timeline(profile, most=most)
    counts = [sum(len(lane.start_us) for lane in one.lanes) for one in (every, fewer)]
    assert counts[1] <= min(most, counts[0])
    for before, after in zip(every.lanes, fewer.lanes, strict=True):
        assert after.merged == len(before.start_us) - len(after.start_us)
        assert busy_us(after) == pytest.approx(busy_us(before), abs=1e-6)


bars = st.lists(
    st.builds(
        Bar,
        st.integers(0, 10_000),
        st.integers(0, 50),
        st.sampled_from("ab"),
        st.integers(0, 3),
        st.integers(-1, 2),
    ),
    min_size=1,
    max_size=60,
)


@given(bars, st.integers(1, 40))
def test_merged_neighbours_are_as_long_as_they_were(given_bars: list[Bar], most: int) -> None:
    before = {Row(-1, 0): sorted(given_bars)}
    (after,) = thinned(before, 10_050, most).values()
    for depth in range(4):
        sums = [sum(b.busy_ns for b in many if b.depth == depth) for many in (given_bars, after)]
        assert sums[0] == sums[1]
    assert {bar.name for bar in after} <= {"a", "b", SEVERAL}


def test_only_neighbours_are_merged() -> None:
    given_bars = [Bar(0, 10, "a", 0, 1), Bar(10, 10, "b", 0, 1), Bar(900_000, 10, "c", 0, 2)]
    (after,) = thinned({Row(-1, 0): given_bars}, 1_000_000, 2).values()
    assert after == [Bar(0, 20, SEVERAL, 0, 1), Bar(900_000, 10, "c", 0, 2)]
