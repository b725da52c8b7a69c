"""What torch.compile did while it was watched is counted."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from torchweld.profiles.attributing.compilation_watch import watch_compilation
from torchweld.profiles.recording.torch_profiler import record


@pytest.fixture
def fresh() -> Iterator[None]:
    import torch._dynamo

    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def scaled(x: Tensor, factor: int) -> Tensor:
    return x * factor


def broken(x: Tensor) -> Tensor:
    x = x + 1
    torch._dynamo.graph_break()
    return x * 2


@pytest.mark.usefixtures("fresh")
def test_compilations_and_recompilations_are_counted_with_their_reason() -> None:
    function, x = torch.compile(scaled, backend="eager", dynamic=False), torch.randn(3)
    with watch_compilation() as first:
        function(x, 1)
    with watch_compilation() as again:
        function(x, 1)
    with watch_compilation() as other:
        function(x, 2)
    counts = [(w.compiled, w.recompiled, w.graph_breaks) for w in (first, again, other)]
    assert counts == [(1, 0, 0), (0, 0, 0), (1, 1, 0)]
    assert (first.reasons, again.reasons) == ((), ())
    (reason,) = other.reasons
    assert "factor" in reason
    assert "  " not in reason
    assert "\n" not in reason
    assert first.notices == again.notices == other.notices == []


@pytest.mark.usefixtures("fresh")
def test_graph_breaks_are_counted_and_a_recording_completes_the_picture() -> None:
    function, x = torch.compile(broken, backend="eager"), torch.randn(3)
    with watch_compilation() as watch:
        function(x)
        recording = record(lambda: function(x))
    assert (watch.compiled, watch.recompiled, watch.graph_breaks) == (2, 0, 1)
    found = watch.result(recording)
    assert found is not None
    assert (found.regions, found.compiled, found.graph_breaks) == (2, 2, 1)
    assert found.guard_us > 0


@pytest.mark.usefixtures("fresh")
def test_the_backward_of_a_frame_is_not_another_frame() -> None:
    function = torch.compile(lambda x: x.sin().sum(), backend="aot_eager")
    with watch_compilation() as watch:
        function(torch.randn(3, requires_grad=True)).backward()
    assert (watch.compiled, watch.recompiled) == (1, 0)


def test_without_compiled_code_there_is_nothing_to_tell() -> None:
    with watch_compilation() as watch:
        recording = record(lambda: torch.ones(3).tanh())
    assert watch.result(recording) is None


def test_what_is_not_told_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._dynamo.utils

    monkeypatch.delattr(torch._dynamo.utils, "get_compilation_metrics")
    with watch_compilation() as watch:
        pass
    assert watch.compiled == 0
    assert "were not counted" in watch.notices[0]


def test_forgotten_compilations_are_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._dynamo.utils

    def notes(first: int) -> list[SimpleNamespace]:
        return [SimpleNamespace(compile_id=f"{first + i}/0", fail_type=None) for i in range(3)]

    kept = [notes(0), notes(3)]
    monkeypatch.setattr(torch._dynamo.utils, "get_compilation_metrics", lambda: kept.pop(0))
    with watch_compilation() as watch:
        pass
    assert watch.compiled == 3
    assert "last 3 compilations only" in watch.notices[0]


def test_cleared_counters_do_not_make_graph_breaks_negative(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch._dynamo.utils

    counters = {"graph_break": {"call": 5}}
    monkeypatch.setattr(torch._dynamo.utils, "counters", counters)
    with watch_compilation() as watch:
        counters["graph_break"] = {"call": 2, "print": 1}
    assert watch.graph_breaks == 3
