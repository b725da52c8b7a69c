"""Differential flames: aligned by module, with the time of both sides."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.block_profiles import (
    Call,
    block_calls,
    block_places,
    blocks,
    fused_blocks,
    make,
    on_device,
)
from tests.support.measured import measured

from torchweld.core.not_measured import NotMeasured
from torchweld.pages.flame_diff import diff_of
from torchweld.pages.page_records import FRAME_KINDS, FlameDiff, PageSide
from torchweld.pages.profile_view import side_of
from torchweld.profiles.profile import Profile

MLP = "layers: ModuleList;0: Block;mlp: Mlp"


def difference(before: Profile, after: Profile, **more: Any) -> FlameDiff:
    found = diff_of(side_of(before, "before", **more), side_of(after, "after", **more))
    assert found is not None
    check(found)
    return found


def check(found: FlameDiff) -> None:
    """What holds for every differential flame."""
    count = len(found.name)
    columns = (found.parent, found.before_us, found.after_us, found.kind, found.state)
    assert all(len(column) == count for column in columns)
    assert found.parent[0] == -1
    assert all(0 <= parent < i for i, parent in enumerate(found.parent) if i)
    for times in (found.before_us, found.after_us):
        inside = [0.0] * count
        for i in range(count - 1, 0, -1):
            assert times[i] >= 0
            inside[found.parent[i]] += times[i]
        assert all(a <= b + 1e-6 for a, b in zip(inside, times, strict=True))
    for state, before, after in zip(found.state, found.before_us, found.after_us, strict=True):
        assert state != "gone" or after == 0
        assert state != "new" or before == 0


def frames(found: FlameDiff) -> dict[str, tuple[str, float, float]]:
    """Stack below the model -> state, time before and after."""
    stacks: list[str] = []
    for name, parent in zip(found.name, found.parent, strict=True):
        around = f"{stacks[parent]};" if parent > 0 else ""
        stacks.append(around + found.names[name] if parent >= 0 else "")
    columns = zip(found.state, found.before_us, found.after_us, strict=True)
    return dict(zip(stacks, columns, strict=True))


def test_the_first_frame_has_the_steps_before_and_after() -> None:
    before, after = blocks(), fused_blocks()
    state, before_us, after_us = frames(difference(before, after))[""]
    assert state == "both"
    assert before_us == pytest.approx(measured(before.step_us), abs=5.1e-4)
    assert after_us == pytest.approx(measured(after.step_us), abs=5.1e-4)


def test_a_welded_module_is_one_change_and_its_parts_lie_inside() -> None:
    found = frames(difference(blocks(), fused_blocks()))
    mlp = MLP.replace("Mlp", "FusedMLP")
    state, before_us, after_us = found[mlp]
    # up, act and down with 1 µs of Python each, against one op and 1 µs.
    assert (state, before_us, after_us) == ("welded", 279.0, 91.0)
    assert found[f"{mlp};torchweld::mlp"] == ("new", 0.0, 90.0)
    assert found[f"{mlp};up: Linear"] == ("gone", 124.0, 0.0)
    assert found[f"{mlp};up: Linear;aten::linear;aten::addmm"] == ("gone", 120.0, 0.0)
    assert found[f"{mlp};act: GELU;aten::gelu"] == ("gone", 40.0, 0.0)
    assert found["layers: ModuleList;0: Block;norm: LayerNorm"] == ("both", 21.0, 21.0)


def test_a_plan_says_what_is_welded_too() -> None:
    told: dict[str, Any] = {"layers.0.mlp": ("welded", "cpu packed")}
    found = frames(difference(blocks(), blocks(), fates=told))
    assert found[MLP][0] == "welded"
    assert found[f"{MLP};up: Linear"][0] == "both"


def test_what_was_fused_before_did_not_change() -> None:
    states = {state for state, _, _ in frames(difference(fused_blocks(), fused_blocks())).values()}
    assert states == {"both"}


def test_wrappers_of_either_side_are_seen_through() -> None:
    def wrapped(name: str, kind: str) -> Profile:
        places = [("", kind), *((f"{name}.{p}".rstrip("."), *k) for p, *k in block_places(2))]
        calls = [moved(call, name) for call in block_calls(2)]
        return make(places, calls)

    def moved(call: Call, name: str) -> Call:
        inside = tuple(moved(inner, name) for inner in call.inside)
        return replace(call, path=f"{name}.{call.path}".rstrip("."), inside=inside)

    for name, kind in (("_orig_mod", "OptimizedModule"), ("module", "DistributedDataParallel")):
        found = frames(difference(blocks(2), wrapped(name, kind)))
        assert {state for state, _, _ in found.values()} == {"both"}, name
        assert found[MLP] == ("both", 279.0, 279.0)


def test_steps_of_a_trace_are_compared_one_by_one() -> None:
    one = blocks(1, live=False)
    many = blocks(1, live=False, about_steps=2)
    _, before_us, after_us = frames(difference(one, many))[""]
    assert before_us == pytest.approx(2 * after_us, abs=0.001)


def test_devices_are_compared_if_both_sides_have_one() -> None:
    one, two = on_device(blocks(2, live=False)), on_device(blocks(2, live=False), kernel_us=3.0)
    found = difference(one, two)
    kernel = FRAME_KINDS.index("kernel")
    assert kernel in found.kind
    _, before_us, after_us = frames(found)[""]
    assert before_us / after_us == pytest.approx(5 / 3)
    assert kernel not in difference(one, blocks(2)).kind


def test_a_side_without_a_flame_gives_no_difference() -> None:
    unmeasured = replace(blocks(), step_us=NotMeasured("the machine was busy"))
    assert diff_of(side_of(blocks()), side_of(unmeasured)) is None


def test_names_are_kept_as_they_are() -> None:
    name = "<script>alert(1)</script>"
    profile = make([("", "Net"), (name, "A")], [Call(name=name, path=name)])
    assert frames(difference(profile, profile))[f"{name}: A;{name}"][0] == "both"


PATHS = ["", "a", "a.b", "a.b.c", "d"]


@st.composite
def sides(draw: st.DrawFn) -> PageSide:
    paths = ["", *draw(st.lists(st.sampled_from(PATHS[1:]), unique=True))]
    names = ["aten::mm", "aten::add", "torchweld::chain"]
    calls = draw(
        st.lists(
            st.builds(
                Call,
                name=st.sampled_from(names),
                path=st.sampled_from(paths),
                us=st.floats(-1, 1e4),
                phase=st.sampled_from(["forward", "backward"]),
            ),
            max_size=8,
        )
    )
    return side_of(make([(path, "M") for path in paths], calls))


@given(sides(), sides())
def test_no_frame_is_shorter_than_what_is_inside(before: PageSide, after: PageSide) -> None:
    found = diff_of(before, after)
    assert found is not None
    check(found)
    assert before.flame is not None
    assert after.flame is not None
    assert found.before_us[0] == pytest.approx(before.flame.total_us, abs=0.0011)
    assert found.after_us[0] == pytest.approx(after.flame.total_us, abs=0.0011)


@given(sides())
def test_a_side_against_itself_has_not_changed(side: PageSide) -> None:
    found = diff_of(side, side)
    assert found is not None
    assert set(found.state) == {"both"}
    assert found.before_us == found.after_us
