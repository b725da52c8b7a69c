"""Live profiles: who is charged with what, and that the model is left as it was."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.support.made_profiles import PARTS
from tests.support.measured import measured
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import torchweld as tw
from torchweld.core.errors import TorchweldError
from torchweld.machine import measured_peaks
from torchweld.profiles.accounting.time_account import account
from torchweld.profiles.profile import Module, Op, Profile
from torchweld.profiles.recording import live_profile, profile_building
from torchweld.profiles.recording.live_profile import profile
from torchweld.profiles.recording.torch_profiler import record

pytestmark = pytest.mark.usefixtures("brief_profiles")

# As they are before `brief_profiles` replaces them.
MEASURED = measured_peaks.peaks


def module_at(found: Profile, path: str) -> Module:
    return next(module for module in found.modules if module.path == path)


def ops_of(found: Profile, path: str, name: str) -> list[Op]:
    return [
        op for op in found.ops if found.modules[op.module].path == path and op.name.endswith(name)
    ]


class TwoLinears(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.first = nn.Linear(width, 2 * width)
        self.second = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(F.gelu(self.first(x)))
        return y


class Stack(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(TwoLinears(width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def test_ops_are_charged_to_the_module_that_ran_them() -> None:
    found = profile(Stack(), torch.randn(4, 64))
    for i in range(3):
        assert len(ops_of(found, f"layers.{i}.first", "::addmm")) == 1
        assert len(ops_of(found, f"layers.{i}", "::gelu")) == 1
        assert module_at(found, f"layers.{i}.second").calls == 1
    assert len(ops_of(found, "", "::add")) == 3
    assert not [op for op in found.ops if op.phase != "forward"]


def test_backward_is_charged_to_the_module_whose_forward_made_it() -> None:
    found = profile(Stack(), torch.randn(4, 64), training=True)
    for i in range(3):
        for name in ("first", "second"):
            path = f"layers.{i}.{name}"
            nodes = ops_of(found, path, "AddmmBackward0")
            assert [op.phase for op in nodes] == ["backward"] * 2  # the engine's event and the node
            products = [op for op in ops_of(found, path, "::mm") if op.phase == "backward"]
            assert len(products) == (1 if path == "layers.0.first" else 2)  # x needs no gradient
            assert len(ops_of(found, path, "torch::autograd::AccumulateGrad")) == 4
            module = module_at(found, path)
            inside = [op for op in found.ops if found.modules[op.module] is module]
            spent_us = sum(op.self_us for op in inside if op.phase == "backward")
            assert module.backward_us == pytest.approx(spent_us + module.engine_us)
        assert len(ops_of(found, f"layers.{i}", "GeluBackward0")) == 2
    covered = sum(module.self_us for module in found.modules)
    assert found.timing is not None
    assert covered == pytest.approx(found.timing.corrected_us)


def test_times_inside_a_module_add_up() -> None:
    found = profile(Stack(), torch.randn(4, 64), training=True)
    for i, module in enumerate(found.modules):
        children = [other for other in found.modules if other.parent == i]
        inside = sum(child.total_us for child in children)
        assert module.total_us == pytest.approx(module.self_us + inside)
    for i, op in enumerate(found.ops):
        inside = sum(other.total_us for other in found.ops if other.parent == i)
        assert op.total_us == pytest.approx(op.self_us + inside, abs=1e-6)


def test_a_module_that_sleeps_is_charged_with_its_sleep() -> None:
    class Sleeper(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            time.sleep(0.02)
            return x

    model = nn.Sequential(nn.Linear(16, 16), Sleeper(), nn.Linear(16, 16))
    found = profile(model, torch.randn(2, 16))
    sleeper, step_us = module_at(found, "1"), measured(found.step_us)
    assert sleeper.python_us > 0.9 * step_us
    assert sleeper.self_us > 0.9 * step_us
    assert module_at(found, "0").total_us + module_at(found, "2").total_us < 0.1 * step_us
    assert measured(account(found).modules[2].own).host_us > 0.9 * step_us


class ManyTinyOps(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(100):
            x = x * 1.01
        return x


class PointwiseChain(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul(2).add(1).abs().neg().mul(3).sub(1)


class PythonLoop(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        total = 0
        for i in range(200_000):
            total += i * i
        return x + total


class Inside(nn.Module):
    """Puts a model below the root, where time counts as explained."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x)
        return y


