"""The run of a paired comparison: sides and settings in, one `Comparison` per candidate out.

Every round times each side once, in random order, as a short block of calls. What disturbs the
machine for longer than a round hits all sides alike; what disturbs it for less becomes noise, which
the random order averages out. The baseline runs twice per round; the second run is the control. The
rounds are judged at a few fixed shares of the budget, and candidates with a settled verdict drop
out.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from torchweld.core.argument_checks import check_flags, check_number, check_whole, misfit
from torchweld.core.errors import TorchweldError
from torchweld.core.not_measured import NotMeasured
from torchweld.machine.machine_load import LoadMeter
from torchweld.timing.comparison import Comparison, Verdict
from torchweld.timing.timed_sides import CacheFlush, Clock, Side, seconds_of
from torchweld.timing.timing_statistics import Floats, complete_rounds, log_ratios
from torchweld.timing.timing_verdicts import (
    ALPHA,
    EARLY_ALPHA,
    EARLY_LOOKS,
    FEW_ROUNDS,
    LAST_ALPHA,
    PairedVerdict,
    judge,
    judge_few,
)

FEWEST_ROUNDS = 20
MOST_ROUNDS = 5_000

# Short blocks: both sides of a pair then meet the same machine, and few are preempted. For a 3 us
# op on a busy virtual machine the error of a 1 s run was 0.1 % with 0.15 ms, 0.4 % with 1.4 ms.
BLOCK_S = 200e-6
_RESOLUTIONS_PER_BLOCK = 1_000
# A call that takes this long fills the caches itself, in about a hundredth of its time.
_FILLS_CACHES_S = 0.1
_TRIES_PER_BLOCK = 2
# If others use this much of the machine, a short block that took longer than this many times the
# best is timed again too, and the best of its tries counts: a thread that waits for a core at a
# barrier does not count as preempted. This holds for all sides, so none gains by it. A long block
# meets some of that whenever it runs.
_BUSY_CORES, _BUSY_TRIES, _DISTURBED = 0.3, 4, 1.3
_SHORT_S = 2e-3

_WARM_UP_SHARE = 0.2
_WARM_UP_WINDOW = 5
_FLAT_WITHIN = 0.0025

# From this share of the budget on, a run that will not reach half of the fewest rounds is given up.
_HOPELESS_FROM = 0.125


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How to compare; see `compare`. `budget_s` is for the whole run, `precision` is set."""

    min_rounds: int
    budget_s: float
    threshold: float
    precision: float
    enough: float | None
    cold: bool
    seed: int
    control: bool
    threads: int
    clock: Clock

    def __post_init__(self) -> None:
        check_flags("compare", cold=self.cold, control=self.control)
        check_whole("compare", "seed", self.seed, least=0)
        check_whole("compare", "threads", self.threads, least=1)
        check_whole("compare", "min_rounds", self.min_rounds, least=1)
        if self.enough is not None:
            check_number("compare", "enough", self.enough, above=0)
        if not callable(self.clock):
            raise misfit("compare", "clock", self.clock, "a function that gives seconds")
        if self.min_rounds < FEWEST_ROUNDS:
            raise TorchweldError(
                f"min_rounds is {self.min_rounds}; it must be at least {FEWEST_ROUNDS}, since "
                "fewer rounds give no reliable interval; raise it, or leave it out"
            )
        for name in ("budget_s", "threshold", "precision"):
            value = getattr(self, name)
            check_number("compare", name, value, above=0)


@dataclass(frozen=True, kw_only=True)
class NamedSide:
    name: str
    side: Side


@dataclass(frozen=True, kw_only=True)
class _Column:
    """A side, the number of calls in a block of it, and what they take.

    call_s: the best time of a call; cost_s: the time of a block, including untimed parts.
    """

    name: str
    side: Side
    calls: int
    call_s: float
    cost_s: float


