"""Expectations inside others, as decorators, on other ways to run, and about profiles."""

from __future__ import annotations

import inspect
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.made_traces import TRACES, MadeTrace
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from torchweld.core.errors import TorchweldError
from torchweld.profiles.expecting.expectation import ExpectationError, check_profile, expect
from torchweld.profiles.profile import About, Module, Op, Profile
from torchweld.profiles.recording.trace_profile import read_trace


@pytest.fixture
def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, 3, 8)


# ---- blocks in blocks, threads, other profilers ----


def test_a_block_inside_another_is_looked_at_when_the_outermost_ends(
    mlp: nn.Sequential, x: Tensor
) -> None:
    with expect(linear=5, backward=True) as outer:
        mlp[0](x)
        with expect(linear=2, ops=3) as inner:
            mlp(x)
        with pytest.raises(TorchweldError, match="when the outermost ends"):
            _ = inner.counts
        with expect(ops=0) as nothing:
            pass
        mlp(x)
    assert [e.counts["linear"] for e in (outer, inner, nothing)] == [5, 2, 0]


def test_a_broken_block_inside_another_is_named_by_its_line(mlp: nn.Module, x: Tensor) -> None:
    def inner() -> None:
        with expect(linear=1):
            mlp(x)

    with pytest.raises(ExpectationError) as caught, expect(linear=2):
        inner()
    line = inspect.getsourcelines(inner)[1] + 1
    assert f"did not hold in the block at test_expect_blocks.py:{line}\n" in str(caught.value)


def test_a_block_that_failed_inside_another_does_not_count_against_it(
    mlp: nn.Module, x: Tensor
) -> None:
    with expect(linear=2):
        with pytest.raises(KeyError), expect(linear=9):
            raise KeyError
        mlp(x)


def test_blocks_that_end_in_the_wrong_order_do_not_pass_silently() -> None:
    outer, inner = expect(), expect(linear=3)
    outer.__enter__()
    inner.__enter__()
    outer.__exit__(None, None, None)
    with pytest.raises(TorchweldError, match="was not looked at"):
        inner.__exit__(None, None, None)
    with expect(ops=0):
        pass


def test_misplaced_blocks_are_refused(mlp: nn.Module) -> None:
    errors: list[Exception] = []

    def elsewhere() -> None:
        try:
            with expect():
                pass
        except TorchweldError as error:
            errors.append(error)

    with expect(ops=0) as e:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        with pytest.raises(TorchweldError, match="give it to the outermost"), expect(model=mlp):
            pass
    assert "another thread" in str(errors[0])
    with pytest.raises(TorchweldError, match="one block"), e:
        pass


def test_a_running_profiler_is_refused(mlp: nn.Sequential) -> None:
    with (
        profile(activities=[ProfilerActivity.CPU]),
        pytest.raises(TorchweldError, match="profiler is running already"),
        expect(model=mlp),
    ):
        pass
    assert "forward" not in mlp[0].__dict__


@expect(linear=1)
def decorated(x: Tensor, times: int = 1) -> None:
    """Multiplies."""
    for _ in range(times):
        F.linear(x, x)


def test_as_a_decorator_each_call_is_a_block_of_its_own() -> None:
    x = torch.randn(3, 3)
    assert list(inspect.signature(decorated).parameters) == ["x", "times"]
    decorated(x)
    decorated(x)
    with pytest.raises(ExpectationError):
        decorated(x, times=2)


# ---- other ways to run ----


def test_a_scripted_model_counts_like_the_original(mlp: nn.Module, x: Tensor) -> None:
    scripted = torch.jit.script(mlp)
    for _ in range(3):  # it is optimised as it runs
        with expect(linear=2, pointwise=1, ops=3):
            scripted(x)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiling_inside_the_block_does_not_count(mlp: nn.Module, x: Tensor, backend: str) -> None:
    torch._dynamo.reset()
    model = torch.compile(mlp, backend=backend)
    for _ in range(2):
        with expect(linear=2, pointwise=1, ops=3):
            model(x)
    with expect(linear=5, backward=True):
        model(x).sum().backward()


def test_modules_inside_a_compiled_region_cannot_be_asked_for(mlp: nn.Module) -> None:
    model: Any = torch.compile(mlp, backend="eager")
    with pytest.raises(TorchweldError, match="inside a compiled region cannot be told apart"):
        expect(model=model, modules={"0": {"linear": 1}})


# ---- profiles ----


def test_a_profile_is_judged_by_the_same_rule() -> None:
    def op(name: str, parent: int = -1, phase: str = "forward") -> Op:
        zeros = dict.fromkeys(("start_us", "raw_us", "total_us", "self_us"), 0.0)
        return Op(name=name, module=0, parent=parent, phase=phase, **zeros)  # type: ignore[arg-type]

    taken = Profile(
        about=About(source="live", what="test"),
        step_us=1.0,
        modules=(Module(path="", kind="Linear"),),
        ops=(
            op("aten::linear"),
            op("aten::addmm", 0),
            op("aten::copy_", 1),
            op("AddmmBackward0", -1, "backward"),
            op("aten::mm", 3, "backward"),
        ),
    )
    assert check_profile(taken, {"linear": 1, "copies": 0, "ops": "1"}).holds
    assert check_profile(taken, {"linear": 2}, backward=True).holds
    verdict = check_profile(taken, {"linear": 3})
    assert not verdict.holds
    assert "aten::addmm" in str(verdict)
    with pytest.raises(TorchweldError, match="unknown counter"):
        check_profile(taken, {"lines": 3})


def test_of_a_trace_with_several_steps_one_whole_step_is_judged() -> None:
    training = read_trace(TRACES / "a100_training_step.json.gz")
    assert training.about.steps == 6
    assert check_profile(training, {"linear": 101}).holds


def test_a_trace_with_one_step_is_judged_as_a_whole(tmp_path: Path) -> None:
    made = MadeTrace().op("aten::addmm", 0, 5).step(1, 10, 20).op("aten::addmm", 12, 5)
    one = read_trace(made.write(tmp_path / "one.json"))
    assert check_profile(one, {"linear": 2}).holds
    made.step(2, 40, 20).op("aten::linear", 42, 9).op("aten::addmm", 43, 5)
    two = read_trace(made.step(3, 70, 20).write(tmp_path / "three.json"))
    assert two.about.step_starts_us == (0.0, 30.0, 60.0)
    assert check_profile(two, {"linear": 1, "ops": 1}).holds
