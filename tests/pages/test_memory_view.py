"""Memory on a page: its course on the axis of the timeline, and what is alive at the peak."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.support.block_profiles import Call, blocks, make
from tests.support.made_profiles import make_timing
from torch import nn

from torchweld.core.not_measured import NotMeasured
from torchweld.pages.memory_view import memory_of
from torchweld.pages.page_records import MemoryView
from torchweld.pages.timeline_view import timeline_of
from torchweld.profiles.profile import Allocation, Memory, MemoryCourse, Profile
from torchweld.profiles.recording.live_profile import profile as take


def with_memory(profile: Profile, course: MemoryCourse) -> Profile:
    alive = (
        Allocation(bytes=40, module=1, op="aten::mm", phase="forward"),
        Allocation(bytes=30, module=2, op="aten::mm", phase="forward"),
        Allocation(bytes=25, module=2, op="aten::mm", phase="forward"),
    )
    memory = Memory(
        allocations=9,
        allocated_bytes=500,
        peak_bytes=95,
        at_peak=alive,
        saved_bytes={},
        module_bytes={},
        course=course,
    )
    return replace(profile, memory=memory)


def view(profile: Profile) -> MemoryView:
    found = memory_of(profile)
    assert found is not None
    return found


def test_allocations_of_one_op_in_one_module_are_one() -> None:
    found = view(with_memory(blocks(1), MemoryCourse()))
    assert (found.peak_bytes, found.allocations, found.allocated_bytes) == (95, 9, 500)
    assert [(one.bytes, one.count, one.module) for one in found.at_peak] == [
        (55, 2, "layers.0"),
        (40, 1, "layers"),
    ]
    assert (found.at_us, found.bytes) == ((), ())


def test_the_course_moves_with_the_ops_of_a_live_step() -> None:
    calls = [Call(name="aten::a", us=100.0), Call(name="aten::b", us=100.0)]
    profile = make([("", "Net"), ("a", "A"), ("b", "B")], calls, python_us=0.0)
    # Recorded at half the pace, with all ops twice as long.
    slow = replace(
        profile,
        ops=tuple(
            replace(op, start_us=2 * op.start_us, raw_us=2 * op.raw_us) for op in profile.ops
        ),
        timing=make_timing(200.0, raw_us=402.0),
    )
    a, b = slow.ops
    middle = [op.start_us + op.raw_us / 2 for op in (a, b)]
    found = view(with_memory(slow, MemoryCourse(at_us=(middle[0], middle[1]), bytes=(64, 0))))
    timeline = timeline_of(slow)
    assert timeline is not None
    (lane,) = timeline.lanes
    assert found.at_us[0] == 0.0
    expected = [us + 50.0 for us in lane.start_us]
    assert found.at_us[1:] == pytest.approx(expected, abs=0.002)
    assert found.bytes == (0, 64, 0)


def test_a_step_that_was_not_measured_has_no_course_but_its_peak() -> None:
    course = MemoryCourse(at_us=(1.0,), bytes=(64,))
    profile = replace(with_memory(blocks(), course), step_us=NotMeasured("the machine was busy"))
    found = view(profile)
    assert (found.at_us, found.bytes, found.peak_bytes) == ((), (), 95)


def test_a_profile_without_memory_has_no_view() -> None:
    assert memory_of(blocks()) is None


@pytest.mark.usefixtures("uncorrected_profiles")
def test_a_live_course_lies_within_its_timeline() -> None:
    model = nn.Sequential(nn.Linear(24, 56), nn.GELU(), nn.Linear(56, 8))
    profile = take(model, torch.randn(13, 24), training=True, steps=2)
    found, timeline = view(profile), timeline_of(profile)
    assert timeline is not None
    assert list(found.at_us) == sorted(found.at_us)
    assert found.at_us[-1] <= timeline.end_us
    assert max(found.bytes) == found.peak_bytes
