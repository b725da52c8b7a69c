"""Flames of a page: no time is lost, whatever is merged and rounded."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.models.test_models import ALL, small
from tests.support.block_profiles import Call, blocks, make, on_device
from tests.support.made_profiles import make_timing
from tests.support.made_traces import TRACES
from tests.support.measured import measured

from torchweld.core.not_measured import NotMeasured
from torchweld.pages.flame_view import SMALLER, device_flame, flame_of, host_flame, rounded
from torchweld.pages.page_records import FRAME_KINDS, Flame
from torchweld.profiles.profile import Profile
from torchweld.profiles.recording.live_profile import profile as take
from torchweld.profiles.recording.trace_profile import read_trace
from torchweld.report.flame_stacks import Frame

REAL = sorted(TRACES.glob("*.json.gz"))


def totals_us(flame: Flame) -> list[float]:
    """Of each frame, with what is inside."""
    found = list(flame.own_us)
    for i in range(len(found) - 1, 0, -1):
        found[flame.parent[i]] += found[i]
    return found


def stacks_us(flame: Flame) -> dict[str, float]:
    """Stack -> own time."""
    stacks: list[str] = []
    for name, parent in zip(flame.name, flame.parent, strict=True):
        around = f"{stacks[parent]};" if parent >= 0 else ""
        stacks.append(around + flame.names[name])
    return dict(zip(stacks, flame.own_us, strict=True))


def check(flame: Flame) -> None:
    """What holds for every flame."""
    count = len(flame.name)
    columns = (flame.parent, flame.own_us, flame.kind, flame.calls, flame.module)
    assert all(len(column) == count for column in columns)
    assert flame.parent[0] == -1
    assert all(0 <= parent < i for i, parent in enumerate(flame.parent) if i)
    assert all(us >= 0 and us == round(us, 3) for us in flame.own_us)
    assert math.fsum(flame.own_us) == pytest.approx(flame.total_us, abs=1e-6)


def host(profile: Profile) -> Flame:
    flame = host_flame(profile)
    assert flame is not None
    check(flame)
    return flame


# ---- all of the time ----


@pytest.mark.usefixtures("uncorrected_profiles")
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", ALL)
def test_frames_of_a_built_in_model_add_up_to_its_step(name: str, training: bool) -> None:
    model, inputs = small(name)
    profile = take(model, inputs, training=training, steps=2)
    flame = host(profile)
    assert flame.total_us == pytest.approx(measured(profile.step_us), abs=1e-3)


@pytest.mark.parametrize("path", REAL, ids=[path.name for path in REAL])
def test_frames_of_a_real_trace_add_up_to_the_time_of_all_its_threads(path: Path) -> None:
    profile = read_trace(path)
    flame = host(profile)
    threads_us = sum(module.self_us for module in profile.modules)
    assert flame.total_us == pytest.approx(max(threads_us, measured(profile.step_us)), abs=1e-3)
    assert flame.total_us >= measured(profile.step_us)
    on_it = device_flame(profile)
    if profile.device is None:
        assert on_it is None
        return
    assert on_it is not None
    check(on_it)
    kernels_us = sum(kernel.duration_us for kernel in profile.device.kernels)
    assert on_it.total_us == pytest.approx(kernels_us, abs=1e-3)
    kernels = [i for i, kind in enumerate(on_it.kind) if FRAME_KINDS[kind] == "kernel"]
    assert sum(on_it.calls[i] for i in kernels) == len(profile.device.kernels)


def test_what_the_profiler_did_not_see_has_a_frame() -> None:
    profile = blocks()
    late_us = measured(profile.step_us) + 70.0
    flame = host(replace(profile, step_us=late_us))
    assert flame.total_us == pytest.approx(late_us)
    assert stacks_us(flame)["Net;not attributed"] == pytest.approx(70.0)


def test_a_step_that_was_not_measured_has_no_flame() -> None:
    unmeasured = replace(blocks(), step_us=NotMeasured("the machine was busy"))
    assert host_flame(unmeasured) is None
    assert device_flame(on_device(unmeasured)) is None


def test_several_threads_are_said_to_be_several() -> None:
    calls = [Call(name="aten::mm", us=50.0), Call(name="aten::mm", us=30.0, thread=1)]
    profile = make([("", "Net")], calls, python_us=0.0)
    flame = host(replace(profile, timing=make_timing(50.0), step_us=50.0))
    assert flame.total_us == pytest.approx(80.0)
    assert "2 threads" in flame.note


# ---- what a frame says ----


def test_the_frame_of_a_module_is_as_long_as_the_module() -> None:
    profile = blocks(3, training=True)
    flame = host(profile)
    for i, us in enumerate(totals_us(flame)):
        if FRAME_KINDS[flame.kind[i]] == "module":
            assert us == pytest.approx(profile.modules[flame.module[i]].total_us, abs=0.002)


def test_frames_know_their_module_their_kind_and_their_calls() -> None:
    profile = blocks(2, training=True)
    flame = host(profile)
    paths = [module.path for module in profile.modules]
    found = {
        (FRAME_KINDS[kind], flame.names[name], paths[module]): calls
        for kind, name, module, calls in zip(
            flame.kind, flame.name, flame.module, flame.calls, strict=True
        )
    }
    assert found["op", "aten::addmm", "layers.1.mlp.up"] == 1
    assert found["module", "up: Linear", "layers.1.mlp.up"] == 0
    assert found["phase", "backward", "layers.1.mlp.up"] == 0
    assert found["rest", "Python", "layers.1.mlp.up"] == 0


def test_a_kernel_stands_in_the_op_that_launched_it() -> None:
    profile = on_device(blocks(2, live=False))
    flame = device_flame(profile)
    assert flame is not None
    gelu = "Example GPU;layers: ModuleList;0: Block;mlp: Mlp;act: GELU;aten::gelu"
    assert stacks_us(flame)[f"{gelu};triton_poi_fused_gelu_mul_0"] == 5.0
    assert "idle for another" in flame.note


def test_calls_of_the_runtime_stand_in_their_op_and_lose_no_time() -> None:
    profile = read_trace(TRACES / "a100_alexnet_inference.json.gz")
    flame = host(profile)
    launches = {s: us for s, us in stacks_us(flame).items() if s.endswith(";cudaLaunchKernel")}
    assert launches
    assert all(";aten::" in stack for stack in launches)
    assert profile.device is not None
    in_calls = sum(c.duration_us for c in profile.device.calls if c.name == "cudaLaunchKernel")
    assert sum(launches.values()) == pytest.approx(in_calls, rel=0.05)


def test_names_are_kept_as_they_are() -> None:
    name = "<script>alert(1)</script> & '\"`"
    profile = make([("", "Net"), ("a", name)], [Call(name=name, path="a")])
    assert f"Net;a: {name};{name}" in stacks_us(host(profile))


# ---- merging and rounding ----


@st.composite
def trees(draw: st.DrawFn) -> Frame:
    top = Frame(name="top", kind="module")
    frames = [top]
    for _ in range(draw(st.integers(0, 25))):
        around = draw(st.sampled_from(frames))
        inner = around.into(draw(st.sampled_from("abcdef")), "op")
        inner.called(draw(st.one_of(st.just(0.0), st.floats(0, 1e6))))
        frames.append(inner)
    return top


@given(trees(), st.integers(1, 12))
def test_merging_keeps_the_time_and_counts_what_it_merged(top: Frame, most: int) -> None:
    before, total_us = len(list(top.walk())), top.total_us
    flame = flame_of(top, most=most)
    check(flame)
    assert flame.total_us == pytest.approx(total_us, abs=1e-3)
    shown = [i for i, name in enumerate(flame.name) if flame.names[name] != SMALLER]
    assert len(shown) <= max(most, 1)
    assert len(shown) + flame.merged >= before


def test_the_longest_frames_are_left() -> None:
    top = Frame(name="top", kind="module")
    for i in range(10):
        top.into(f"aten::op{i}", "op").called(float(i + 1))
    flame = flame_of(top, most=4)
    assert stacks_us(flame) == {
        "top": 0.0,
        **{f"top;aten::op{i}": float(i + 1) for i in (7, 8, 9)},
        f"top;{SMALLER}": float(sum(range(1, 8))),
    }
    assert flame.merged == 7


@given(st.lists(st.floats(0, 1e5), max_size=60))
def test_rounded_times_add_up_to_the_rounded_sum_of_any_run(times_us: list[float]) -> None:
    found = rounded(times_us)
    for end in range(len(times_us) + 1):
        assert math.fsum(found[:end]) == pytest.approx(math.fsum(times_us[:end]), abs=0.0006)
