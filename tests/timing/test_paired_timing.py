"""`compare` end to end on a machine of paper: a clock and sides that tell drawn times."""

import collections
import math
from typing import Any

import numpy as np
import pytest
from tests.support.measured import measured
from tests.support.simulated_machine import PaperSide, SimulatedMachine

from torchweld.core.errors import NotMeasuredError, TorchweldError
from torchweld.core.not_measured import NotMeasured
from torchweld.timing import Comparison, compare, timing_rounds

OP_S = 5e-6
BLOCK_S = 3e-3


def wavy(now_s: float) -> float:
    return 1.0 + 0.4 * math.sin(8.0 * now_s)


def run(
    ratio: float, machine: SimulatedMachine | None = None, call_s: float = OP_S, **options: Any
) -> Any:
    """A candidate that is `ratio` times as fast as the baseline."""
    machine = machine or SimulatedMachine(noise=0.01, slowness=wavy)
    baseline, candidate = machine.side("a", call_s), machine.side("b", call_s / ratio)
    return compare(baseline, candidate, clock=machine.clock, **options)


@pytest.mark.parametrize(
    ("ratio", "verdict"),
    [(1.47, "faster"), (1 / 1.05, "slower"), (1 / 1.02, "slower"), (1.0, "same")],
)
@pytest.mark.parametrize("call_s", [OP_S, BLOCK_S])
def test_verdict_and_figures_on_a_drifting_machine(
    ratio: float, verdict: str, call_s: float
) -> None:
    result = run(ratio, call_s=call_s)
    assert result.verdict == verdict
    assert result.interval[0] <= ratio <= result.interval[1]
    assert result.reason
    assert result.rounds >= 20
    assert result.rounds == len(result.log_ratios) == len(result.control_log_ratios)
    assert result.speedup == pytest.approx(math.exp(np.median(result.log_ratios)))
    assert result.speedup == pytest.approx(ratio, rel=0.02)
    assert result.baseline_us / result.candidate_us == pytest.approx(ratio, rel=0.1)
    assert 0.0 < result.noise < 0.1


def test_the_seed_decides_everything() -> None:
    assert run(1.03, seed=5) == run(1.03, seed=5)
    assert run(1.03, seed=5) != run(1.03, seed=6)


def test_verdicts_are_right_again_and_again() -> None:
    counts: dict[float, collections.Counter[str]] = {}
    for ratio in (1.0, 1 / 1.05):
        verdicts = (
            run(
                ratio, SimulatedMachine(noise=0.05, slowness=wavy, seed=seed), BLOCK_S, seed=seed
            ).verdict
            for seed in range(60)
        )
        counts[ratio] = collections.Counter(verdicts)
    assert not counts[1.0]["faster"] + counts[1.0]["slower"]
    assert counts[1 / 1.05]["slower"] >= 0.95 * 60
    assert not counts[1 / 1.05]["faster"] + counts[1 / 1.05]["same"]


def test_a_clear_case_stops_early_and_a_noisy_one_uses_the_budget() -> None:
    assert run(1.5, SimulatedMachine(noise=0.01)).elapsed_s < 0.5
    noisy = run(1.0, SimulatedMachine(noise=0.5), BLOCK_S)
    assert noisy.verdict == "not measured"
    assert "too wide" in noisy.reason
    assert 2.9 < noisy.elapsed_s < 3.2


def test_the_budget_holds_however_slow_the_sides_are() -> None:
    result = run(1.0, SimulatedMachine(noise=0.01), call_s=0.4)
    assert result.verdict == "not measured"
    assert result.rounds < 20
    assert "1 of 20 rounds that a verdict needs fitted into 3 s" in result.reason
    assert result.wanted_s == 46
    assert str(result).endswith("; give budget_s=46")
    assert result.elapsed_s < 3.0 + 2 * 0.4 + 0.4
    enough = run(1.0, SimulatedMachine(noise=0.001), call_s=0.4, budget_s=46.0)
    assert enough.verdict == "same"


@pytest.mark.parametrize(("call_s", "calls_a_turn"), [(0.02, 2), (0.2, 1)])
def test_only_short_calls_are_preceded_by_an_untimed_one(call_s: float, calls_a_turn: int) -> None:
    machine = SimulatedMachine(noise=0.01)
    result = run(1.0, machine, call_s=call_s, budget_s=300 * call_s, control=False)
    assert result.rounds >= 20
    names = [name for name, _ in machine.log[-2 * 20 * calls_a_turn :]]
    turns = [set(names[i : i + calls_a_turn]) for i in range(0, len(names), calls_a_turn)]
    rounds = list(zip(turns[::2], turns[1::2], strict=True))
    assert all(first | second == {"a", "b"} and len(first) == 1 for first, second in rounds)


def test_without_a_single_round_nothing_is_claimed() -> None:
    result = run(2.0, SimulatedMachine(), call_s=10.0)
    assert (result.verdict, result.rounds, result.log_ratios) == ("not measured", 0, ())
    unknown = NotMeasured(result.reason)
    figures = (result.speedup, result.interval, result.baseline_us, result.noise, result.speed)
    assert set(figures) == {unknown}


