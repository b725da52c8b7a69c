"""Flame graphs and chrome traces: all of the time, in the right frames, readable by other tools."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.block_profiles import Call, blocks, make, on_device
from tests.support.made_profiles import make_peaks
from tests.support.measured import measured
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from torchweld.profiles.accounting.time_account import account
from torchweld.profiles.profile import Profile
from torchweld.profiles.recording.live_profile import profile as take
from torchweld.profiles.recording.trace_profile import read_trace
from torchweld.report import chrome_trace, folded, speedscope


def stacks_of(profile: Profile) -> dict[str, int]:
    """Folded stacks: stack -> nanoseconds."""
    found: dict[str, int] = {}
    for line in folded(profile).splitlines():
        stack, _, value = line.rpartition(" ")
        assert stack not in found
        found[stack] = int(value)
    return found


def read_again(profile: Profile, folder: Path) -> Profile:
    path = folder / "trace.json"
    path.write_text(json.dumps(chrome_trace(profile), allow_nan=False))
    return read_trace(path)


def owners(profile: Profile) -> list[tuple[str, str, str, int]]:
    """What a trace has to keep: name, module, phase and nesting of every op."""
    return [(op.name, profile.modules[op.module].path, op.phase, op.parent) for op in profile.ops]


# ---- folded stacks and speedscope ----


def test_folded_stacks_add_up_to_the_corrected_step() -> None:
    profile = blocks(training=True)
    assert profile.timing is not None
    assert sum(stacks_of(profile).values()) == round(1e3 * profile.timing.corrected_us)


def test_stacks_go_from_module_to_op_with_the_backward_in_its_module() -> None:
    stacks = stacks_of(blocks(2, training=True))
    up = "Net;layers: ModuleList;1: Block;mlp: Mlp;up: Linear"
    assert stacks[f"{up};aten::linear"] == 3_000
    assert stacks[f"{up};aten::linear;aten::addmm"] == 120_000
    node = f"{up};backward;engine: AddmmBackward0;AddmmBackward0"
    assert stacks[node] == 2_000
    assert stacks[f"{node};aten::mm"] == 240_000
    assert stacks[f"{up};Python"] == 1_000


def test_fractions_of_a_microsecond_are_kept() -> None:
    calls = [Call(name=f"aten::op{i}", us=0.0004) for i in range(10)]
    profile = make([("", "Net")], [*calls, Call(name="aten::mm", us=1.2345)], python_us=0.0)
    assert sum(stacks_of(profile).values()) == round(1e3 * (1.2345 + 10 * 0.0004))
    weights = speedscope(profile)["profiles"][0]["weights"]
    assert min(weights) == pytest.approx(0.0004)


def test_recomputed_ops_stand_under_their_own_module() -> None:
    again = Call(name="aten::mm", path="b", phase="recompute", us=7.0)
    node = Call(name="CheckpointBackward", path="a", phase="backward", us=1.0, inside=(again,))
    stacks = stacks_of(make([("", "Net"), ("a", "A"), ("b", "B")], [node]))
    assert stacks["Net;b: B;recompute;aten::mm"] == 7_000
    assert stacks["Net;a: A;backward;CheckpointBackward"] == 1_000


def test_what_was_corrected_too_much_is_taken_from_around_it() -> None:
    inner = Call(name="aten::view", us=-20.0)
    calls = [Call(name="aten::linear", us=100.0, inside=(inner,)), Call(name="aten::mm", us=50.0)]
    stacks = stacks_of(make([("", "Net")], calls, python_us=0.0))
    assert stacks == {"Net;aten::linear": 80_000, "Net;aten::mm": 50_000}


def test_what_belongs_to_no_module_is_shown_as_such() -> None:
    profile = blocks()
    assert profile.timing is not None
    timing = replace(profile.timing, corrected_us=profile.timing.corrected_us + 50.0)
    assert stacks_of(replace(profile, timing=timing))["Net;not attributed"] == 50_000


def test_separators_in_names_do_not_break_stacks() -> None:
    profile = make([("", "N;et"), ("a", "A\nB")], [Call(name="x;y\x1b z", path="a", us=5.0)])
    assert stacks_of(profile)["N,et;a: A\\nB;x,y\\x1b z"] == 5_000


def check_speedscope(data: dict[str, Any]) -> None:
    """What https://www.speedscope.app/file-format-schema.json asks of a sampled profile."""
    assert data["$schema"] == "https://www.speedscope.app/file-format-schema.json"
    frames = data["shared"]["frames"]
    assert all(isinstance(frame["name"], str) for frame in frames)
    assert 0 <= data["activeProfileIndex"] < len(data["profiles"])
    for profile in data["profiles"]:
        assert profile["type"] == "sampled"
        assert profile["unit"] == "microseconds"
        assert profile["startValue"] == 0
        assert len(profile["samples"]) == len(profile["weights"])
        assert sum(profile["weights"]) == pytest.approx(profile["endValue"])
        assert all(weight > 0 for weight in profile["weights"])
        assert all(0 <= i < len(frames) for stack in profile["samples"] for i in stack)
    json.dumps(data, allow_nan=False)


