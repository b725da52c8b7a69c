"""Which of the ways that were tried is chosen, and what that promises for the whole."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

import torchweld as tw
from torchweld.decisions import Choice
from torchweld.models import MODELS
from torchweld.planning import timing, tuning, whole
from torchweld.planning.plan import Planned, Trial, Tuning
from torchweld.planning.tuning import choose

NATURAL, PACKED = Choice(backend="cpu"), Choice(backend="cpu", packed=True)
PLAIN = Choice(backend="torch")


def trial(choice: Choice, speedup: float, verdict: str = "faster", copied: int = 0) -> Trial:
    interval = (speedup * 0.98, speedup * 1.02)
    return Trial(
        choice=choice,
        verified=True,
        verdict=verdict,
        speedup=speedup,
        interval=interval,
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
    def timed(ratios: Sequence[float], copied: int) -> timing.Timed:
        speedup = math.exp(statistics.median(ratios))
        found = SimpleNamespace(log_ratios=tuple(ratios), speedup=speedup)
        return timing.Timed(comparison=cast(Any, found), copied_bytes=copied)

    packed, natural = timed([1.1, 0.1, 0.6], 8), timed([1.0, 0.0, 0.5], 0)
    both = [packed, natural]
    assert tuning._copy_gain(packed, both) == pytest.approx(math.exp(0.1))
    assert tuning._copy_gain(natural, both) == 0.0
    assert tuning._copy_gain(packed, [packed]) == 0.0
    assert tuning._copy_gain(packed, [packed, timed([1.0], 0)]) == 0.0


def test_what_is_wrong_or_not_measured_is_never_chosen() -> None:
    wrong = replace(trial(PACKED, 9.0), verified=False, verdict="wrong", reason="row 3")
    found = choose(1, [wrong, trial(NATURAL, 9.0, "not measured"), trial(PLAIN, 0.5, "slower")])
    assert found.chosen is None
    assert "cpu packed: wrong (row 3)" in found.reason


def test_what_is_far_behind_at_first_look_is_left_out() -> None:
    class Side:
        def __init__(self, seconds: float) -> None:
            self.seconds = seconds

        def time(self, calls: int) -> float:
            return self.seconds * calls

    sides: Any = [Side(1.0), Side(1.2), Side(2.0)]
    assert timing._behind(sides, ["a", "b", "c"]) == {"c": "2.0 times as long as a at first look"}
    assert timing._behind(sides[:1], ["a"]) == {}


@pytest.mark.parametrize(("whole_us", "saved_us"), [(1000.0, 150.0), (100.0, 75.0)])
def test_blocks_save_no_more_than_their_share_of_the_whole(
    whole_us: float, saved_us: float
) -> None:
    """Two calls of 100 µs, four times as fast, in a whole that takes longer than they, or less."""
    model, inputs = MODELS["policy"].build()
    (block,) = tw.find(model, inputs)
    best = replace(trial(PACKED, 4.0), original_us=100.0)
    made = Tuning(rows=1, count=2, trials=(best,), chosen=PACKED, reason="")
    found = whole.saved_us([Planned(block=block, tunings=(made,))], whole_us)
    assert found == pytest.approx(saved_us)
