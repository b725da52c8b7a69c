"""The account of a profile: known answers."""

from __future__ import annotations

import dataclasses
from typing import Literal

import pytest
from tests.support.made_profiles import (
    PARTS,
    Builder,
    make_peaks,
    new_storage,
    parts,
    tensor,
)
from tests.support.measured import measured

from torchweld.profiles.accounting.time_account import Account, account, roofline
from torchweld.profiles.profile import Profile

WASTES = ["launch_us", "round_trip_us", "host_us", "slow_us"]
# With the builder's peaks: 100 GFLOP/s are 100,000 operations a us, 10 GB/s are 10,000 bytes.
SIZE = 40_000  # bytes of a tensor of 100 x 100: 4 us


def of_one(name: str, us: float, *inputs: object, **options: object) -> Account:
    made = Builder()
    made.op(name, us, inputs=inputs, **options)  # type: ignore[arg-type]
    return account(made.build())


# ---- one op ----


def test_a_product_above_its_roofline_is_slow() -> None:
    a = tensor(100, 100)
    found = of_one("aten::mm", 50.0, a, tensor(100, 100), makes=40_000).ops[0]
    # 2e6 operations take 20 us, 120,000 bytes 12.
    assert parts(found.split) == pytest.approx(
        {"arithmetic_us": 20.0, "launch_us": 1.0, "slow_us": 29.0}
    )
    assert (found.bound, found.roofline_us, found.flops) == ("compute", 20.0, 2_000_000)
    assert (found.read_bytes, found.written_bytes, found.launches) == (80_000, 40_000, 1)


def test_traffic_is_what_does_not_hide_behind_arithmetic() -> None:
    # 1e5 additions take 1 us, 1.2e6 bytes 120.
    a, b = tensor(100_000), tensor(100_000)
    found = of_one("aten::add", 150.0, a, b, makes=400_000).ops[0]
    assert parts(found.split) == pytest.approx(
        {"arithmetic_us": 1.0, "traffic_us": 119.0, "launch_us": 1.0, "slow_us": 29.0}
    )
    assert found.bound == "bandwidth"


def test_a_tiny_op_is_bound_by_its_launch() -> None:
    found = of_one("aten::add", 1.2, tensor(4), tensor(4), makes=16).ops[0]
    assert found.bound == "overhead"
    assert measured(found.split).launch_us == 1.0
    assert measured(found.split).slow_us < 0.2


@pytest.mark.parametrize(
    "name",
    ["aten::view", "aten::empty", "aten::linear", "AddmmBackward0", "TorchDynamo Cache Lookup"],
)
def test_what_does_no_work_is_the_hosts(name: str) -> None:
    found = of_one(name, 3.0, tensor(4, 4))
    assert parts(found.ops[0].split) == {"host_us": 3.0}
    assert found.ops[0].bound == "overhead"
    assert found.ops[0].launches == 0


def test_an_op_without_a_model_is_unexplained_above_its_traffic() -> None:
    found = of_one("aten::sort", 50.0, tensor(100_000)).ops[0]
    assert parts(found.split) == pytest.approx(
        {"traffic_us": 40.0, "launch_us": 1.0, "unexplained_us": 9.0}
    )
    assert found.bound == "unknown"
    # It may not read all that it is given: never more traffic than time.
    found = of_one("mylib::op", 5.0, tensor(100_000)).ops[0]
    assert parts(found.split) == {"traffic_us": 5.0}


def test_own_time_of_an_unknown_op_is_unexplained_whatever_it_runs() -> None:
    made = Builder()
    a = tensor(100, 100)
    svd = made.op("aten::_linalg_svd", 500.0, inputs=(a,), makes=SIZE)
    made.op("aten::any", 9.0, parent=svd, inputs=(tensor(1),), makes=1)
    found = account(made.build())
    assert parts(found.ops[svd].split) == {"launch_us": 1.0, "unexplained_us": 499.0}
    assert found.ops[svd].bound == "unknown"
    assert [op.launches for op in found.ops] == [1, 0]
    # The bytes are those of what it runs.
    assert found.modules[0].moved_bytes == found.ops[1].read_bytes + found.ops[1].written_bytes