def least_disturbed(model: nn.Module, x: Tensor) -> Profile:
    """The fastest of a few: what another process takes from the processor is no waste of ours."""
    return min((profile(model, x) for _ in range(3)), key=lambda found: measured(found.step_us))


DOMINATED = [
    (ManyTinyOps, (4,), ("launch_us", "host_us")),
    # 1 MB: in the processor's own caches, whose rate others do not change.
    (PointwiseChain, (1 << 18,), ("round_trip_us",)),
    (PythonLoop, (4,), ("host_us",)),
]


def assert_dominated(body: Callable[[], nn.Module], x: tuple[int, ...], *wastes: str) -> None:
    split = measured(account(least_disturbed(Inside(body()), torch.ones(x))).modules[1].split)
    parts = {name: getattr(split, name) for name in PARTS}
    named = sum(parts.pop(name) for name in wastes)
    assert named > max(parts.values())
    assert named > 0.4 * split.total_us


@pytest.mark.parametrize(("body", "x", "wastes"), DOMINATED)
def test_the_account_names_the_waste_that_dominates(
    body: Callable[[], nn.Module], x: tuple[int, ...], wastes: tuple[str, ...]
) -> None:
    assert_dominated(body, x, *wastes)


@pytest.mark.slow
@pytest.mark.parametrize(("body", "x", "wastes"), DOMINATED)
def test_the_same_with_the_peaks_of_this_machine(
    body: Callable[[], nn.Module],
    x: tuple[int, ...],
    wastes: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(measured_peaks, "peaks", MEASURED)
    assert_dominated(body, x, *wastes)


def test_a_product_with_few_rows_is_a_slow_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured_peaks, "peaks", MEASURED)
    model = Inside(nn.Linear(2048, 2048, bias=False))
    found = least_disturbed(model, torch.randn(8, 2048))
    split = measured(account(found).modules[1].split)
    others = (split.launch_us, split.round_trip_us, split.host_us)
    assert split.slow_us > max(others)


