"""The course of a step's memory: on the axis of its ops, and thinned without losing the peak."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.made_traces import HOST, MadeTrace
from torch import nn

from torchweld.core.errors import TorchweldError
from torchweld.profiles.accounting.memory_course import chosen_points, course_of
from torchweld.profiles.attributing.attribution import attribute
from torchweld.profiles.profile import Memory, MemoryCourse, Profile
from torchweld.profiles.recorded_events import OP, Event, MemoryEvent, Recording
from torchweld.profiles.recording.live_profile import profile as take
from torchweld.profiles.recording.trace_profile import read_trace


def op(name: str, start_us: float, end_us: float) -> Event:
    return Event(name=name, kind=OP, start_us=start_us, end_us=end_us)


def event(time_us: float, storage: int, size: int, around: int) -> MemoryEvent:
    return MemoryEvent(time_us=time_us, storage=storage, bytes=size, event=around)


def memory(found: Profile) -> Memory:
    assert found.memory is not None
    return found.memory


def test_allocations_stay_where_they_were_in_their_op() -> None:
    slow = Recording(
        events=[op("aten::a", 100.0, 200.0), op("aten::b", 300.0, 500.0)],
        allocations=[
            event(90.0, 0, 7, -1),  # before all ops
            event(150.0, 1, 100, 0),  # in the middle of a
            event(250.0, 1, -100, -1),  # half way to b
            event(350.0, 2, 50, 1),  # after a quarter of b
            event(520.0, 2, -50, -1),  # after all ops
        ],
    )
    usual = Recording(events=[op("aten::a", 10.0, 20.0), op("aten::b", 40.0, 80.0)])
    found = course_of(slow, attribute(slow, (), [usual]))
    # The axis of ops begins with the first of them, if the recording has no step.
    assert found.at_us == (-10.0, 5.0, 20.0, 40.0, 90.0)
    assert found.bytes == (7, 107, 7, 57, 7)


def test_memory_from_before_the_step_does_not_count() -> None:
    recording = Recording(
        events=[op("aten::a", 0.0, 10.0)],
        allocations=[event(1.0, 9, -400, 0), event(2.0, 1, 30, 0)],
    )
    assert course_of(recording, attribute(recording)).bytes == (0, 30)


@pytest.mark.usefixtures("brief_profiles")
@pytest.mark.parametrize("training", [False, True])
def test_the_course_of_a_live_step_reaches_its_peak_within_the_step(training: bool) -> None:
    model = nn.Sequential(nn.Linear(24, 56), nn.GELU(), nn.Linear(56, 8))
    found = take(model, torch.randn(13, 24), training=training, steps=2)
    course = memory(found).course
    assert max(course.bytes) == memory(found).peak_bytes > 0
    assert list(course.at_us) == sorted(course.at_us)
    assert found.timing is not None
    assert 0 <= course.at_us[0] <= course.at_us[-1]
    # Every allocation lies in an op, and is freed in one or soon after.
    last_us = max(one.start_us + one.raw_us for one in found.ops)
    inside = [us for us in course.at_us if us <= last_us + 0.001]
    assert len(inside) >= memory(found).allocations
    kept = sum(p.numel() for p in model.parameters()) * 4 if training else 0
    assert course.bytes[-1] >= kept


def test_a_trace_with_memory_events_has_its_course(tmp_path: Path) -> None:
    trace = MadeTrace().op("aten::a", 1000, 50).op("aten::b", 1100, 50)
    for ts, address, size in ((1010, 1, 400), (1110, 2, 600), (1120, 1, -400), (1140, 2, -600)):
        arguments = {"Addr": address, "Bytes": size, "Device Type": 0}
        place = {"ph": "i", "cat": "cpu_instant_event", "pid": HOST, "tid": HOST, "ts": ts}
        trace.events.append({**place, "name": "[memory]", "args": arguments})
    found = memory(read_trace(trace.write(tmp_path / "trace.json")))
    assert found.course == MemoryCourse(
        at_us=(10.0, 110.0, 120.0, 140.0), bytes=(400, 1000, 600, 0)
    )
    assert found.peak_bytes == 1000


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=300), st.integers(4, 40))
def test_thinning_keeps_the_ends_and_the_peak(levels: list[int], most: int) -> None:
    kept = chosen_points(levels, most)
    assert len(kept) <= most or len(levels) <= most
    assert kept == sorted(set(kept))
    assert kept[0] == 0
    assert kept[-1] == len(levels) - 1
    assert max(levels[i] for i in kept) == max(levels)


def test_a_course_is_saved_and_one_of_two_lengths_is_refused(tmp_path: Path) -> None:
    trace = MadeTrace().op("aten::a", 0, 50)
    profile = read_trace(trace.write(tmp_path / "trace.json"))
    course = MemoryCourse(at_us=(1.5, 2.5), bytes=(10, 0))
    kept = Memory(
        allocations=1,
        allocated_bytes=10,
        peak_bytes=10,
        at_peak=(),
        saved_bytes={},
        module_bytes={"": 10},
        course=course,
    )
    path = tmp_path / "profile.json"
    replace(profile, memory=kept).save(path)
    assert memory(Profile.load(path)).course == course
    path.write_text(path.read_text().replace("[10,0]", "[10]"))
    with pytest.raises(TorchweldError, match="2 times for 1 sizes"):
        Profile.load(path)