def test_a_mere_wrapper_of_another_library_costs_its_dispatch() -> None:
    made = Builder()
    a = tensor(100, 100)
    wrapper = made.op("mylib::op", 0.5, inputs=(a,), makes=SIZE)
    made.op("aten::mm", 50.0, parent=wrapper, inputs=(a, a), makes=SIZE)
    found = account(made.build())
    assert parts(found.ops[wrapper].split) == {"launch_us": 0.5}


def test_unknown_ops_that_the_compiler_runs_are_the_hosts() -> None:
    made = Builder()
    compiling = made.op("step (dynamo_timed)", 5.0)
    made.op("mylib::op", 50.0, parent=compiling, inputs=(tensor(4),))
    assert parts(account(made.build()).step) == {"host_us": 55.0}


def test_nothing_recorded_about_an_op_is_unexplained() -> None:
    found = of_one("graph_0_cpp_fused_gelu_0", 50.0).ops[0]
    assert parts(found.split) == {"launch_us": 1.0, "unexplained_us": 49.0}


def test_a_compiled_graph_that_hides_its_kernels_is_unexplained_and_says_so() -> None:
    made = Builder()
    call = made.op("## Call CompiledFxGraph fabc ##", 50.0)
    made.op("aten::mm", 30.0, parent=call, inputs=(tensor(100, 100), tensor(100, 100)), makes=SIZE)
    found = account(made.build())
    assert parts(found.ops[call].split) == {"launch_us": 1.0, "unexplained_us": 49.0}
    assert found.modules[0].launches == 1
    assert "compiled graphs" in found.notices[0]
    assert "backward" not in found.notices[0]
    profile = made.build()
    training = dataclasses.replace(profile.about, training=True)
    told = account(dataclasses.replace(profile, about=training)).notices[0]
    assert "what only they keep for backward is not counted" in told
    made.op("graph_0_cpp_fused_gelu_0", 5.0, parent=call)
    found = account(made.build())
    assert parts(found.ops[call].split) == {"host_us": 50.0}
    assert not found.notices


def test_faster_than_the_roofline_leaves_a_negative_rest() -> None:
    a = tensor(100, 100)
    found = of_one("aten::mm", 15.0, a, tensor(100, 100), makes=40_000).ops[0]
    assert parts(found.split) == pytest.approx({"arithmetic_us": 20.0, "unexplained_us": -5.0})
    assert measured(found.split).total_us == pytest.approx(15.0)
    assert measured(found.split).explained_us == pytest.approx(10.0)


def test_a_time_that_was_corrected_below_zero_stays_visible() -> None:
    assert parts(of_one("aten::view", -0.5).ops[0].split) == {"unexplained_us": -0.5}


def test_the_peak_is_that_of_the_type() -> None:
    made = Builder(
        peaks=dataclasses.replace(
            make_peaks(), fma=make_peaks(10.0, dtypes=("bfloat16",)).fma + make_peaks().fma
        )
    )
    for dtype in ("bfloat16", "float32"):
        a = tensor(100, 100, dtype=dtype)
        made.op("aten::mm", 500.0, inputs=(a, a), makes=1)
    half, single = account(made.build()).ops
    assert measured(half.split).arithmetic_us == pytest.approx(200.0)
    assert measured(single.split).arithmetic_us == pytest.approx(20.0)


def test_without_peaks_work_is_unexplained_and_the_remedy_is_said() -> None:
    made = Builder(peaks=None)
    made.op("aten::mm", 50.0, inputs=(tensor(4, 4), tensor(4, 4)))
    made.op("aten::view", 2.0)
    found = account(made.build())
    assert parts(found.step) == {"host_us": 2.0, "unexplained_us": 50.0}
    assert found.ops[0].bound == "unknown"
    assert found.ops[0].flops == 128
    (notice,) = found.notices
    assert "torchweld info --measure" in notice