class PairedRun:
    """One run, first calls and warm-up at construction.

    Columns of the table of times: the baseline, the control if any, the candidates.
    """

    def __init__(self, sides: Sequence[NamedSide], settings: Settings) -> None:
        self._settings = settings
        self._flush = CacheFlush() if settings.cold else None
        self._begun_s = settings.clock()
        # Compilation and first allocations do not count towards the budget.
        first_s = [seconds_of(named.side, 1, named.name) for named in sides]
        self._deadline_s = settings.clock() + settings.budget_s
        limit_s = _WARM_UP_SHARE * settings.budget_s / len(sides)
        meter = LoadMeter()
        baseline, *candidates = (
            self._warm_up(named, limit_s, call_s)
            for named, call_s in zip(sides, first_s, strict=True)
        )
        self._busy = _is_busy(meter, settings.clock)
        self._columns = [baseline, *([baseline] if settings.control else []), *candidates]
        self._reference = [0, 1] if settings.control else [0]
        self._rows: list[list[float]] = []
        self._rounds_from_s = settings.clock()

    def results(self) -> list[Comparison]:
        """Times rounds until every candidate has its verdict or the budget is spent."""
        clock = self._settings.clock
        order = np.random.default_rng(self._settings.seed)
        candidates = range(len(self._reference), len(self._columns))
        found: dict[int, Comparison] = {}
        start_s = self._rounds_from_s
        window_s = max(self._deadline_s - start_s, 0.0)
        looks = 0
        while len(found) < len(candidates):
            active = [column for column in candidates if column not in found]
            round_start_s = clock()
            row = self._round(order.permutation([*self._reference, *active]).tolist())
            if row is not None:
                self._rows.append(row)
            now_s = clock()
            next_end_s = now_s + (now_s - round_start_s)
            last = next_end_s > self._deadline_s or len(self._rows) >= MOST_ROUNDS
            share = (now_s - start_s) / window_s if window_s > 0.0 else 1.0
            passed = sum(share >= look for look in EARLY_LOOKS)
            if not last and passed == looks:
                continue
            looks = passed
            for column in active:
                comparison = self._look(column, last, share)
                if comparison is not None:
                    found[column] = comparison
        return [found[column] for column in candidates]

    def _look(self, column: int, last: bool, share: float) -> Comparison | None:
        """The comparison for one candidate, or None if more rounds are needed."""
        settings = self._settings
        seconds_RS = np.array(self._rows).reshape(-1, len(self._columns))
        used_RS = complete_rounds(seconds_RS, [*self._reference, column])
        rounds, discarded = len(used_RS), len(seconds_RS) - len(used_RS)
        ratios = log_ratios(used_RS, column)
        control = log_ratios(used_RS, 1) if settings.control else None
        if rounds < settings.min_rounds:
            few = judge_few(ratios, control, threshold=settings.threshold, enough=settings.enough)
            hopeless = share >= _HOPELESS_FROM and rounds / share < FEW_ROUNDS / 2
            if last or hopeless or (few is not None and few.settled):
                return self._comparison(column, used_RS, discarded, few)
            return None
        judgement = judge(
            ratios,
            control,
            threshold=settings.threshold,
            precision=settings.precision,
            enough=settings.enough,
            alpha=LAST_ALPHA if last else EARLY_ALPHA,
            seed=settings.seed,
        )
        if not (last or judgement.settled):
            return None
        return self._comparison(column, used_RS, discarded, judgement)

    def _round(self, columns: Sequence[int]) -> list[float] | None:
        """Seconds per call of each column; NaN if it was not timed, or was disturbed.

        None if the budget ends meanwhile: a 3 ms call that is preempted at every barrier can take
        seconds.
        """
        row = [math.nan] * len(self._columns)
        for index in columns:
            column = self._columns[index]
            if self._settings.clock() > self._deadline_s:
                return None
            row[index] = self._tried_s(column) / column.calls
        return row

    def _tried_s(self, column: _Column) -> float:
        """The seconds of a block, timed again if it was disturbed; NaN if it is every time."""
        best_s = math.nan
        usual_s = _DISTURBED * column.call_s * column.calls
        again = self._busy and usual_s < _SHORT_S
        for _ in range(_BUSY_TRIES if again else _TRIES_PER_BLOCK):
            seconds = self._block_s(column.side, column.calls, column.name, column.call_s)
            if not getattr(column.side, "preempted", False):
                best_s = min(seconds, best_s if best_s == best_s else seconds)
                if not again or seconds <= usual_s:
                    break
            if self._settings.clock() > self._deadline_s:
                break
        return best_s

    def _block_s(self, side: Side, calls: int, name: str, call_s: float) -> float:
        """The seconds of one block, after emptying the caches or filling them with its own data.

        Another side has used them since. After an untimed call it does not matter which side ran
        before; where a call takes long, `call_s`, it does not matter anyway.
        """
        if self._flush is not None:
            self._flush()
        elif call_s < _FILLS_CACHES_S:
            seconds_of(side, 1, name)
        return seconds_of(side, calls, name)

    def _warm_up(self, named: NamedSide, limit_s: float, call_s: float) -> _Column:
        """Runs a side until its best time stops falling, and finds how many calls fill a block."""
        clock = self._settings.clock
        end_s = clock() + limit_s
        block_s = max(BLOCK_S, _RESOLUTIONS_PER_BLOCK * _resolution_s(clock))
        calls, best_s = 1, math.inf
        while True:
            start_s = clock()
            blocks_s: list[float] = []
            while len(blocks_s) < _WARM_UP_WINDOW and (clock() < end_s or not blocks_s):
                blocks_s.append(self._block_s(named.side, calls, named.name, call_s))
                call_s = blocks_s[-1] / calls
            cost_s = (clock() - start_s) / len(blocks_s)
            window_s = min(blocks_s) / calls
            flat = window_s >= best_s * (1.0 - _FLAT_WITHIN)
            best_s = min(best_s, window_s)
            wanted = 1 if self._settings.cold else max(1, math.ceil(block_s / best_s))
            # Blocks far shorter than the final ones do not say whether those are flat.
            if (flat and wanted <= 2 * calls) or clock() >= end_s:
                return _Column(
                    name=named.name, side=named.side, calls=wanted, call_s=best_s, cost_s=cost_s
                )
            calls = min(wanted, 10 * calls)

    def _comparison(
        self, column: int, used_RS: Floats, discarded: int, judgement: PairedVerdict | None
    ) -> Comparison:
        """The public result; without a judgement (too few rounds) it is "not measured"."""
        settings = self._settings
        rounds = len(used_RS)
        ratios = log_ratios(used_RS, column)
        control = log_ratios(used_RS, 1) if settings.control else np.empty(0)
        verdict: Verdict = "not measured"
        reason, more_s = self._too_few(rounds, discarded)
        wanted_s: int | None = more_s
        unknown = NotMeasured(reason)
        speedup: float | NotMeasured = unknown
        interval: tuple[float, float] | NotMeasured = unknown
        noise: float | NotMeasured = unknown
        times_us: list[float | NotMeasured] = [unknown, unknown]
        if judgement is not None:
            verdict, reason = judgement.verdict, judgement.reason
            wanted_s = self._more_s() if verdict == "not measured" else None
            speedup = math.exp(judgement.log_speedup)
            interval = math.exp(judgement.log_interval[0]), math.exp(judgement.log_interval[1])
            noise = NotMeasured("the baseline was not timed against itself")
            if judgement.log_noise is not None:
                noise = math.expm1(judgement.log_noise)
            times_us = [1e6 * float(np.median(used_RS[:, side])) for side in (0, column)]
        return Comparison(
            baseline=self._columns[0].name,
            candidate=self._columns[column].name,
            verdict=verdict,
            reason=reason,
            speedup=speedup,
            interval=interval,
            confidence=1.0 - ALPHA,
            rounds=rounds,
            discarded=discarded,
            baseline_us=times_us[0],
            candidate_us=times_us[1],
            noise=noise,
            threshold=settings.threshold,
            cold=settings.cold,
            threads=settings.threads,
            seed=settings.seed,
            elapsed_s=settings.clock() - self._begun_s,
            log_ratios=tuple(ratios.tolist()),
            control_log_ratios=tuple(control.tolist()),
            wanted_s=wanted_s,
        )

    def _more_s(self) -> int:
        """Per candidate: intervals are half as wide after four times the rounds."""
        candidates = len(self._columns) - len(self._reference)
        return math.ceil(4 * self._settings.budget_s / candidates)

    def _too_few(self, rounds: int, discarded: int) -> tuple[str, int]:
        """Why there is no verdict, and the seconds per candidate that may give one."""
        needed = self._settings.min_rounds
        if discarded > rounds:
            return (
                f"only {rounds} of {rounds + discarded} rounds ran undisturbed, and {needed} are "
                "needed: other processes, or more threads than cores, took the processor away; "
                "stop them, or lower the number of threads"
            ), self._more_s()
        candidates = len(self._columns) - len(self._reference)
        allowed_s = self._settings.budget_s / candidates
        round_s = sum(column.cost_s for column in self._columns)
        if rounds:  # what they really took: more than their blocks, where others run too
            spent_s = self._settings.clock() - self._rounds_from_s
            round_s = max(round_s, spent_s / (rounds + discarded))
        enough_s = max(1.5 * needed * round_s / (1.0 - _WARM_UP_SHARE) / candidates, 2 * allowed_s)
        why = (
            f"{rounds} of {needed} rounds that a verdict needs fitted into {allowed_s:.3g} s, and "
            "they show no plain difference"
        )
        return why, math.ceil(enough_s)


def _is_busy(meter: LoadMeter, clock: Clock) -> bool:
    """Whether others use much of the machine; not known with an injected clock."""
    busy = meter.busy_cores()
    real = clock is time.perf_counter
    return real and not isinstance(busy, NotMeasured) and busy > _BUSY_CORES


def _resolution_s(clock: Clock) -> float:
    """The clock's step, if it is known; an injected clock is assumed to be fine enough."""
    return time.get_clock_info("perf_counter").resolution if clock is time.perf_counter else 0.0