def test_speedscope_has_the_same_stacks() -> None:
    profile = blocks(training=True)
    data = speedscope(profile)
    check_speedscope(data)
    names = [frame["name"] for frame in data["shared"]["frames"]]
    (host,) = data["profiles"]
    stacks = {";".join(names[i] for i in stack) for stack in host["samples"]}
    assert stacks == set(stacks_of(profile))
    assert profile.timing is not None
    assert host["endValue"] == pytest.approx(profile.timing.corrected_us)


def test_a_device_has_stacks_of_its_own_down_to_the_kernel() -> None:
    profile = on_device(blocks(2, live=False))
    assert profile.device is not None
    stacks = stacks_of(profile)
    gelu = "device;Example GPU;layers: ModuleList;0: Block;mlp: Mlp;act: GELU;aten::gelu"
    assert stacks[f"{gelu};triton_poi_fused_gelu_mul_0"] == 5_000
    assert {stack.partition(";")[0] for stack in stacks} == {"host", "device"}
    on_it = sum(ns for stack, ns in stacks.items() if stack.startswith("device;"))
    assert on_it == 1e3 * sum(kernel.duration_us for kernel in profile.device.kernels)
    data = speedscope(profile)
    check_speedscope(data)
    assert [entry["name"] for entry in data["profiles"]] == ["host", "device"]


# ---- any tree of ops ----


def trees(paths: list[str]) -> st.SearchStrategy[list[Call]]:
    # The correction can take more from an op than it had.
    durations = st.one_of(st.floats(-3.0, 0.0), st.floats(0.0, 500.0))
    phases = st.sampled_from(["forward", "backward", "recompute", "other"])

    def call(inside: Any) -> st.SearchStrategy[Call]:
        return st.builds(
            Call,
            name=st.sampled_from(["aten::mm", "aten::add", "a;b"]),
            path=st.sampled_from(paths),
            us=durations,
            phase=phases,
            inside=inside,
            call=st.integers(-1, 3),
        )

    leaf = call(st.just(()))
    nested = st.recursive(leaf, lambda inner: call(st.lists(inner, max_size=3).map(tuple)))
    return st.lists(nested, min_size=1, max_size=6)


PLACES = [("", "Net"), ("a", "A"), ("a.b", "B"), ("c", "C")]


@given(trees(["", "a", "a.b", "c"]))
def test_weights_always_add_up_and_are_never_negative(calls: list[Call]) -> None:
    profile = make(PLACES, calls, python_us=20.0)
    assert profile.timing is not None
    total_us = profile.timing.corrected_us
    if total_us <= 0:
        return
    assert sum(stacks_of(profile).values()) == pytest.approx(1e3 * total_us, abs=1)
    check_speedscope(speedscope(profile))


@given(trees(["", "a", "a.b", "c"]), st.booleans())
def test_intervals_on_a_row_are_nested_or_apart(calls: list[Call], live: bool) -> None:
    assert_nested(chrome_trace(make(PLACES, calls, live=live))["traceEvents"])


def assert_nested(events: list[dict[str, Any]]) -> None:
    rows = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            start_ns = round(1e3 * event["ts"])
            end_ns = start_ns + round(1e3 * event["dur"])
            assert end_ns >= start_ns
            rows[event["pid"], event["tid"]].append((start_ns, -end_ns))
    for spans in rows.values():
        around: list[int] = []
        for start_ns, minus_end_ns in sorted(spans):
            while around and around[-1] <= start_ns:
                around.pop()
            assert not around or -minus_end_ns <= around[-1]
            around.append(-minus_end_ns)


# ---- chrome traces ----