def test_a_thread_count_or_type_that_was_not_measured_is_said() -> None:
    made = Builder(peaks=make_peaks(threads=7))
    made.op("aten::mm", 50.0, inputs=(tensor(4, 4), tensor(4, 4)))
    found = account(made.build())
    assert "at 2 threads" in found.notices[0]
    assert parts(found.step) == {"unexplained_us": 50.0}
    made = Builder(peaks=make_peaks(dtypes=("float32",)))
    a = tensor(100, 100, dtype="float64")
    made.op("aten::mm", 100.0, inputs=(a, a), makes=80_000)
    found = account(made.build())
    assert "float64" in found.notices[0]
    assert parts(found.step) == pytest.approx(
        {"traffic_us": 24.0, "launch_us": 1.0, "unexplained_us": 75.0}
    )


# ---- modules and the step ----


def two_blocks() -> Profile:
    made = Builder()
    block = made.module("block", "Block", python_us=5.0, engine_us=2.0)
    fc = made.module("block.fc", "Linear", python_us=1.0)
    optimizer = made.module("optimizer", "Optimizer", python_us=3.0)
    made.op("aten::view", 4.0)
    linear = made.op("aten::linear", 1.0, module=fc)
    made.op(
        "aten::mm",
        25.0,
        module=fc,
        parent=linear,
        inputs=(tensor(100, 100), tensor(100, 100)),
        makes=SIZE,
    )
    made.op("aten::relu", 20.0, module=block, inputs=(tensor(100, 100),), makes=SIZE)
    made.op("aten::sort", 10.0, module=block)
    made.op("aten::add_", 9.0, module=optimizer, inputs=(tensor(10), tensor(10)))
    return made.build()


def test_a_module_adds_up_what_is_inside_it() -> None:
    found = account(two_blocks())
    root, block, fc, optimizer = found.modules
    assert parts(fc.own) == pytest.approx(
        {"arithmetic_us": 20.0, "launch_us": 1.0, "host_us": 2.0, "slow_us": 4.0}
    )
    assert fc.split == fc.own
    assert (fc.launches, block.launches, optimizer.launches, root.launches) == (1, 3, 1, 4)
    assert measured(block.own).host_us == 7.0
    assert measured(block.split).host_us == 9.0
    assert measured(block.split).total_us == pytest.approx(64.0)
    assert measured(root.split).total_us == pytest.approx(80.0)
    assert measured(root.own).host_us == 4.0
    assert block.flops == root.flops - optimizer.flops == 2_000_000 + 10_000
    assert root.moved_bytes == 3 * SIZE + 2 * SIZE + 120
    assert (fc.bound, optimizer.bound) == ("compute", "bandwidth")


def test_the_step_adds_up_to_its_time() -> None:
    profile = two_blocks()
    assert measured(account(profile).step).total_us == pytest.approx(profile.step_us) == 80.0
    longer = dataclasses.replace(profile, step_us=100.0)
    found = measured(account(longer).step)
    assert found.total_us == pytest.approx(100.0)
    before = measured(account(profile).step)
    assert found.unexplained_us == pytest.approx(before.unexplained_us + 20.0)


def test_explained_is_what_is_below_the_root_and_has_a_reason() -> None:
    found = account(two_blocks())
    # Neither the view on the root (4 us), nor the sort beyond its launch (9).
    assert found.explained == pytest.approx((80.0 - 4.0 - 9.0) / 80.0)


def test_time_that_ops_cover_beyond_the_step_is_not_explained() -> None:
    profile = two_blocks()
    shorter = dataclasses.replace(profile, step_us=76.0)
    assert account(shorter).explained == pytest.approx((67.0 - 2 * 4.0) / 76.0)
    assert account(dataclasses.replace(profile, step_us=30.0)).explained == 0.0