def test_a_plain_difference_of_long_calls_needs_five_rounds() -> None:
    """Calls of half a second: twenty rounds would take longer than anybody waits."""
    result = run(3.0, SimulatedMachine(noise=0.1), call_s=0.5, budget_s=12.0)
    assert (result.verdict, result.speedup > 2) == ("faster", True)
    assert 5 <= result.rounds < 20
    assert "plain" in result.reason
    early = run(3.0, SimulatedMachine(noise=0.1), call_s=0.5, budget_s=60.0, enough=0.15)
    assert (early.verdict, early.rounds < 20) == ("faster", True)


def test_a_small_difference_of_long_calls_is_not_measured() -> None:
    result = run(1.1, SimulatedMachine(noise=0.1), call_s=0.5, budget_s=12.0)
    assert (result.verdict, result.speed) == ("not measured", NotMeasured(result.reason))


def test_more_rounds_than_the_fewest_can_be_demanded() -> None:
    assert run(1.5, SimulatedMachine(noise=0.001), BLOCK_S, min_rounds=50).rounds >= 50


def timed_blocks(machine: SimulatedMachine) -> list[tuple[str, int]]:
    """The blocks of the rounds in order, from the log: each follows one untimed call."""
    pairs = []
    for before, block in zip(machine.log, machine.log[1:], strict=False):
        if before == (block[0], 1) and block[1] > 1:
            pairs.append(block)
    return pairs


def test_every_round_times_each_side_and_the_baseline_twice_in_random_order() -> None:
    machine = SimulatedMachine(noise=0.05)
    result = run(1.0, machine)
    names = [name for name, _ in timed_blocks(machine)][-3 * result.rounds :]
    orders = {tuple(names[i : i + 3]) for i in range(0, len(names), 3)}
    assert orders == {("a", "a", "b"), ("a", "b", "a"), ("b", "a", "a")}


def test_without_control_the_baseline_runs_once_a_round() -> None:
    machine = SimulatedMachine(noise=0.05)
    result = run(1.5, machine, control=False)
    names = [name for name, _ in timed_blocks(machine)][-2 * result.rounds :]
    assert collections.Counter(names) == {"a": result.rounds, "b": result.rounds}
    assert result.noise == NotMeasured("the baseline was not timed against itself")
    assert result.control_log_ratios == ()
    assert result.verdict == "faster"


def test_blocks_are_long_enough_for_the_clock_and_no_longer() -> None:
    machine = SimulatedMachine()
    run(2.0, machine)
    calls = dict(timed_blocks(machine))
    assert calls["a"] == math.ceil(timing_rounds.BLOCK_S / OP_S)
    assert calls["b"] == math.ceil(timing_rounds.BLOCK_S / (OP_S / 2))
    machine = SimulatedMachine()
    run(1.0, machine, BLOCK_S)
    assert {count for _, count in machine.log} == {1}


def test_cold_calls_are_single_and_follow_a_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = SimulatedMachine(noise=0.01)
    flush = lambda: machine.log.append(("flush", 0))  # noqa: E731
    monkeypatch.setattr(timing_rounds, "CacheFlush", lambda: flush)
    result = run(1.5, machine, cold=True)
    first_calls, measured = machine.log[:2], machine.log[2:]
    assert first_calls == [("a", 1), ("b", 1)]
    assert set(measured[::2]) == {("flush", 0)}
    assert set(measured[1::2]) == {("a", 1), ("b", 1)}
    assert result.cold
    assert result.verdict == "faster"


class WarmingUp(PaperSide):
    """Twice as slow at first, and at its speed after some thirty calls."""

    calls_so_far = 0

    def time(self, calls: int) -> float:
        self.calls_so_far += calls
        slower = 1.0 + math.exp(-self.calls_so_far / 30.0)
        seconds = super().time(calls) * slower
        return seconds


def test_a_side_is_measured_only_when_warm() -> None:
    machine = SimulatedMachine(noise=0.001)
    baseline, candidate = machine.side("a", BLOCK_S), WarmingUp(machine, "b", BLOCK_S)
    result = compare(baseline, candidate, clock=machine.clock)
    assert result.verdict == "same"
    assert min(result.log_ratios) > -0.05


class Quickening(PaperSide):
    """Gets faster for ever."""

    def time(self, calls: int) -> float:
        self.call_s *= 0.9
        return super().time(calls)


def test_warming_up_ends_for_a_side_that_never_settles() -> None:
    machine = SimulatedMachine()
    result = compare(machine.side("a", 1e-2), Quickening(machine, "b", 1e-2), clock=machine.clock)
    assert result.elapsed_s < 3.2


