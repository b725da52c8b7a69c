"""Which of the ways that were tried is chosen, and what that promises for the whole."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

import torchweld as tw
from torchweld.core.measured_speed import Speed
from torchweld.core.not_measured import NotMeasured
from torchweld.models import MODELS
from torchweld.plans import choice_timing, kernel_choice, whole_model
from torchweld.plans.kernel_choice import choose
from torchweld.plans.plan import Plan, Planned, Trial, Tuning, Verdict, Whole
from torchweld.report.plan_text import sentence
from torchweld.welds.weld_decisions import Choice

NATURAL, PACKED = Choice(backend="cpu"), Choice(backend="cpu", packed=True)
PLAIN = Choice(backend="torch")


def speed(speedup: float) -> Speed:
    interval = (speedup * 0.98, speedup * 1.02)
    return Speed(speedup=speedup, interval=interval, before_us=100.0, after_us=100.0 / speedup)


def trial(choice: Choice, speedup: float, verdict: Verdict = "faster", copied: int = 0) -> Trial:
    known = verdict in ("faster", "slower", "same")
    return Trial(
        choice=choice,
        verified=True,
        verdict=verdict,
        speed=speed(speedup) if known else NotMeasured("busy"),
        error_ratio=0.5,
        copied_bytes=copied,
    )


def test_the_fastest_beyond_noise_is_chosen() -> None:
    found = choose(
        1, [trial(PACKED, 2.0, copied=8), trial(NATURAL, 1.5), trial(PLAIN, 3.0, "same")]
    )
    assert found.chosen == PACKED


def test_a_copy_has_to_be_worth_its_memory() -> None:
    found = choose(1, [trial(PACKED, 1.52, copied=8 << 20), trial(NATURAL, 1.5)])
    assert found.chosen == NATURAL
    assert "too little" in found.reason
    found = choose(1, [trial(PACKED, 1.6, copied=8 << 20), trial(NATURAL, 1.5)])
    assert found.chosen == PACKED
    # Round by round it is known better than from two medians.
    gains = replace(trial(PACKED, 1.5, copied=8 << 20), copy_gain=1.1)
    assert choose(1, [gains, trial(NATURAL, 1.5)]).chosen == PACKED
    gains_not = replace(trial(PACKED, 1.7, copied=8 << 20), copy_gain=1.02)
    assert choose(1, [gains_not, trial(NATURAL, 1.5)]).chosen == NATURAL
    # Nobody would notice a small one.
    small = replace(gains_not, copied_bytes=8 << 10)
    assert choose(1, [small, trial(NATURAL, 1.5)]).chosen == PACKED


def test_what_a_copy_gains_is_told_round_by_round() -> None:
    def timed(ratios: Sequence[float], copied: int) -> choice_timing.Timed:
        speedup = math.exp(statistics.median(ratios))
        return choice_timing.Timed(
            verdict="faster",
            speed=speed(speedup),
            copied_bytes=copied,
            log_ratios=tuple(ratios),
        )

    packed, natural = timed([1.1, 0.1, 0.6], 8), timed([1.0, 0.0, 0.5], 0)
    both = [packed, natural]
    assert kernel_choice.copy_gain_of(packed, both) == pytest.approx(math.exp(0.1))
    assert isinstance(kernel_choice.copy_gain_of(natural, both), NotMeasured)
    assert isinstance(kernel_choice.copy_gain_of(packed, [packed]), NotMeasured)
    assert isinstance(kernel_choice.copy_gain_of(packed, [packed, timed([1.0], 0)]), NotMeasured)


def test_what_is_wrong_or_not_measured_is_never_chosen() -> None:
    row = NotMeasured("row 3")
    wrong = replace(trial(PACKED, 9.0), verified=False, verdict="wrong", speed=row)
    found = choose(1, [wrong, trial(NATURAL, 9.0, "not measured"), trial(PLAIN, 0.5, "slower")])
    assert found.chosen is None
    assert "cpu packed: wrong (row 3)" in found.reason


def test_what_is_far_behind_at_first_look_is_left_out() -> None:
    class FakeSide:
        def __init__(self, seconds: float) -> None:
            self.seconds = seconds

        def time(self, calls: int) -> float:
            return self.seconds * calls

    sides: Any = [FakeSide(1.0), FakeSide(1.2), FakeSide(2.0)]
    found = choice_timing._behind(sides, ["a", "b", "c"], 3)
    assert found == {"c": "2.0 times as long as a at first look"}
    assert choice_timing._behind(sides[:1], ["a"], 3) == {}


@pytest.mark.parametrize(("whole_us", "saved_us"), [(1000.0, 150.0), (100.0, 75.0)])
def test_blocks_promise_no_more_than_their_share_of_the_whole(
    whole_us: float, saved_us: float
) -> None:
    """Two calls of 100 µs, four times as fast, in a whole that takes longer than they, or less."""
    model, inputs = MODELS["policy"].build()
    (block,) = tw.find(model, inputs)
    made = Tuning(rows=1, count=2, trials=(trial(PACKED, 4.0),), chosen=PACKED, reason="")
    found = whole_model.promised([Planned(block=block, tunings=(made,))], whole_us)
    assert found == pytest.approx(whole_us / (whole_us - saved_us))
    forced = replace(trial(PACKED, 4.0, "not measured"))
    untimed = replace(made, trials=(forced,))
    found = whole_model.promised([Planned(block=block, tunings=(untimed,))], whole_us)
    assert isinstance(found, NotMeasured)


# ---- what became of a block ----


@pytest.mark.parametrize(
    ("verdicts", "outcome"),
    [
        (("slower", "same"), "not faster"),
        (("slower", "behind"), "not faster"),
        (("slower", "not measured"), "not measured"),
        (("not measured", "not measured"), "not measured"),
        (("not known", "cannot serve"), "not known"),
        (("wrong", "cannot serve"), "cannot be welded"),
    ],
)
def test_not_measured_is_told_apart_from_not_faster(
    verdicts: tuple[Verdict, Verdict], outcome: str
) -> None:
    refused = ("wrong", "cannot serve")
    trials = [
        replace(trial(choice, 0.9, verdict), verified=verdict not in refused)
        for choice, verdict in zip((PACKED, NATURAL), verdicts, strict=True)
    ]
    found = choose(1, trials)
    assert found.outcome == outcome
    assert found.unmeasured == (outcome == "not measured")
    made = _plan_of(found, replace(found, rows=2))
    assert made.outcomes == {outcome: 1}


def _plan_of(*tunings: Tuning) -> Plan:
    model, inputs = MODELS["policy"].build()
    made = tw.plan(model, inputs, force=True)
    planned = replace(made.planned[0], tunings=tunings)
    return replace(made, planned=(planned,), forced=False)


def test_the_sentence_says_which_of_the_two_it_is_and_for_how_many() -> None:
    busy = choose(1, [trial(PACKED, 0.0, "not measured")])
    said = sentence(_plan_of(busy))
    assert said == "nothing was welded: 1 of 1 block could not be measured (busy)"
    slow = choose(1, [trial(PACKED, 0.5, "slower")])
    assert "1 of 1 block measured and no faster than the original" in sentence(_plan_of(slow))
    assert "could not be measured" not in sentence(_plan_of(slow))


def test_times_of_an_earlier_plan_are_marked_with_their_age() -> None:
    at = (datetime.now(timezone.utc) - timedelta(days=2, hours=3)).isoformat()
    kept = replace(choose(1, [trial(PACKED, 2.0)]), remembered=at)
    text = str(_plan_of(kept))
    assert "2.00 (1.96–2.04) *" in text
    assert "* measured 2 days ago, by an earlier plan" in text


@pytest.mark.parametrize(
    ("predicted", "ceiling", "kept"), [(1.5, 3.0, ["ceiling"]), (2.5, 1.9, ["predicted"])]
)
def test_a_bound_below_the_measured_gain_is_not_shown(
    predicted: float, ceiling: float, kept: list[str]
) -> None:
    one = Whole(
        workload="x",
        verdict="faster",
        speed=speed(2.0),
        error_ratio=1.0,
        predicted=predicted,
        ceiling=ceiling,
    )
    found = whole_model._without_false_bounds(one)
    bounds = {"predicted": found.predicted, "ceiling": found.ceiling}
    assert [name for name, bound in bounds.items() if isinstance(bound, float)] == kept
