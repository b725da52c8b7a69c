"""Overhead, metadata, the first step, recompilation, guards, copies for a layout."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.support.diagnosed import found
from tests.support.made_profiles import Builder, make_timing, tensor

from torchweld.findings import diagnose
from torchweld.profiles.profile import Compilation, Profile, Tensor

# With the builder's peaks: 100,000 operations and 10,000 bytes a µs; the smallest op takes 1 µs.


def work(made: Builder, us: float, side: int = 100) -> None:
    """A product at its roofline, which takes 20 µs with 100 × 100."""
    made.op("aten::mm", us, inputs=(tensor(side, side), tensor(side, side)), makes=4 * side * side)


# ---- overhead ----


def test_a_step_of_tiny_ops_is_bound_by_overhead() -> None:
    made = Builder()
    loop = made.module("loop", python_us=60.0)
    for _ in range(10):
        made.op("aten::exp", 1.0, module=loop, inputs=(tensor(1),), makes=4)
    made.op("aten::t", 10.0, module=loop, inputs=(tensor(1),))
    work(made, 20.0)
    finding = found(made.build(), "overhead-bound")
    assert finding is not None
    # All starts, the view and all Python; the product's 20 µs are left.
    assert finding.saved_us == pytest.approx(60.0 + 10 * 1.0 + 10.0, rel=0.001)
    assert finding.bound == pytest.approx(100.0 / 20.0, rel=0.01)
    assert finding.modules == ("loop",)


def test_a_step_of_work_is_not() -> None:
    made = Builder()
    made.module("loop", python_us=60.0)
    for _ in range(10):
        work(made, 21.0)
    assert found(made.build(), "overhead-bound") is None


# ---- metadata ----


def views(count: int, us: float, work_us: float, parent: bool = False) -> Profile:
    made = Builder()
    work(made, work_us)
    outer = made.op("aten::linear", 0.0) if parent else -1
    for _ in range(count):
        made.op("aten::transpose", us, inputs=(tensor(4, 4),), parent=outer)
    return made.build()


def test_many_views_are_a_storm() -> None:
    profile = views(100, 1.0, 300.0)
    finding = found(profile, "metadata-storm")
    assert finding is not None
    assert finding.saved_us == pytest.approx(100.0)
    assert "transpose (100)" in finding.evidence[1]


def test_a_few_views_or_views_inside_ops_are_none() -> None:
    assert found(views(20, 5.0, 300.0), "metadata-storm") is None
    assert found(views(100, 0.1, 300.0), "metadata-storm") is None
    assert found(views(100, 1.0, 300.0, parent=True), "metadata-storm") is None


def test_the_python_that_leads_to_a_view_goes_with_it() -> None:
    made = Builder()
    made.places[0].python_us = 150.0
    for i in range(40):
        view = made.op("aten::transpose", 1.0, inputs=(tensor(4, 4),))
        made.starts[view] = 4.0 * i
    work(made, 20.0)
    made.starts[40] = 500.0
    finding = found(made.build(), "metadata-storm")
    assert finding is not None
    # Three µs before each but the first.
    assert finding.saved_us == pytest.approx(40 * 1.0 + 39 * 3.0)


# ---- the first step ----


@pytest.mark.parametrize(
    ("first_us", "cold"),
    [(5e6, True), (200_000.0, True), (90_000.0, False), (20_000.0, False)],
)
def test_a_cold_first_step_is_found_where_it_is_noticed(first_us: float, cold: bool) -> None:
    made = Builder()
    work(made, 20.0)
    profile = replace(made.build(), timing=make_timing(10_000.0, first_us=first_us))
    finding = found(profile, "cold-start")
    assert (finding is not None) == cold
    if finding is not None:
        assert (finding.saved_us, finding.bound) == (0.0, 1.0)
        assert finding.once_us == first_us - 10_000.0
        assert "nothing in later steps" in finding.sentence


def test_a_slow_model_with_a_slow_first_step_is_not_cold() -> None:
    made = Builder()
    work(made, 20.0)
    profile = replace(made.build(), timing=make_timing(1e6, first_us=2e6))
    assert found(profile, "cold-start") is None


# ---- torch.compile ----


def compiled(recompiled: int = 0, guard_us: float = 0.0) -> Profile:
    made = Builder()
    region = made.module("block", python_us=40.0)
    lookup = made.op("TorchDynamo Cache Lookup", guard_us, module=region)
    assert lookup == 0
    work(made, 20.0)
    profile = made.build()
    modules = tuple(replace(m, compiled=m.path == "block") for m in profile.modules)
    return replace(
        profile,
        modules=modules,
        compilation=Compilation(
            regions=1,
            compiled=1 + recompiled,
            recompiled=recompiled,
            graph_breaks=2,
            guard_us=guard_us,
            reasons=("1/0: tensor 'x' size mismatch",) * bool(recompiled),
        ),
    )


def test_recompilation_is_found_with_its_reason() -> None:
    finding = found(compiled(recompiled=3), "recompilation")
    assert finding is not None
    assert finding.title == "Code was compiled again 3 times"
    assert "because 1/0: tensor 'x' size mismatch" in finding.evidence
    assert finding.saved_us == pytest.approx(40.0)
    assert finding.modules == ("block",)
    assert found(compiled(), "recompilation") is None


def test_guards_are_found_where_they_take_time() -> None:
    finding = found(compiled(guard_us=30.0), "guard-cost")
    assert finding is not None
    assert finding.saved_us == pytest.approx(30.0)
    assert found(compiled(guard_us=0.1), "guard-cost") is None
    assert found(compiled(), "guard-cost") is None


def test_eager_models_have_neither() -> None:
    made = Builder()
    work(made, 20.0)
    rules = {finding.rule for finding in diagnose(made.build())}
    assert not rules & {"recompilation", "guard-cost"}


# ---- copies ----

TRANSPOSED = tensor(200, 100, strides=(1, 200))


def copying(source: Tensor, target: Tensor | None = None) -> Profile:
    """aten::contiguous as torch runs it."""
    made = Builder()
    mixer = made.module("mixer")
    target = target or tensor(*source.shape, dtype=source.dtype)
    assert target.storage is not None
    outer = made.op("aten::contiguous", 2.0, module=mixer, inputs=(source,))
    made.op(
        "aten::clone",
        3.0,
        module=mixer,
        inputs=(source,),
        makes=(target.storage, target.nbytes),
        parent=outer,
    )
    made.op("aten::copy_", 50.0, module=mixer, inputs=(target, source), parent=1)
    work(made, 20.0)
    return made.build()


def test_a_copy_for_the_layout_is_found_with_all_around_it() -> None:
    finding = found(copying(TRANSPOSED), "layout-copy")
    assert finding is not None
    assert finding.title.startswith("1 copy of")
    assert finding.saved_us == pytest.approx(2.0 + 3.0 + 50.0)
    assert finding.modules == ("mixer",)
    assert "contiguous (1)" in finding.evidence[1]


@pytest.mark.parametrize(
    ("source", "target"),
    [
        pytest.param(tensor(200, 100, strides=(100, 1)), None, id="contiguous already"),
        pytest.param(tensor(200, 100, strides=(0, 1)), None, id="a bias spread over rows"),
        pytest.param(tensor(200, 100, strides=None), None, id="strides not known"),
        pytest.param(TRANSPOSED, tensor(200, 100, dtype="bfloat16"), id="a cast"),
        pytest.param(TRANSPOSED, tensor(200, 100, strides=(1, 200)), id="into the same layout"),
        pytest.param(TRANSPOSED, tensor(200, 100, strides=(400, 1)), id="into a slice"),
    ],
)
def test_other_copies_are_not(source: Tensor, target: Tensor | None) -> None:
    assert found(copying(source, target), "layout-copy") is None
