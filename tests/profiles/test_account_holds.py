"""What holds for the account of every profile, and of real recordings."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.made_profiles import (
    PARTS,
    Builder,
    changed,
    new_storage,
    tensor,
)
from tests.support.measured import measured
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from torchweld.profiles.accounting.op_costs import works_of
from torchweld.profiles.accounting.time_account import account
from torchweld.profiles.attributing.attribution import attribute
from torchweld.profiles.attributing.op_kinds import kind_of
from torchweld.profiles.profile import Op, Profile
from torchweld.profiles.recording.torch_profiler import record

WASTES = ["launch_us", "round_trip_us", "host_us", "slow_us"]
NAMES = (
    "aten::mm aten::addmm aten::relu aten::relu_ aten::add aten::sum aten::copy_ aten::clone "
    "aten::view aten::empty aten::linear aten::native_layer_norm aten::embedding aten::sort "
    "AddmmBackward0 mylib::op aten::fill_ torchweld::chain aten::_softmax aten::bernoulli_"
)
TIMES = st.floats(min_value=-2.0, max_value=1e4, allow_nan=False)
GBPS: st.SearchStrategy[float | tuple[float, ...]]
GBPS = st.sampled_from([10.0, (100.0, 50.0, 25.0, 10.0, 5.0)])
SHAPES = st.lists(st.integers(min_value=1, max_value=300), min_size=1, max_size=3)


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    made = Builder(
        op_cost_us=draw(st.floats(min_value=0.0, max_value=5.0)),
        gbps=draw(GBPS),
        peaks=None if draw(st.integers(0, 9)) == 0 else "made",
    )
    paths = ["a", "a.b", "a.b.c", "d", "d.e"][: draw(st.integers(0, 5))]
    for path in paths:
        made.module(path, python_us=draw(TIMES), engine_us=draw(TIMES))
    known = [new_storage() for _ in range(6)] + [None]
    dtypes = ["float32", "bfloat16", "int64", "float64", ""]
    for i in range(draw(st.integers(0, 12))):
        inputs = [
            draw(st.none())
            if draw(st.booleans())
            else tensor(
                *draw(SHAPES),
                dtype=draw(st.sampled_from(dtypes)),
                storage=draw(st.sampled_from(known)),
            )
            for _ in range(draw(st.integers(0, 3)))
        ]
        target = draw(st.sampled_from(known))
        made.op(
            draw(st.sampled_from(NAMES.split())),
            draw(TIMES),
            module=draw(st.integers(0, len(paths))),
            inputs=inputs,
            makes=None if target is None else (target, draw(st.integers(0, 10**7))),
            parent=draw(st.integers(-1, i - 1)),
            phase=draw(st.sampled_from(["forward", "backward", "optimizer"])),
        )
    return made.build(step_us=draw(st.none() | st.floats(min_value=0.0, max_value=1e5)))


@given(profiles())
def test_parts_add_up_and_only_the_unexplained_may_be_negative(profile: Profile) -> None:
    found = account(profile)
    for op, explained in zip(profile.ops, found.ops, strict=True):
        assert measured(explained.split).total_us == pytest.approx(op.self_us, abs=1e-6)
        assert 0 <= explained.round_trip_bytes <= explained.read_bytes + explained.written_bytes
    splits = [row.split for row in found.ops] + [row.split for row in found.modules]
    for split in [*splits, *(row.own for row in found.modules), found.step]:
        assert min(getattr(split, name) for name in PARTS[:-1]) >= 0.0
    assert measured(found.step).total_us == pytest.approx(profile.step_us, abs=1e-6)
    assert 0.0 <= measured(found.explained) <= 1.0 + 1e-9
    covered = sum(op.self_us for op in profile.ops)
    covered += sum(module.python_us + module.engine_us for module in profile.modules)
    assert measured(found.modules[0].split).total_us == pytest.approx(covered, abs=1e-6)
    own = sum(measured(row.own).total_us for row in found.modules)
    assert own == pytest.approx(covered, abs=1e-6)


def scaled(op: Op, factor: float) -> Op:
    return changed(op, self_us=factor * op.self_us, total_us=factor * op.total_us)


@given(profiles())
def test_longer_times_never_make_a_waste_smaller(profile: Profile) -> None:
    # Times below zero were corrected too far; twice that is no longer time.
    ops = [changed(op, self_us=abs(op.self_us)) for op in profile.ops]
    modules = [
        dataclasses.replace(m, python_us=abs(m.python_us), engine_us=abs(m.engine_us))
        for m in profile.modules
    ]
    once = dataclasses.replace(profile, ops=tuple(ops), modules=tuple(modules))
    twice = dataclasses.replace(
        once,
        ops=tuple(scaled(op, 2.0) for op in ops),
        modules=tuple(
            dataclasses.replace(m, python_us=2 * m.python_us, engine_us=2 * m.engine_us)
            for m in modules
        ),
        step_us=2 * measured(profile.step_us),
    )
    before, after = account(once), account(twice)
    pairs = [
        *zip((row.split for row in before.ops), (row.split for row in after.ops), strict=True),
        *zip((row.split for row in before.modules), (r.split for r in after.modules), strict=True),
        (before.step, after.step),
    ]
    for short, long in pairs:
        for waste in WASTES:
            assert getattr(long, waste) >= getattr(short, waste) - 1e-9


@given(profiles(), st.randoms(use_true_random=False))
def test_the_order_of_modules_does_not_matter(profile: Profile, random: object) -> None:
    order = list(range(1, len(profile.modules)))
    random.shuffle(order)  # type: ignore[attr-defined]
    order = [0, *order]
    place = {old: new for new, old in enumerate(order)}
    place[-1] = -1
    moved = dataclasses.replace(
        profile,
        ops=tuple(changed(op, module=place[op.module]) for op in profile.ops),
        modules=tuple(
            dataclasses.replace(profile.modules[old], parent=place[profile.modules[old].parent])
            for old in order
        ),
    )
    before, after = account(profile), account(moved)
    for name in PARTS:
        same = pytest.approx(getattr(before.step, name), abs=1e-6)
        assert getattr(after.step, name) == same
    assert after.explained == pytest.approx(before.explained)
    for old, new in enumerate(place[old] for old in range(len(order))):
        assert after.modules[new].launches == before.modules[old].launches
        total = measured(before.modules[old].split).total_us
        assert measured(after.modules[new].split).total_us == pytest.approx(total, abs=1e-6)


# ---- real recordings ----


def mlp() -> Callable[[], object]:
    model = nn.Sequential(nn.Linear(24, 32), nn.GELU(), nn.Linear(32, 8))
    x = torch.randn(5, 24, requires_grad=True)
    return lambda: model(x).sum().backward()


def convolution() -> Callable[[], object]:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3, stride=2))
    x = torch.randn(2, 3, 12, 12, requires_grad=True)
    return lambda: model(x).sum().backward()


def batched() -> Callable[[], object]:
    a, b = (torch.randn(3, 6, 6, requires_grad=True) for _ in range(2))
    return lambda: torch.softmax(a @ b, -1).sum().backward()


@pytest.mark.parametrize("make", [mlp, convolution, batched])
def test_recorded_ops_do_the_products_that_torch_counts(make: Callable[[], object]) -> None:
    """The profiler sees ops inside ops; nothing is counted twice."""
    run = make()
    assert callable(run)
    counter = FlopCounterMode(display=False)
    with counter:
        run()
    found = attribute(record(run, shapes=True, memory=True))
    flops = 0
    for op, work in zip(found.ops, works_of(found.ops), strict=True):
        if work is not None and kind_of(op.name) in ("product", "convolution", "attention"):
            assert work.flops is not None, op
            flops += work.flops
    assert flops == counter.get_total_flops()


def test_recorded_memory_tells_round_trips() -> None:
    x = torch.randn(1 << 16)

    def run() -> torch.Tensor:
        return x.neg().abs().exp()

    found = attribute(record(run, shapes=True, memory=True))
    profile = dataclasses.replace(Builder().build(step_us=1.0), ops=tuple(found.ops))
    size = 4 * x.numel()
    explained = zip(profile.ops, account(profile).ops, strict=True)
    trips = {op.name: row.round_trip_bytes for op, row in explained if row.flops}
    assert trips == {"aten::neg": size, "aten::abs": 2 * size, "aten::exp": size}
