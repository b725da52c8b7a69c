"""`compare`: callables or sides in, one `Comparison` a candidate out.

Every round times each side once, in random order, as a short block of calls: what the machine does
for longer than a round hits all sides alike, and the random order turns what it does within one
into noise that averages out. The baseline runs twice in a round; the second is the control.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
import torch

from torchweld.errors import TorchweldError
from torchweld.measuring.comparison import Comparison
from torchweld.measuring.sides import CacheFlush, Clock, Side, as_side, seconds_of
from torchweld.measuring.statistics import Floats, complete_rounds, log_ratios
from torchweld.measuring.verdicts import (
    ALPHA,
    EARLY_ALPHA,
    EARLY_LOOKS,
    LAST_ALPHA,
    Judgement,
    judge,
)

FEWEST_ROUNDS = 20
MOST_ROUNDS = 5_000

# Short blocks: both sides of a pair then meet the same machine, and few are preempted. For a 3 us
# op on a busy virtual machine the error of a 1 s run was 0.1 % with 0.15 ms, 0.4 % with 1.4 ms.
BLOCK_S = 200e-6
_RESOLUTIONS_PER_BLOCK = 1_000
_TRIES_PER_BLOCK = 2

_WARM_UP_SHARE = 0.2
_WARM_UP_WINDOW = 5
_FLAT_WITHIN = 0.02

# From this share of the budget on, a run that will not see half the rounds it needs is given up.
_HOPELESS_FROM = 0.125


@dataclass(frozen=True, kw_only=True)
class _Settings:
    min_rounds: int
    budget_s: float
    threshold: float
    precision: float
    cold: bool
    seed: int
    threads: int
    clock: Clock

    def __post_init__(self) -> None:
        if self.min_rounds < FEWEST_ROUNDS:
            raise TorchweldError(
                f"min_rounds is {self.min_rounds}, and must be at least {FEWEST_ROUNDS}: fewer "
                "rounds give no interval to rely on; raise it, or leave it out"
            )
        for name in ("budget_s", "threshold", "precision"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0.0):
                raise TorchweldError(
                    f"{name} is {value}, and must be a finite number above 0; leave it out for "
                    "the default"
                )


@dataclass(frozen=True, kw_only=True)
class _Timed:
    """A side with its name and the number of calls in one of its blocks."""

    name: str
    side: Side
    calls: int


@overload
def compare(
    baseline: Any,
    candidate: Any,
    *,
    names: Sequence[str] | None = None,
    min_rounds: int = FEWEST_ROUNDS,
    budget_s: float = 3.0,
    threshold: float = 0.01,
    precision: float | None = None,
    cold: bool = False,
    seed: int = 0,
    control: bool = True,
    threads: int | None = None,
    clock: Clock = time.perf_counter,
) -> Comparison: ...


@overload
def compare(
    baseline: Any,
    candidate: Any,
    second: Any,
    /,
    *more: Any,
    names: Sequence[str] | None = None,
    min_rounds: int = FEWEST_ROUNDS,
    budget_s: float = 3.0,
    threshold: float = 0.01,
    precision: float | None = None,
    cold: bool = False,
    seed: int = 0,
    control: bool = True,
    threads: int | None = None,
    clock: Clock = time.perf_counter,
) -> list[Comparison]: ...


def compare(
    baseline: Any,
    candidate: Any,
    *more: Any,
    names: Sequence[str] | None = None,
    min_rounds: int = FEWEST_ROUNDS,
    budget_s: float = 3.0,
    threshold: float = 0.01,
    precision: float | None = None,
    cold: bool = False,
    seed: int = 0,
    control: bool = True,
    threads: int | None = None,
    clock: Clock = time.perf_counter,
) -> Comparison | list[Comparison]:
    """Is the candidate faster than the baseline, and by how much?

    Each side is a callable without arguments, or an object with `time(calls) -> seconds`. One
    candidate gives a `Comparison`, several give a list of them, in order, from shared rounds.

    names:      of the baseline and each candidate, for the sentences
    min_rounds: the fewest rounds a verdict may rest on, at least 20
    budget_s:   seconds for each candidate, warm-up included, the first call of each side not; the
                run ends earlier once everything is settled
    threshold:  the smallest change that counts as one
    precision:  the interval has to lie within this of 1 for "same"; 2 * threshold if left out
    cold:       empty the caches before every call and time calls singly, so that weights come from
                memory; otherwise they are as warm as the previous call leaves them
    seed:       of the order of the sides and of the bootstrap
    control:    time the baseline against itself too, as the noise floor
    threads:    what to report as the number of threads, where it is not torch's of this process
    clock:      seconds, from any origin; for callables and for the budget
    """
    things = (baseline, candidate, *more)
    settings = _Settings(
        min_rounds=min_rounds,
        budget_s=budget_s * (len(things) - 1),
        threshold=threshold,
        precision=2.0 * threshold if precision is None else precision,
        cold=cold,
        seed=seed,
        threads=torch.get_num_threads() if threads is None else threads,
        clock=clock,
    )
    labels = _labels(names, len(things))
    sides = [as_side(thing, label, clock) for thing, label in zip(things, labels, strict=True)]
    results = _Run(sides, labels, control, settings).results()
    return results if more else results[0]


class _Run:
    """One run of `compare`. Columns of the table of times: baseline, control if any, candidates."""

    def __init__(
        self, sides: list[Side], labels: list[str], control: bool, settings: _Settings
    ) -> None:
        self._settings = settings
        self._flush = CacheFlush() if settings.cold else None
        self._begun_s = settings.clock()
        for side, label in zip(sides, labels, strict=True):
            # Compilation and first allocations belong to nobody's budget.
            seconds_of(side, 1, label)
        self._deadline_s = settings.clock() + settings.budget_s
        limit_s = _WARM_UP_SHARE * settings.budget_s / len(sides)
        timed = [
            _Timed(name=label, side=side, calls=self._warm_up(side, label, limit_s))
            for side, label in zip(sides, labels, strict=True)
        ]
        self._columns = [timed[0], *([timed[0]] if control else []), *timed[1:]]
        self._reference = [0, 1] if control else [0]
        self._rows: list[list[float]] = []

    def results(self) -> list[Comparison]:
        """Times rounds until every candidate has its verdict or the budget is spent."""
        settings, clock = self._settings, self._settings.clock
        order = np.random.default_rng(settings.seed)
        candidates = range(len(self._reference), len(self._columns))
        found: dict[int, Comparison] = {}
        start_s = clock()
        window_s = max(self._deadline_s - start_s, 0.0)
        looks = 0
        while len(found) < len(candidates):
            active = [*self._reference, *(c for c in candidates if c not in found)]
            round_start_s = clock()
            self._rows.append(self._round(order.permutation(active).tolist()))
            now_s = clock()
            elapsed_s = now_s - start_s
            last = (
                now_s + (now_s - round_start_s) > self._deadline_s or len(self._rows) >= MOST_ROUNDS
            )
            due = looks < len(EARLY_LOOKS) and elapsed_s >= EARLY_LOOKS[looks] * window_s
            if not (last or due):
                continue
            while looks < len(EARLY_LOOKS) and elapsed_s >= EARLY_LOOKS[looks] * window_s:
                looks += 1
            share = elapsed_s / window_s if window_s > 0.0 else 1.0
            for column in active[len(self._reference) :]:
                comparison = self._look(column, last, share)
                if comparison is not None:
                    found[column] = comparison
        return [found[column] for column in candidates]

    def _look(self, column: int, last: bool, share: float) -> Comparison | None:
        """The comparison for one candidate, or None if more rounds are to tell."""
        settings = self._settings
        seconds_RS = np.array(self._rows)
        used_RS = complete_rounds(seconds_RS, [*self._reference, column])
        rounds = len(used_RS)
        if rounds < settings.min_rounds:
            expected = rounds / share
            hopeless = share >= _HOPELESS_FROM and expected < settings.min_rounds / 2
            if not (last or hopeless):
                return None
            reason = self._too_few(rounds, len(seconds_RS))
            return self._comparison(column, used_RS, len(seconds_RS), None, reason)
        judgement = judge(
            log_ratios(used_RS, column),
            log_ratios(used_RS, 1) if len(self._reference) == 2 else None,
            threshold=settings.threshold,
            precision=settings.precision,
            alpha=LAST_ALPHA if last else EARLY_ALPHA,
            seed=settings.seed,
        )
        if not (last or judgement.settled):
            return None
        return self._comparison(column, used_RS, len(seconds_RS), judgement, judgement.reason)

    def _round(self, columns: Sequence[int]) -> list[float]:
        """Seconds per call of each column; NaN where it was not timed, or was disturbed."""
        row = [math.nan] * len(self._columns)
        for column in columns:
            timed = self._columns[column]
            for _ in range(_TRIES_PER_BLOCK):
                if self._flush is not None:
                    self._flush()
                else:
                    # Another side has used the caches since: an untimed call puts that right, so
                    # that no side gains from who ran before it.
                    seconds_of(timed.side, 1, timed.name)
                seconds = seconds_of(timed.side, timed.calls, timed.name)
                if not getattr(timed.side, "preempted", False):
                    row[column] = seconds / timed.calls
                    break
        return row

    def _warm_up(self, side: Side, name: str, limit_s: float) -> int:
        """Runs a side until its best time stops falling; returns the calls that fill a block."""
        clock = self._settings.clock
        end_s = clock() + limit_s
        block_s = max(BLOCK_S, _RESOLUTIONS_PER_BLOCK * _resolution_s(clock))
        calls, best_s = 1, math.inf
        while clock() < end_s:
            window_s = math.inf
            for _ in range(_WARM_UP_WINDOW):
                if self._flush is not None:
                    self._flush()
                window_s = min(window_s, seconds_of(side, calls, name) / calls)
                if clock() >= end_s:
                    break
            flat = window_s >= best_s * (1.0 - _FLAT_WITHIN)
            best_s = min(best_s, window_s)
            wanted = 1 if self._settings.cold else max(1, math.ceil(block_s / best_s))
            # The first windows are short ones, and tell nothing of a longer block's flatness.
            if flat and wanted <= 2 * calls:
                return wanted
            calls = max(calls, min(wanted, 10 * calls))
        return calls

    def _too_few(self, rounds: int, timed: int) -> str:
        settings = self._settings
        elapsed_s = settings.clock() - self._begun_s
        if timed - rounds > timed / 2:
            return (
                f"only {rounds} of {timed} rounds ran undisturbed, and {settings.min_rounds} are "
                "needed: other processes, or more threads than cores, took the processor away; "
                "stop them, or lower the number of threads"
            )
        window_s = self._deadline_s - self._begun_s
        enough_s = math.ceil(1.5 * settings.min_rounds * elapsed_s / max(timed, 1))
        return (
            f"{rounds} rounds fitted into {window_s:.1f} s, and {settings.min_rounds} are needed; "
            f"allow budget_s={enough_s} or more"
        )

    def _comparison(
        self,
        column: int,
        used_RS: Floats,
        timed: int,
        judgement: Judgement | None,
        reason: str,
    ) -> Comparison:
        """The public result; without a judgement it is "not measured"."""
        settings = self._settings
        rounds = len(used_RS)
        ratios = log_ratios(used_RS, column)
        control = log_ratios(used_RS, 1) if len(self._reference) == 2 else np.empty(0)
        if judgement is None:
            log_speedup = float(np.median(ratios)) if rounds else math.nan
            low, high, noise = -math.inf, math.inf, None
        else:
            log_speedup = judgement.log_speedup
            (low, high), noise = judgement.log_interval, judgement.log_noise
        medians_s = np.median(used_RS[:, [0, column]], axis=0) if rounds else (math.nan, math.nan)
        return Comparison(
            baseline=self._columns[0].name,
            candidate=self._columns[column].name,
            verdict=judgement.verdict if judgement else "not measured",
            reason=reason,
            speedup=math.exp(log_speedup),
            interval=(math.exp(low), math.exp(high)),
            confidence=1.0 - ALPHA,
            rounds=rounds,
            discarded=timed - rounds,
            baseline_us=float(medians_s[0]) * 1e6,
            candidate_us=float(medians_s[1]) * 1e6,
            noise=math.expm1(noise) if noise is not None else None,
            threshold=settings.threshold,
            cold=settings.cold,
            threads=settings.threads,
            seed=settings.seed,
            elapsed_s=settings.clock() - self._begun_s,
            log_ratios=tuple(ratios.tolist()),
            control_log_ratios=tuple(control.tolist()),
        )


def _labels(names: Sequence[str] | None, count: int) -> list[str]:
    if names is None:
        numbered = [f"candidate {number}" for number in range(1, count)]
        return ["baseline", *(numbered if count > 2 else ["candidate"])]
    if isinstance(names, str) or len(names) != count or len(set(names)) != count:
        raise TorchweldError(
            f"names is {names!r}, and must be {count} different ones, the baseline's first; "
            "leave it out to get baseline and candidate"
        )
    return list(names)


def _resolution_s(clock: Clock) -> float:
    """The clock's step, where it is known; an injected clock is taken to be fine enough."""
    return time.get_clock_info("perf_counter").resolution if clock is time.perf_counter else 0.0