def test_a_trace_of_ours_reads_back_as_the_same_step(tmp_path: Path) -> None:
    profile = blocks(training=True)
    again = read_again(profile, tmp_path)
    assert owners(again) == owners(profile)
    assert [op.sequence for op in again.ops] == [op.sequence for op in profile.ops]
    assert [[t and t.shape for t in op.inputs] for op in again.ops] == [
        [t and t.shape for t in op.inputs] for op in profile.ops
    ]
    for op, before in zip(again.ops, profile.ops, strict=True):
        assert op.raw_us == pytest.approx(before.total_us, abs=0.002)
    assert again.step_us == pytest.approx(profile.step_us, abs=0.002)
    assert not again.notices


def test_a_trace_of_ours_is_priced_with_the_peaks_of_its_machine(tmp_path: Path) -> None:
    # More digits than times are read with as doubles.
    profile = replace(blocks(), op_cost_us=1.0123456789012345678, fused_call_us=2.5)
    peaks = make_peaks(gflops=100.12345678901234, gbps=10.0, threads=1)
    about = replace(profile.about, threads=1, torch="2.13", cpu="Example")
    profile = replace(profile, peaks=peaks, about=about)
    again = read_again(profile, tmp_path)
    assert again.machine == profile.machine
    found = account(again)
    (notice,) = found.notices
    assert "round trips are not known" in notice
    step, same = measured(found.step), measured(account(profile).step)
    assert step.arithmetic_us == pytest.approx(same.arithmetic_us)
    assert step.arithmetic_us > 0


def test_a_damaged_machine_is_a_notice_and_the_trace_is_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({**chrome_trace(blocks()), "torchweld_machine": {"threads": "x"}}))
    again = read_trace(path)
    assert again.ops
    assert again.peaks is None
    assert any("of its machine cannot be read" in notice for notice in again.notices)


def test_a_module_called_twice_has_two_ranges() -> None:
    calls = [Call(name="aten::mm", path="a", call=1), Call(name="aten::mm", path="a", call=2)]
    events = chrome_trace(make([("", "Net"), ("a", "A")], calls))["traceEvents"]
    assert Counter(e["name"] for e in events if e["ph"] == "X")["nn.Module: a"] == 2


def test_rows_have_names_and_the_backward_has_ranges(tmp_path: Path) -> None:
    calls = [
        Call(name="aten::mm", path="a", sequence=4),
        Call(name="MmBackward0", path="a", phase="backward", sequence=4, thread=1),
    ]
    profile = make([("", "Net"), ("a", "A")], calls)
    assert owners(read_again(profile, tmp_path)) == owners(profile)
    events = chrome_trace(profile)["traceEvents"]
    named = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert named == {(1, 0): "thread 0", (1, 1): "backward"}
    ranges = {e["name"]: e["tid"] for e in events if e.get("cat") == "user_annotation"}
    assert ranges["nn.Module: a"] == 0
    assert ranges["backward of a"] == 1


def test_kernels_are_joined_to_their_launches_and_read_back(tmp_path: Path) -> None:
    profile = on_device(blocks(2, live=False))
    trace = chrome_trace(profile)
    assert_nested(trace["traceEvents"])
    phases = Counter(event["ph"] for event in trace["traceEvents"])
    assert profile.device is not None
    assert phases["s"] == phases["f"] == len(profile.device.kernels)
    again = read_again(profile, tmp_path).device
    assert again is not None
    assert again.name == "Example GPU"
    assert (again.launches, again.span_us) == (profile.device.launches, profile.device.span_us)
    assert again.compute_us == pytest.approx(profile.device.compute_us)
    assert [kernel.op for kernel in again.kernels] == [k.op for k in profile.device.kernels]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.act = nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.act(layer(x))
        y: Tensor = checkpoint(self.layers[0], x, use_reentrant=False)
        return y


@pytest.mark.usefixtures("brief_profiles")
def test_a_real_training_step_survives_its_own_trace(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters())
    profile = take(model, torch.randn(4, 16), training=True, optimizer=optimizer, steps=2)
    assert {op.phase for op in profile.ops} >= {"forward", "backward", "recompute", "optimizer"}
    assert_nested(chrome_trace(profile)["traceEvents"])
    again = read_again(profile, tmp_path)
    assert owners(again) == owners(profile)
    check_speedscope(speedscope(profile))
    stacks = stacks_of(profile)
    assert profile.timing is not None
    assert sum(stacks.values()) == pytest.approx(1e3 * profile.timing.corrected_us, abs=1)
    assert any("layers: ModuleList;1: Linear;backward;" in stack for stack in stacks)
