"""What the profiler costs: how the estimates are weighed, and which rounds count."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchweld.profiles.attributing.attribution import Costs
from torchweld.profiles.recorded_events import MODULE, OP, STEP, Event, Recording
from torchweld.profiles.recording.profiler_overhead import (
    MOST_FACTOR,
    USUAL_FACTOR,
    Round,
    calibrate,
    count_events,
    measure_loop,
    undisturbed,
)

LOOP = Costs(op_us=0.2, module_us=1.0)


def recording(ops: int, modules: int, step_us: float) -> Recording:
    kinds = [STEP] + [OP] * (ops - 1) + [MODULE] * modules
    events = [Event(name="x", kind=kind, start_us=0.0, end_us=step_us) for kind in kinds]
    return Recording(events=events)


def rounds(
    plain: list[float], op_us: float, module_us: float, ops: int, modules: int
) -> list[Round]:
    return [
        Round(
            plain_us=us,
            ops_us=us + ops * op_us,
            recording=recording(ops, modules, us + ops * op_us + modules * module_us),
        )
        for us in plain
    ]


def test_ops_and_modules_are_counted_apart() -> None:
    assert count_events(recording(7, 3, 1.0)) == (7, 3)


def test_steps_of_small_ops_say_what_an_event_costs() -> None:
    found = calibrate(LOOP, rounds([500.0] * 8, 0.6, 2.5, ops=300, modules=40))
    assert found.op_us == pytest.approx(0.6, rel=0.01)
    assert found.module_us == pytest.approx(2.5, rel=0.01)


def test_noise_of_long_steps_is_not_taken_for_a_cost() -> None:
    noisy = [
        Round(
            plain_us=1e6,
            ops_us=1e6 + 40_000 * (-1) ** i,
            recording=recording(300, 40, 1e6 + 30_000 * (-1) ** (i // 2)),
        )
        for i in range(8)
    ]
    found = calibrate(LOOP, noisy)
    assert found.op_us == pytest.approx(USUAL_FACTOR * LOOP.op_us, rel=0.1)
    assert found.module_us == pytest.approx(USUAL_FACTOR * LOOP.module_us, rel=0.1)


def test_one_round_says_nothing() -> None:
    found = calibrate(LOOP, rounds([500.0], 5.0, 5.0, ops=10, modules=10))
    assert found.op_us == pytest.approx(USUAL_FACTOR * LOOP.op_us)
    assert found.module_us == pytest.approx(USUAL_FACTOR * LOOP.module_us)


def test_rounds_that_only_check_calibrate_nothing() -> None:
    taken = rounds([500.0] * 8, 0.6, 2.5, ops=300, modules=40)
    checking = [replace(r, ops_us=None, plain_us=1.0) for r in taken]
    assert calibrate(LOOP, [*taken, *checking]) == calibrate(LOOP, taken)


def test_a_cost_is_never_negative() -> None:
    found = calibrate(LOOP, rounds([500.0] * 8, -3.0, -3.0, ops=300, modules=40))
    assert found.op_us == 0.0
    assert found.module_us == 0.0


def test_what_something_else_took_from_the_steps_is_not_all_charged_to_events() -> None:
    found = calibrate(LOOP, rounds([500.0] * 8, 90.0, 400.0, ops=300, modules=40))
    assert found.op_us == pytest.approx(MOST_FACTOR * LOOP.op_us)
    assert found.module_us == pytest.approx(MOST_FACTOR * LOOP.module_us)


def test_rounds_in_which_any_side_was_late_are_left_out() -> None:
    plain = [10.0, 10.0, 30.0, 10.0, 10.0]
    profiled = [20.0, 60.0, 20.0, 20.0, 20.0]
    assert undisturbed(plain, profiled) == [0, 3, 4]


@given(st.lists(st.floats(min_value=1.0, max_value=1e6), min_size=1, max_size=30))
def test_at_least_half_of_the_rounds_is_kept(side: list[float]) -> None:
    kept = undisturbed(side)
    assert 2 * len(kept) >= len(side)
    assert min(side) in [side[i] for i in kept]


def test_the_loop_is_measured_on_this_machine() -> None:
    loop = measure_loop()
    assert loop is measure_loop()
    assert loop.smallest_op_us > 0
    assert loop.costs.op_us >= 0
