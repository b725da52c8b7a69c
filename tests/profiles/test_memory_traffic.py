"""What memory traffic costs, and which of it goes round."""

from __future__ import annotations

import pytest
from tests.support.made_profiles import (
    WORKING_SETS_BYTES,
    Builder,
    new_storage,
    parts,
    tensor,
)
from tests.support.measured import measured

from torchweld.profiles.accounting.memory_traffic import round_trips_of
from torchweld.profiles.accounting.op_costs import works_of
from torchweld.profiles.accounting.time_account import account

# With the builder's peaks: 100 GFLOP/s are 100,000 operations a us, 10 GB/s are 10,000 bytes.
SIZE = 40_000  # bytes of a tensor of 100 x 100: 4 us


def chain() -> tuple[Builder, list[int]]:
    """x -> mm with a weight -> relu -> neg, each result in new memory."""
    made = Builder()
    first, second = new_storage(), new_storage()
    x, w = tensor(100, 100), tensor(100, 100)
    hidden = [tensor(100, 100, storage=storage) for storage in (first, second)]
    ops = [
        made.op("aten::mm", 30.0, inputs=(x, w), makes=(first, SIZE)),
        made.op("aten::relu", 30.0, inputs=(hidden[0],), makes=(second, SIZE)),
        made.op("aten::neg", 30.0, inputs=(hidden[1],), makes=SIZE),
    ]
    return made, ops


def test_bytes_written_and_read_back_are_round_trips() -> None:
    made, _ = chain()
    mm, relu, neg = account(made.build()).ops
    # Input and weight were there before, and the result is not read back.
    assert (mm.round_trip_bytes, relu.round_trip_bytes, neg.round_trip_bytes) == (
        SIZE,
        2 * SIZE,
        SIZE,
    )
    assert measured(mm.split).round_trip_us == 0.0, "hidden behind the arithmetic"
    assert measured(relu.split).round_trip_us == pytest.approx(8.0 - 0.1)
    assert measured(relu.split).traffic_us == 0.0
    assert measured(neg.split).round_trip_us == pytest.approx(0.5 * (8.0 - 0.1))
    assert measured(neg.split).traffic_us == pytest.approx(0.5 * (8.0 - 0.1))


def test_a_value_goes_round_once_however_many_read_it() -> None:
    made, (_, _, neg) = chain()
    again = made.ops[neg]
    made.op("aten::exp", 30.0, inputs=again.inputs, makes=SIZE)
    profile = made.build()
    assert round_trips_of(profile.ops, works_of(profile.ops)) == [0, 1, 1, 0]


def test_unknown_memory_makes_no_round_trips() -> None:
    made = Builder()
    for _ in range(3):
        made.op("aten::relu", 30.0, inputs=(tensor(100, 100, storage=None),))
    found = account(made.build())
    assert measured(found.step).round_trip_us == 0.0
    assert measured(found.step).traffic_us == pytest.approx(3 * (8.0 - 0.1))


def test_a_weight_that_is_updated_after_its_use_is_no_round_trip() -> None:
    made = Builder()
    weight, gradient = tensor(100, 100), new_storage()
    made.op("aten::mm", 30.0, inputs=(tensor(100, 100), weight), makes=SIZE)
    x, seed = tensor(100, 100), tensor(100, 100)
    made.op("aten::mm", 30.0, inputs=(x, seed), makes=(gradient, SIZE), phase="backward")
    made.op(
        "aten::add_",
        30.0,
        inputs=(weight, tensor(100, 100, storage=gradient)),
        phase="optimizer",
    )
    forward, backward, step = account(made.build()).ops
    assert forward.round_trip_bytes == 0
    assert backward.round_trip_bytes == SIZE
    assert step.round_trip_bytes == SIZE


def test_what_runs_inside_an_op_ends_before_it() -> None:
    """aten::mean is aten::sum, and aten::div_ in place on its result."""
    made = Builder()
    result = tensor(100)
    x = tensor(100, 100)
    mean = made.op("aten::mean", 2.0, inputs=(x, None), makes=(result.storage or 0, 400))
    made.op("aten::sum", 20.0, inputs=(x, None, None, None, result), parent=mean)
    made.op("aten::div_", 2.0, inputs=(result, tensor()), parent=mean)
    outer, total, division = account(made.build()).ops
    assert parts(outer.split) == {"host_us": 2.0}
    assert [found.launches for found in (outer, total, division)] == [1, 0, 0]
    assert total.round_trip_bytes == 400
    assert division.round_trip_bytes == 400


def test_memory_changed_in_place_costs_no_more_than_to_read_it() -> None:
    x = tensor(100, 100)
    made = Builder()
    made.op("aten::relu_", 30.0, inputs=(x,))
    found = account(made.build()).ops[0]
    assert (found.read_bytes, found.written_bytes) == (SIZE, SIZE)
    assert found.roofline_us == pytest.approx(4.0)


def test_a_weight_is_read_from_memory_if_the_step_went_through_the_cache() -> None:
    """Rates of 100 GB/s within 32 KB, and 1 GB/s from memory."""
    rates = (100.0, 50.0, 25.0, 10.0, 1.0)

    def step(other_bytes: int) -> float:
        made = Builder(gbps=rates)
        w = tensor(1000)  # 4 KB
        made.op("aten::neg", 1e6, inputs=(w,), makes=4000)
        made.op("aten::neg", 1e6, inputs=(tensor(other_bytes // 4),), makes=4000)
        return account(made.build()).ops[0].roofline_us

    written_us = 4000 / 100e3
    assert step(4) == pytest.approx(4000 / 100e3 + written_us)
    assert step(WORKING_SETS_BYTES[2]) == pytest.approx(4000 / 10e3 + written_us)
    assert step(WORKING_SETS_BYTES[4]) == pytest.approx(4000 / 1e3 + written_us)


def test_what_is_made_and_dropped_does_not_fill_the_cache() -> None:
    rates = (100.0, 50.0, 25.0, 10.0, 1.0)
    made = Builder(gbps=rates)
    w = tensor(1000)
    made.op("aten::neg", 1e6, inputs=(w,), makes=4000)
    for _ in range(100):
        before = new_storage()
        made.op("aten::neg", 1e6, inputs=(tensor(1000),), makes=(before, 4000))
        made.op("aten::neg", 1e6, inputs=(tensor(1000, storage=before),), makes=4000)
    # A hundred inputs of 4 KB, and two results at a time.
    found = account(made.build())
    assert found.ops[0].roofline_us == pytest.approx(4000 / 25e3 + 4000 / 100e3)


def test_round_trips_are_counted_where_no_peak_is_known() -> None:
    """Bytes need no rate; only their time does."""
    made, _ = chain()
    priced = [op.round_trip_bytes for op in account(made.build()).ops]
    made.peaks = None
    found = account(made.build())
    assert [op.round_trip_bytes for op in found.ops] == priced == [SIZE, 2 * SIZE, SIZE]
    assert found.modules[0].round_trip_bytes == sum(priced)
    assert all(measured(op.split).round_trip_us == 0.0 for op in found.ops)