def test_a_model_without_ops() -> None:
    found = account(Builder().build(step_us=10.0))
    assert parts(found.step) == {"unexplained_us": 10.0}
    assert found.explained == 0.0
    assert found.modules[0].bound == "unknown"


# ---- each waste, where it dominates ----


def wasteful(waste: str) -> Builder:
    made = Builder()
    if waste == "launch_us":
        for _ in range(100):
            made.op("aten::add", 1.5, inputs=(tensor(4), tensor(4)), makes=16)
    elif waste == "round_trip_us":
        before = new_storage()
        for _ in range(10):
            after = new_storage()
            x = tensor(1000, 1000, storage=before)
            made.op("aten::relu", 900.0, inputs=(x,), makes=(after, 4_000_000))
            before = after
    elif waste == "host_us":
        made.module("loop", "Loop", python_us=1000.0)
        made.op("aten::add", 1.5, inputs=(tensor(4), tensor(4)), makes=16)
    else:
        x, w = tensor(8, 1000), tensor(1000, 1000)
        made.op("aten::mm", 5000.0, inputs=(x, w), makes=32_000)
    return made


@pytest.mark.parametrize("waste", WASTES)
def test_the_waste_that_dominates_is_named(waste: str) -> None:
    step = measured(account(wasteful(waste).build()).step)
    largest = max(PARTS, key=lambda name: getattr(step, name))
    assert largest == waste
    assert getattr(step, waste) > 0.5 * step.total_us


# ---- the op table ----


def test_the_op_table_adds_up_calls_of_one_name_and_phase() -> None:
    made = Builder()
    made.op("aten::mm", 30.0, inputs=(tensor(100, 100), tensor(100, 100)), makes=SIZE)
    for name in ("aten::relu", "aten::neg"):
        made.op(name, 30.0, inputs=(tensor(100, 100),), makes=SIZE)
    relu = made.op("aten::relu", 10.0, inputs=(tensor(100, 100),), makes=SIZE)
    made.op("aten::relu", 10.0, inputs=(tensor(100, 100),), makes=SIZE, phase="backward")
    profile = made.build()
    rows = roofline(profile, account(profile))
    assert [(row.name, row.phase, row.calls) for row in rows] == [
        ("aten::relu", "forward", 2),
        ("aten::mm", "forward", 1),
        ("aten::neg", "forward", 1),
        ("aten::relu", "backward", 1),
    ]
    row = rows[0]
    assert row.self_us == row.total_us == pytest.approx(40.0)
    assert row.share == pytest.approx(40.0 / 110.0)
    assert row.of_roofline == pytest.approx(16.0 / 40.0)
    assert row.gflops == pytest.approx(20_000 / 40e3)
    assert row.gbps == pytest.approx(4 * SIZE / 40e3)
    assert row.bound == "bandwidth"
    assert measured(row.split).total_us == pytest.approx(40.0)
    assert profile.ops[relu].name == row.name
    assert sum(measured(row.self_us) for row in rows) == pytest.approx(profile.step_us)


def test_rows_without_a_model_have_no_rates() -> None:
    made = Builder()
    made.op("graph_0_cpp_fused_gelu_0", 50.0)
    made.op("aten::view", 50.0)
    profile = made.build()
    for row in roofline(profile, account(profile)):
        assert (row.gflops, row.gbps, row.of_roofline) == (None, None, None)


def test_a_trace_that_does_not_name_memory_says_that_round_trips_are_not_known() -> None:
    def notices(storage: int | None, source: Literal["live", "trace"]) -> str:
        made = Builder()
        made.op("aten::neg", 50.0, inputs=(tensor(100, 100, storage=storage),), makes=SIZE)
        profile = made.build()
        about = dataclasses.replace(profile.about, source=source)
        return " ".join(account(dataclasses.replace(profile, about=about)).notices)

    assert "round trips are not known" in notices(None, "trace")
    assert "round trips" not in notices(7, "trace")
    assert "round trips" not in notices(None, "live")