def test_a_module_called_twice_and_one_that_stands_at_two_places() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            common = nn.Linear(8, 8)
            self.left = nn.Sequential(common)
            self.right = nn.Sequential(common, nn.ReLU())
            self.twice = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.twice(self.twice(self.right(self.left(x))))
            return y

    found = profile(Shared(), torch.randn(2, 8), training=True)
    assert module_at(found, "twice").calls == 2
    assert len(ops_of(found, "twice", "::addmm")) == 2
    for place in ("left.0", "right.0"):
        assert module_at(found, place).calls == 1
        assert len(ops_of(found, place, "::addmm")) == 1
        assert len(ops_of(found, place, "AddmmBackward0")) == 2


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_checkpointing_computes_again_belongs_to_its_module(reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = TwoLinears()

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = checkpoint(self.body, x, use_reentrant=reentrant)
            return y

    x = torch.randn(4, 64, requires_grad=True)
    found = profile(Checkpointed(), x, training=True)
    products = ops_of(found, "body.first", "::addmm")
    assert sorted(op.phase for op in products) == ["forward", "recompute"]
    assert module_at(found, "body.first").calls == 1
    assert len(ops_of(found, "body.first", "AddmmBackward0")) == 2


def test_the_optimizer_has_a_place_of_its_own_and_its_steps_are_taken_back() -> None:
    model = TwoLinears()
    optimizer = torch.optim.AdamW(model.parameters())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = profile(model, torch.randn(4, 64), training=True, optimizer=optimizer)
    assert module_at(found, "optimizer").kind == "Optimizer"
    assert [op for op in found.ops if op.phase == "optimizer"]
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert optimizer.state_dict()["state"] == {}


def test_the_model_is_left_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
    model[2].eval()
    model(torch.randn(4, 8)).sum().backward()
    grad = model[0].weight.grad
    state = {name: value.clone() for name, value in model.state_dict().items()}
    for training in (False, True):
        profile(model, torch.randn(4, 8), training=training)
        assert [module.training for module in model] == [True, True, False]
        assert model[0].weight.grad is grad
        assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
        assert all("forward" not in module.__dict__ for module in model.modules())
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    profile(model, torch.ones(4, 8), training=True)
    assert torch.equal(torch.rand(3), expected)


def test_a_model_that_raises_is_left_as_it_was() -> None:
    class Breaks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError("on purpose")

    model = nn.Sequential(nn.Linear(8, 8), Breaks())
    with pytest.raises(TorchweldError, match="on purpose"):
        profile(model, torch.randn(4, 8))
    assert all("forward" not in module.__dict__ for module in model.modules())
    profile(model[0], torch.randn(4, 8))  # the profiler is free again


def test_watching_does_not_switch_off_fast_paths() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    found = profile(layer, torch.randn(2, 4, 16))
    assert [op for op in found.ops if op.name == "aten::_transformer_encoder_layer_fwd"]
    mlp = tw.FusedMLP((16, 32, 16))
    found = profile(Inside(mlp), torch.randn(2, 16))
    names = {op.name for op in found.ops}
    assert any(name.startswith("torchweld::") for name in names), names
    assert "aten::addmm" not in names


def test_a_workload_is_profiled_with_the_models_it_names() -> None:
    model = TwoLinears()
    x = torch.randn(4, 64)

    def step() -> None:
        model(x).sum().backward()

    found = profile(step)
    assert len(ops_of(found, "first", "::addmm")) == 1
    assert len(ops_of(found, "first", "AddmmBackward0")) == 2
    assert found.about.training


def test_two_models_of_a_workload_are_told_apart() -> None:
    left, right = nn.Linear(8, 8), nn.Linear(8, 8)
    x = torch.randn(4, 8)
    found = profile(lambda: right(left(x)))
    assert {module.path for module in found.modules} == {"", "left", "right"}


def test_correction_and_its_checks_are_shown() -> None:
    found = profile(Stack(256), torch.randn(64, 256))
    timing = found.timing
    assert timing is not None
    assert timing.raw_us >= timing.corrected_us
    assert timing.unexplained_us == pytest.approx(timing.wall_us - timing.corrected_us)
    what = [check.what for check in timing.checks]
    assert what[0] == "held-out steps"
    assert {"layers.0", "layers.1", "layers.2"} & set(what)


def test_memory_is_charged_to_the_module_that_made_it() -> None:
    found = profile(Stack(), torch.randn(256, 64), training=True)
    memory = found.memory
    assert memory is not None
    hidden = 256 * 128 * 4
    # gelu keeps its input, the product behind it keeps gelu's output.
    assert memory.saved_bytes["layers.0"] == hidden
    assert memory.saved_bytes["layers.0.second"] == hidden
    assert memory.peak_bytes >= sum(memory.saved_bytes.values())
    assert memory.at_peak == tuple(sorted(memory.at_peak, key=lambda a: -a.bytes))
    assert memory.allocations >= 9


def test_stacks_name_the_users_function_and_change_nothing_else() -> None:
    model, x = Stack(), torch.randn(4, 64)
    plain, found = profile(model, x), profile(model, x, stacks=True)
    assert [(op.name, op.parent, op.module) for op in found.ops] == [
        (op.name, op.parent, op.module) for op in plain.ops
    ]
    assert found.timing is not None
    assert found.timing.steps > 1  # the steps without stacks are the same to us
    (gelu, *_) = ops_of(found, "layers.0", "::gelu")
    assert re.search(r"test_live_profile\.py\(\d+\): forward$", gelu.where)
    assert not any(op.where for op in plain.ops)


def test_the_loss_of_the_user_is_used() -> None:
    seen = []

    def loss(output: Tensor) -> Tensor:
        seen.append(output.shape)
        return output.square().mean()

    found = profile(TwoLinears(), torch.randn(4, 64), training=True, loss=loss)
    assert seen
    assert [op for op in found.ops if "MeanBackward0" in op.name]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: profile(nn.Linear(2, 2)), "no inputs"),
        (lambda: profile(3), "cannot profile a int"),  # type: ignore[arg-type]
        (lambda: profile(nn.Linear(2, 2), torch.ones(2), steps=1), "steps is 1"),
        (lambda: profile(nn.Linear(2, 2), torch.ones(2), loss=torch.sum), "training=True"),
        (lambda: profile(lambda: None, torch.ones(2)), "without arguments"),
        (lambda: profile(nn.Identity(), torch.ones(2), training=True), "nothing to train on"),
    ],
)
def test_wrong_use_is_explained(call: Callable[[], object], message: str) -> None:
    with pytest.raises(TorchweldError, match=message):
        call()


