"""Recordings: the one step that was asked for, on every way from the profiler to us."""

from __future__ import annotations

import ast
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchweld
from torchweld.core.errors import NotMeasuredError
from torchweld.profiles.attributing.attribution import signature
from torchweld.profiles.expecting.expectation import ExpectationError, expect
from torchweld.profiles.recorded_events import MODULE, OP, STEP, Event, Recording, within
from torchweld.profiles.recording import torch_profiler
from torchweld.profiles.recording.module_instrument import instrumented
from torchweld.profiles.recording.torch_profiler import Recorder, annotated, record

PACKAGE = Path(torchweld.__file__).parent


@pytest.fixture(params=["tree", "file"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to events: the profiler's tree, and a trace where a release has no tree."""
    if request.param == "file":
        monkeypatch.delattr(torch._C._autograd._ProfilerResult, "experimental_event_tree")
    return str(request.param)


def ops(recording: Recording) -> Counter[str]:
    return Counter(event.name for event in recording.events if event.kind == OP)


def test_only_the_step_is_recorded(way: str) -> None:
    x = torch.ones(3)
    recorder = Recorder()
    recorder.start()
    recorder.pad()
    x.exp()
    with recorder.step():
        x.neg()
    x.cos()
    recording = recorder.stop()
    assert ops(recording) == {"aten::neg": 1}
    (step,) = [event for event in recording.events if event.kind == STEP]
    assert step.start_us == 0.0
    (op,) = [event for event in recording.events if event.kind == OP]
    assert recording.events[op.parent] is step
    assert bool(recording.notices) == (way == "file")


def test_modules_nesting_shapes_and_memory_are_recorded(way: str) -> None:
    model, x = nn.Sequential(nn.Linear(4, 5), nn.ReLU()), torch.ones(3, 4)
    with torch.no_grad(), instrumented([("", model)]):
        recording = record(lambda: model(x), lambda: model(x), shapes=True, memory=True)
    calls = [event.name for event in recording.events if event.kind == MODULE]
    assert calls == ["", "0", "1"]
    events = recording.events
    product = next(event for event in events if event.name == "aten::addmm")
    assert [tensor and tensor.shape for tensor in product.inputs[:3]] == [(5,), (3, 4), (4, 5)]
    linear = events[product.parent]
    assert (linear.name, events[linear.parent].name) == ("aten::linear", "0")
    taken = [a for a in recording.allocations if a.bytes == 4 * 3 * 5]
    assert len(taken) == 2
    assert {events[a.event].name for a in taken} <= {"aten::addmm", "aten::relu", "aten::clamp_min"}


def test_expectations_hold_and_break_on_every_way(way: str) -> None:
    model, x = nn.Sequential(nn.Linear(4, 5), nn.ReLU()), torch.ones(3, 4)
    with expect(model=model, linear=3, ops=5, modules={"0": {"linear": 3}}):
        model(x)
        with expect(linear=1, ops=1):
            model[0](x)
        with expect(linear=1, ops=2):
            model(x)
    with pytest.raises(ExpectationError, match="aten::relu"), expect(pointwise=0):
        model(x)


def test_stacks_say_which_function_of_the_user_called_an_op(way: str) -> None:
    model, x = nn.Sequential(nn.Linear(4, 5)), torch.ones(3, 4)

    def users_own() -> Tensor:
        y: Tensor = model(x)
        return y

    with torch.no_grad(), instrumented([("", model)]):
        recording = record(users_own, stacks=True)
        plain = record(users_own)
    product = next(event for event in recording.events if event.name == "aten::addmm")
    assert re.search(r"test_torch_profiler\.py\(\d+\): users_own$", product.where)
    # The functions themselves are left out: what stays is what a recording without stacks has.
    assert signature(recording) == signature(plain)


def test_a_step_in_which_nothing_ran_is_not_measured(way: str) -> None:
    with pytest.raises(NotMeasuredError, match="nothing was recorded in the step"):
        record(lambda: None)


def test_an_annotation_is_no_op(way: str) -> None:
    def run() -> Tensor:
        with annotated("mylib::range"):
            return torch.ones(3)

    assert "mylib::range" not in ops(record(run))


def test_what_a_call_put_on_a_device_goes_with_the_call() -> None:
    events = [
        Event(name="before", kind=OP, start_us=0.0, end_us=1.0),
        Event(name="step", kind=STEP, start_us=2.0, end_us=9.0),
        Event(name="op", kind=OP, start_us=3.0, end_us=8.0, parent=1),
        Event(name="call", kind="runtime", start_us=4.0, end_us=5.0, parent=2),
        Event(name="early", kind="kernel", start_us=5.0, end_us=6.0, launch=0, thread=1),
        Event(name="late", kind="kernel", start_us=20.0, end_us=21.0, launch=3, thread=1),
    ]
    found = within(Recording(events=events), 2.0, 9.0)
    assert [event.name for event in found.events] == ["step", "op", "call", "late"]
    assert [event.parent for event in found.events] == [-1, 0, 1, -1]
    assert found.events[3].launch == 2


def users_of_the_profiler(source: str) -> set[str]:
    """Names by which a module reaches for torch's profiler."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            base = getattr(node, "module", None) or ""
            found |= {f"{base}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute):
            found.add(ast.unparse(node))
    its = {"profiler", "_profiler", "_profiler_enabled"}
    return {name for name in found if name.startswith("torch.") and its & set(name.split("."))}


def test_the_adapter_alone_uses_torchs_profiler() -> None:
    assert users_of_the_profiler("from torch.autograd.profiler import record_function")
    assert users_of_the_profiler("import torch\ntorch.profiler.profile()")
    assert not users_of_the_profiler("from torchweld.profiles.profile import Profile")
    found = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if users_of_the_profiler(path.read_text())
    }
    assert found == {"profiles/recording/torch_profiler.py"}


# ---- releases that lack a field ----


class _Without:
    """What it wraps, without the field of one name."""

    def __init__(self, wrapped: object, hidden: str) -> None:
        self._wrapped, self._hidden = wrapped, hidden

    def __getattr__(self, name: str) -> object:
        if name == self._hidden:
            raise AttributeError(f"no {name}", name=name, obj=self)
        return without(getattr(self._wrapped, name), self._hidden)


def without(value: Any, hidden: str) -> Any:
    if isinstance(value, list):
        return [without(item, hidden) for item in value]
    inside = type(value).__module__.startswith("torch._C")
    return _Without(value, hidden) if inside else value


def hide(monkeypatch: pytest.MonkeyPatch, field: str) -> None:
    results = torch._C._autograd._ProfilerResult
    tree = results.experimental_event_tree

    def hidden(self: Any) -> Any:
        return without(tree(self), field)

    monkeypatch.setattr(results, "experimental_event_tree", hidden)


TOLD_BY_THE_TRACE_TOO = (
    *("name", "tag", "children", "start_time_ns", "end_time_ns", "start_tid", "extra_fields"),
    *("scope", "sequence_number", "inputs", "sizes", "dtype"),
)


@pytest.mark.parametrize(
    "field",
    [
        *("allocation_id", "alloc_size", "strides", "device", "correlation_id"),
        *TOLD_BY_THE_TRACE_TOO,
    ],
)
def test_a_field_that_a_release_lacks_becomes_one_notice(
    field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = nn.Sequential(nn.Linear(4, 5), nn.ReLU()), torch.ones(3, 4)

    def step() -> None:
        model(x).sum().backward()

    with instrumented([("", model)]):
        whole = record(step, step, shapes=True, memory=True)
        hide(monkeypatch, field)
        found = record(step, step, shapes=True, memory=True)
    assert not whole.notices
    (notice,) = found.notices
    assert f" {field} in its tree" in notice
    assert ("exported trace" in notice) == (field in TOLD_BY_THE_TRACE_TOO)
    assert ops(found) == ops(whole)
    product = next(event for event in found.events if event.name == "aten::addmm")
    assert [t and t.shape for t in product.inputs[:3]] == [(5,), (3, 4), (4, 5)]
    assert any(e.name == "AddmmBackward0" and e.forward_thread >= 0 for e in found.events)


def test_a_trace_gets_the_memory_that_the_tree_names() -> None:
    """A GPU's kernels are in the trace alone. Here both come from one recording."""
    model, x = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)), torch.ones(3, 4)
    recorder = Recorder(shapes=True, memory=True)
    recorder.start()
    with torch.no_grad(), recorder.step():
        model(x)
    profiler = recorder._profiler
    with torch_profiler._quiet():
        profiler.__exit__(None, None, None)
    tree = torch_profiler._recording_of(profiler)
    plain = torch_profiler._through_a_file(profiler)
    assert all(t.storage is None for e in plain.events for t in e.inputs if t is not None)
    joined = torch_profiler.with_memory(plain, profiler)

    def inputs(recording: Recording) -> list[tuple[str, Any]]:
        return [(event.name, event.inputs) for event in recording.events if event.kind == OP]

    def memory(recording: Recording) -> list[tuple[int, int, str]]:
        events = recording.events
        return [(a.storage, a.bytes, events[a.event].name) for a in recording.allocations]

    assert inputs(joined) == inputs(tree)
    assert any(t is not None and t.storage is not None for _, row in inputs(joined) for t in row)
    assert memory(joined) == memory(tree)
    assert len(memory(joined)) >= 3
    assert joined.notices == []


def test_a_tree_of_another_step_gives_no_memory() -> None:
    recorder = Recorder(shapes=True, memory=True)
    recorder.start()
    with recorder.step():
        torch.ones(3).exp()
    profiler = recorder._profiler
    with torch_profiler._quiet():
        profiler.__exit__(None, None, None)
    plain = torch_profiler._through_a_file(profiler)
    plain.events = [replace(event, name=f"other {event.name}") for event in plain.events]
    joined = torch_profiler.with_memory(plain, profiler)
    assert all(t.storage is None for e in joined.events for t in e.inputs if t is not None)
    (notice,) = joined.notices
    assert "round trips are not known" in notice
