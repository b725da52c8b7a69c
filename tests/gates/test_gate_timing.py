"""Verdicts on wall time, from made-up comparisons: when a gate fails, passes or abstains."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from tests.support.made_comparisons import comparison

from torchweld.core.errors import NotMeasuredError
from torchweld.core.not_measured import NotMeasured
from torchweld.core.records import json_text
from torchweld.gates.gate_outcome import Outcome, TimeVerdict
from torchweld.gates.gate_timing import KeptTime, against_history, against_other, kept_time
from torchweld.gates.gated_model import Clock
from torchweld.report.gate_text import outcome_data, outcome_lines
from torchweld.timing import Comparison

CLOCK = Clock(seconds=5.0, tolerance=0.05)


def kept(*speedups: float) -> KeptTime:
    return KeptTime(workload="x", comparisons=tuple(comparison(s) for s in speedups))


def series(*found: Comparison) -> Callable[[], Comparison]:
    """One after the other; it is an error to ask for more."""
    left: Iterator[Comparison] = iter(found)
    return lambda: next(left)


def never() -> Comparison:
    raise AssertionError("measured again")


def test_what_is_as_fast_as_before_is_measured_once() -> None:
    found = against_history(kept(2.0, 2.02, 1.98), series(comparison(1.97)), never, CLOCK)
    assert (found.verdict, found.measured) == ("as before", 1)
    assert found.baseline_speedup == 2.0
    assert isinstance(found.noise, float)
    assert found.noise >= 2.02 / 1.98 - 1


def test_slower_in_two_comparisons_is_slower() -> None:
    first, second = series(comparison(1.8)), series(comparison(1.82))
    found = against_history(kept(2.0, 2.0, 2.0), first, second, CLOCK)
    assert (found.verdict, found.measured) == ("slower", 2)
    assert "9.0% smaller" in found.reason
    assert "in two comparisons" in found.reason


def test_slower_in_one_of_two_comparisons_is_not() -> None:
    first, second = series(comparison(1.8)), series(comparison(1.97))
    found = against_history(kept(2.0, 2.0, 2.0), first, second, CLOCK)
    assert found.verdict == "as before"
    assert "a first comparison said 1.800, slower, and the second one did not" in found.reason


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ((2.0, 2.0, 2.0), comparison(1.92)),  # within the tolerance
        ((2.0, 1.8, 2.0), comparison(1.8)),  # one of the baseline's was as slow
        ((2.0, 2.0, 2.0), comparison(1.89, width=0.049)),  # the intervals meet
    ],
)
def test_what_could_be_chance_does_not_fail(before: tuple[float, ...], now: Comparison) -> None:
    assert against_history(kept(*before), series(now), never, CLOCK).verdict == "as before"


def test_faster_is_told() -> None:
    found = against_history(kept(2.0, 2.0, 2.0), series(comparison(2.4)), never, CLOCK)
    assert found.verdict == "faster"
    assert "20.0% larger" in found.reason


@pytest.mark.parametrize(
    "odd", [comparison(1.9, verdict="not measured"), comparison(1.9, width=0.2)]
)
def test_a_comparison_of_no_use_is_tried_again_and_then_not_measured(odd: Comparison) -> None:
    steady = kept(2.0, 2.0, 2.0)
    found = against_history(steady, series(odd, comparison(2.0)), never, CLOCK)
    assert found.verdict == "as before"
    found = against_history(steady, series(odd, odd), never, CLOCK)
    assert found.verdict == "not measured"
    assert found.reason
    assert "--seconds 10" in found.remedies
    # Also where it is the second look that is of no use.
    found = against_history(steady, series(comparison(1.8)), series(odd, odd), CLOCK)
    assert found.verdict == "not measured"
    assert "a first comparison said 1.800, slower, and the second one could not tell" in (
        found.reason
    )


def test_a_wide_interval_is_enough_for_a_clear_difference() -> None:
    wide = comparison(1.2, width=0.2)
    found = against_history(kept(2.0, 2.0, 2.0), series(wide), series(wide), CLOCK)
    assert found.verdict == "slower"


def test_another_state_of_the_machine_is_not_a_slower_kernel() -> None:
    now = comparison(1.8, eager_us=130.0)
    found = against_history(kept(2.0, 2.0, 2.0), series(now, now), never, CLOCK)
    assert found.verdict == "not measured"
    assert "takes 130 µs now and took 100 µs in the baseline" in found.reason
    # It does not matter where nothing is slower.
    now = comparison(2.0, eager_us=130.0)
    assert against_history(kept(2.0, 2.0), series(now), never, CLOCK).verdict == "as before"


def test_a_baseline_needs_comparisons_of_use() -> None:
    wide = comparison(2.0, width=0.3)
    good = comparison(2.0)
    found = kept_time("x", [series(wide, good), series(good)], CLOCK)
    assert found.comparisons == (good, good)
    with pytest.raises(NotMeasuredError, match=r"no baseline was written.*--no-time"):
        kept_time("x", [series(good), series(wide, wide)], CLOCK)


@pytest.mark.parametrize(
    ("speedup", "verdict"),
    [(0.9, "slower"), (0.97, "as before"), (1.0, "as before"), (1.2, "faster")],
)
def test_another_model_in_the_same_rounds(speedup: float, verdict: str) -> None:
    both = comparison(speedup)
    found = against_other("x", "old.py:make", series(both, both), CLOCK)
    assert found.verdict == verdict
    assert found.against == "old.py:make"


# ---- "not measured" is neither a number nor "slower" ----


def untimed(reason: str = "a call takes 9 s") -> Comparison:
    """What `compare` gives where not a single round fitted."""
    unknown = NotMeasured(reason)
    found = comparison(1.0, verdict="not measured")
    return replace(
        found,
        reason=reason,
        speedup=unknown,
        interval=unknown,
        baseline_us=unknown,
        candidate_us=unknown,
        noise=unknown,
        wanted_s=60,
        rounds=0,
        log_ratios=(),
        control_log_ratios=(),
    )


def shown(one: TimeVerdict) -> tuple[str, dict[str, Any]]:
    """The line about it, and its data in JSON."""
    whole = replace(outcome(), times=(one,))
    line = next(line for line in outcome_lines(whole) if line.startswith("wall time"))
    (data,) = json.loads(json_text(outcome_data(whole), "outcome"))["times"]
    return line, data


def test_what_was_not_timed_has_a_reason_in_place_of_figures() -> None:
    nothing = untimed()
    found = against_other("x", "old.py:make", series(nothing, nothing), CLOCK)
    assert found.speedup == found.interval == found.noise == NotMeasured("a call takes 9 s")
    assert found.baseline_speedup is None
    line, data = shown(found)
    assert line == (
        "wall time, x: not measured: a call takes 9 s; what would help: a quieter machine; "
        "--seconds 60; --no-time (counters alone)"
    )
    assert data["speedup"] == data["interval"] == {"not_measured": "a call takes 9 s"}
    assert data["remedies"] == ["a quieter machine", "--seconds 60", "--no-time (counters alone)"]


def test_against_history_the_baselines_figures_stay() -> None:
    nothing = untimed("a call takes 9 s")
    found = against_history(kept(2.0, 2.0), series(nothing, nothing), never, CLOCK)
    assert isinstance(found.speedup, NotMeasured)
    assert found.baseline_speedup == 2.0
    _, data = shown(found)
    assert data["baseline_speedup"] == 2.0
    assert data["speedup"] == {"not_measured": "a call takes 9 s"}


def test_slower_and_not_measured_are_told_apart() -> None:
    slow, noisy = comparison(1.8), comparison(1.9, verdict="not measured")
    slower = against_history(kept(2.0, 2.0), series(slow), series(slow), CLOCK)
    unknown = against_history(kept(2.0, 2.0), series(noisy, noisy), never, CLOCK)
    line, data = shown(slower)
    assert line.startswith("wall time, x: slower: 1.800 (")
    assert "what would help" not in line
    assert (data["verdict"], data["remedies"]) == ("slower", [])
    line, data = shown(unknown)
    assert line.startswith("wall time, x: not measured: ")
    assert data["verdict"] == "not measured"


def test_nothing_of_use_is_kept_as_a_time() -> None:
    assert [*KeptTime(workload="x", comparisons=(untimed(),)).problems()]
    with pytest.raises(NotMeasuredError, match=r"not measured: a call takes 9 s; .*--seconds 60"):
        kept_time("x", [series(untimed(), untimed())], CLOCK)


def outcome(*verdicts: str, lost: bool = False) -> Outcome:
    times = tuple(
        TimeVerdict(workload="x", verdict=verdict, reason="", against="")  # type: ignore[arg-type]
        for verdict in verdicts
    )
    return Outcome(
        baseline="main",
        what="x",
        accepted="",
        changes=(),
        lost=("a",) if lost else (),  # type: ignore[arg-type]
        welded=(1, 1),
        times=times,
        notes=(),
        accept_command="",
    )


@pytest.mark.parametrize(
    ("found", "code"),
    [
        (outcome(), 0),
        (outcome("as before", "faster"), 0),
        (outcome("as before", "not measured"), 2),
        (outcome("not measured", "slower"), 1),
        (outcome("not measured", lost=True), 1),  # counters are judged first
    ],
)
def test_the_exit_code(found: Outcome, code: int) -> None:
    assert found.code == code