def test_a_second_profiler_is_refused() -> None:
    with (
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
        pytest.raises(TorchweldError, match="one at a time"),
    ):
        profile(nn.Linear(2, 2), torch.ones(2))


def test_progress_goes_from_nothing_to_all() -> None:
    seen: list[float] = []
    profile(nn.Linear(2, 2), torch.ones(2), progress=lambda doing, share: seen.append(share))
    assert seen == sorted(seen)
    assert seen[0] == 0.0
    assert seen[-1] > 0.9


def test_a_step_that_was_slow_without_page_faults_is_not_blamed_on_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = iter([1000.0, 100.0])
    monkeypatch.setattr(live_profile, "_settled_us", lambda runner: next(times))
    monkeypatch.setattr(live_profile, "_timed_faults", lambda runner: (100.0, 3))
    found = tw.profile(nn.Linear(3, 5), torch.randn(2, 3))
    assert not any("fresh process" in notice for notice in found.notices)


def test_memory_that_goes_back_to_the_system_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    times, faults = iter([1000.0, 100.0]), iter([5000, 0])
    monkeypatch.setattr(live_profile, "_settled_us", lambda runner: next(times))
    monkeypatch.setattr(live_profile, "_timed_faults", lambda runner: (100.0, next(faults)))
    found = tw.profile(nn.Linear(3, 5), torch.randn(2, 3))
    assert any("takes 10.0 times as long" in notice for notice in found.notices)


@pytest.mark.parametrize(("cost", "recorded"), [(1e9, 7), (0.0, 10)])
def test_a_long_step_is_calibrated_on_only_if_it_tells(
    monkeypatch: pytest.MonkeyPatch, cost: float, recorded: int
) -> None:
    runs = {True: 0, False: 0}

    def counted(run: Any, *args: Any, **options: Any) -> Any:
        runs[bool(options)] += 1
        return record(run, *args, **options)

    monkeypatch.setattr(live_profile, "record", counted)
    monkeypatch.setattr(live_profile, "SHORT_US", 0.0)  # every step is a long one
    monkeypatch.setattr(live_profile, "LEAST_COST", cost)
    monkeypatch.setattr(live_profile, "SET_SECONDS", 0.0)
    monkeypatch.setattr(live_profile, "CHECK_SECONDS", 0.0)
    tw.profile(nn.Linear(3, 5), torch.randn(2, 3))
    # The first, three to calibrate and three to check, each with its modules; one with shapes. If
    # it tells, three more without modules.
    assert runs == {False: recorded, True: 1}


@pytest.mark.parametrize("off", [False, True])
def test_the_step_is_the_clock_s_where_profiled_ones_surely_differ(
    monkeypatch: pytest.MonkeyPatch, off: bool
) -> None:
    asked: list[int] = []

    def surely_off(rounds: Any, costs: Any) -> bool:
        asked.append(len(rounds))
        return off

    monkeypatch.setattr(profile_building, "surely_off", surely_off)
    found = tw.profile(nn.Linear(3, 5), torch.randn(2, 3))
    assert found.timing is not None
    assert asked[0] >= live_profile.CHECKED_ROUNDS  # or they could not tell
    wall_us, corrected_us = found.timing.wall_us, found.timing.corrected_us
    # Never less than its parts come to.
    assert found.step_us == (max(wall_us, corrected_us) if off else corrected_us)
