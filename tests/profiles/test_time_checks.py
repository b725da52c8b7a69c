"""A corrected time against the clock: ratios within rounds, and how surely they tell."""

from __future__ import annotations

from dataclasses import replace

import pytest

from torchweld.profiles.attributing.attribution import Costs
from torchweld.profiles.profile import TimeCheck
from torchweld.profiles.recorded_events import KERNEL, MODULE, OP, STEP, Event, Recording
from torchweld.profiles.recording.profiler_overhead import Round
from torchweld.profiles.recording.time_checks import (
    around_us,
    check,
    checks_of,
    checks_of_loop,
    complaint,
    surely_off,
)

COSTS = Costs(op_us=1.0, module_us=5.0)


def step_of(step_us: float, module_us: float) -> Recording:
    """A step with one module, and one op in it."""
    events = [
        Event(name="step", kind=STEP, start_us=0.0, end_us=step_us),
        Event(name="a", kind=MODULE, start_us=1.0, end_us=1.0 + module_us, parent=0),
        Event(name="op", kind=OP, start_us=2.0, end_us=3.0, parent=1),
    ]
    return Recording(events=events)


def test_a_machine_that_gets_slower_from_round_to_round_does_not_show() -> None:
    timed = [100.0 * 1.5**i for i in range(12)]
    made = check("x", [1.02 * us for us in timed], timed)
    assert made.error == pytest.approx(0.02)
    assert made.interval == pytest.approx((0.02, 0.02))


def test_rounds_that_were_disturbed_move_neither_error_nor_interval_far() -> None:
    timed = [100.0] * 20
    corrected = [101.0] * 17 + [900.0] * 3
    made = check("x", corrected, timed)
    assert made.error == pytest.approx(0.01)
    assert made.within(0.10) is True


def test_fewer_than_six_rounds_give_no_interval() -> None:
    assert check("x", [1.0] * 5, [1.0] * 5).interval is None
    assert check("x", [1.0] * 6, [1.0] * 6).interval == (0.0, 0.0)


@pytest.mark.parametrize(
    ("interval", "within"),
    [
        ((-0.02, 0.09), True),
        ((0.11, 0.30), False),
        ((-0.30, -0.11), False),
        ((0.05, 0.15), None),
        (None, None),
    ],
)
def test_an_interval_that_reaches_over_the_limit_leaves_it_open(
    interval: tuple[float, float] | None, within: bool | None
) -> None:
    made = TimeCheck(what="x", corrected_us=1.0, timed_us=1.0, interval=interval)
    assert made.within(0.10) is within


def test_the_step_and_each_module_are_checked_without_the_cost_of_events() -> None:
    # Two ops and a module are taken away from the step, and the op in it from the module.
    rounds = [
        Round(plain_us=93.0, recording=step_of(100.0, 51.0), alone_us={"a": 40.0}) for _ in range(6)
    ]
    step, module = checks_of(rounds, COSTS)
    assert (step.what, step.corrected_us, step.timed_us) == ("held-out steps", 93.0, 93.0)
    assert (module.what, module.timed_us) == ("a", 40.0)
    assert module.error == pytest.approx(0.25)
    assert checks_of([], COSTS) == ()


def test_modules_on_a_device_are_not_checked_against_the_hosts_time() -> None:
    recording = step_of(100.0, 51.0)
    recording.events.append(Event(name="gemm", kind=KERNEL, start_us=60.0, end_us=95.0))
    rounds = [Round(plain_us=93.0, recording=recording, alone_us={"a": 80.0}) for _ in range(6)]
    assert [made.what for made in checks_of(rounds, COSTS)] == ["held-out steps"]


def test_a_loop_is_checked_on_the_steps_that_follow() -> None:
    rounds = [Round(plain_us=1.0, recording=step_of(107.0, 51.0)) for _ in range(3)]
    (made,) = checks_of_loop(rounds, [50.0, 50.0], COSTS)
    assert made.error == pytest.approx(1.0)
    assert checks_of_loop(rounds, [], COSTS) == ()


def test_what_is_off_is_said_with_how_surely() -> None:
    assert complaint(TimeCheck(what="x", corrected_us=1.05, timed_us=1.0)) == ""
    off = TimeCheck(what="x", corrected_us=1.2, timed_us=1.0, interval=(0.15, 0.25))
    assert "+20 % off" in complaint(off)
    assert "+15 to +25 %" in complaint(off)
    assert "too few rounds" in complaint(TimeCheck(what="x", corrected_us=1.2, timed_us=1.0))


def test_what_a_step_spends_around_the_model_is_no_more_than_was_recorded_there() -> None:
    def found(plain_us: float, alone_us: dict[str, float]) -> float:
        recording = step_of(100.0, 80.0)
        recording.events[1] = replace(recording.events[1], name="")
        return around_us([Round(plain_us=plain_us, recording=recording, alone_us=alone_us)] * 8)

    assert found(90.0, {"": 83.0}) == pytest.approx(7.0)
    assert found(190.0, {"": 83.0}) == pytest.approx(20.0)
    assert found(80.0, {"": 83.0}) == 0.0
    assert found(90.0, {"a": 83.0}) == 0.0


def test_rounds_say_whether_profiled_steps_took_another_time() -> None:
    def rounds(*plain_us: float) -> list[Round]:
        return [Round(plain_us=us, recording=step_of(107.0, 50.0)) for us in plain_us]

    costs = Costs(op_us=1.0, module_us=5.0)  # 2 ops and 1 module: 100 µs are left
    assert not surely_off(rounds(90, 95, 99, 101, 105, 110), costs)
    assert surely_off(rounds(90, 92, 94, 96, 98, 99), costs)
    assert surely_off(rounds(101, 102, 103, 104, 105, 106), costs)
    assert not surely_off(rounds(90, 90, 90, 90, 90), costs)  # too few to say