class Preempted(PaperSide):
    """Loses the processor in a share of its blocks, which then take ten times as long."""

    share = 0.0
    preempted = False

    def time(self, calls: int) -> float:
        self.preempted = bool(self.machine.rng.random() < self.share)
        seconds = super().time(calls)
        if self.preempted:
            self.machine.now_s += 9.0 * seconds
            seconds *= 10.0
        return seconds


def disturbed(share: float, seed: int = 0) -> Comparison:
    machine = SimulatedMachine(noise=0.002, seed=seed)
    baseline, candidate = Preempted(machine, "a", BLOCK_S), Preempted(machine, "b", BLOCK_S)
    baseline.share = candidate.share = share
    return compare(baseline, candidate, clock=machine.clock)


def test_preempted_blocks_are_never_used() -> None:
    result = disturbed(0.2)
    assert result.discarded > 0
    assert result.verdict == "same"
    assert max(abs(value) for value in result.log_ratios) < 0.02


def test_a_machine_that_is_taken_away_is_given_up_early() -> None:
    result = disturbed(1.0)
    assert (result.verdict, result.rounds) == ("not measured", 0)
    assert "ran undisturbed" in result.reason
    assert result.elapsed_s < 2.0


def test_a_control_that_differs_is_not_measured() -> None:
    """Every second block of the baseline is slow, whichever of the two it serves."""

    class Alternating(PaperSide):
        blocks = 0

        def time(self, calls: int) -> float:
            self.blocks += calls > 1
            return super().time(calls) * (1.5 if self.blocks % 2 else 1.0)

    machine = SimulatedMachine(noise=0.001)
    baseline, candidate = Alternating(machine, "a", OP_S), machine.side("b", OP_S)
    result = compare(baseline, candidate, clock=machine.clock)
    assert result.verdict == "not measured"
    assert measured(result.noise) > 0.3


def test_several_candidates_give_a_list_in_order() -> None:
    machine = SimulatedMachine(noise=0.02)
    sides = [machine.side("side", BLOCK_S / ratio) for ratio in (1.0, 2.0, 1.0, 0.8)]
    results = compare(*sides, clock=machine.clock, names=["eager", "b", "c", "d"])
    assert [result.candidate for result in results] == ["b", "c", "d"]
    assert [result.verdict for result in results] == ["faster", "same", "slower"]
    assert {result.baseline for result in results} == {"eager"}


class Shaky(PaperSide):
    def time(self, calls: int) -> float:
        return super().time(calls) * math.exp(0.2 * self.machine.rng.standard_normal())


def test_a_settled_candidate_is_timed_no_more() -> None:
    machine = SimulatedMachine(noise=0.01)
    baseline, clear = machine.side("a", BLOCK_S), machine.side("b", BLOCK_S / 2)
    first, second = compare(baseline, clear, Shaky(machine, "c", BLOCK_S), clock=machine.clock)
    assert (first.candidate, second.candidate) == ("candidate 1", "candidate 2")
    assert first.rounds < second.rounds
    after = machine.log[max(i for i, (name, _) in enumerate(machine.log) if name == "b") :]
    assert collections.Counter(name for name, _ in after)["c"] >= second.rounds - first.rounds


class Failing(PaperSide):
    """Raises at the given call of `time`."""

    fails_at = 0
    count = 0

    def time(self, calls: int) -> float:
        self.count += 1
        if self.count > self.fails_at:
            raise RuntimeError("out of luck")
        return super().time(calls)


@pytest.mark.parametrize("fails_at", [0, 3, 50])
@pytest.mark.parametrize(("position", "name"), [(0, "eager"), (1, "fused")])
def test_a_side_that_raises_is_named_and_nothing_is_returned(
    fails_at: int, position: int, name: str
) -> None:
    machine = SimulatedMachine(noise=0.05)
    failing = Failing(machine, "b", OP_S)
    failing.fails_at = fails_at
    sides = [machine.side("a", OP_S)]
    sides.insert(position, failing)
    with pytest.raises(NotMeasuredError, match=f"{name} raised RuntimeError .* out of luck"):
        compare(*sides, clock=machine.clock, names=("eager", "fused"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_rounds": 5}, "min_rounds is 5; it must be at least 20"),
        ({"budget_s": 0.0}, "budget_s is 0.0"),
        ({"budget_s": math.inf}, "budget_s is inf"),
        ({"threshold": -0.1}, "threshold is -0.1"),
        ({"precision": math.nan}, "precision is nan"),
        ({"names": ["a"]}, "must be 2 different names"),
        ({"names": ["a", "a"]}, "must be 2 different names"),
        ({"names": "ab"}, "must be 2 different names"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(TorchweldError, match=message):
        run(1.0, **options)


def test_real_callables_on_the_real_clock() -> None:
    result = compare(lambda: sum(range(400)), lambda: sum(range(10)), budget_s=0.2, threads=1)
    assert result.verdict in ("faster", "same", "slower", "not measured")
    assert result.threads == 1
    assert result.rounds == len(result.log_ratios)
    assert Comparison.from_json(result.to_json()) == result
