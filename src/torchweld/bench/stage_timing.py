"""Times what is prepared on a stage: paired comparisons, single calls, several callers at once."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

from torchweld.bench.bench_stages import Stage
from torchweld.timing import Comparison, Side, compare

MIN_ROUNDS = 20
# A cell whose rounds would take longer is not measured; it says so, with the time it would need.
# Eager's steps in 16 bits take a second each, on CPUs without instructions for them.
MOST_CELL_S, MOST_TRAINING_S = 120.0, 400.0
# Windows of several callers: long compared with starting threads, short compared with drifts of the
# machine.
WINDOW_S = 0.02

# Single calls: in turns that are long enough to be past the other side's caches, and short enough
# for both to meet the same machine; no more than these in all.
TURN_S = 0.02
MOST_TURN_CALLS = 200
MOST_CALLS = 4000


def paired(
    sides: Sequence[Side],
    names: Sequence[str],
    *,
    seconds: float,
    threads: int,
    seed: int,
    patience: int = 1,
    most_s: float | None = None,
) -> dict[str, Comparison]:
    """The first side against each other one, in the time that 20 rounds need at least.

    `seconds` is for all of them together, and is taken `patience` times; `most_s` is the limit of
    what rounds may need.
    """
    others = len(sides) - 1
    if others < 1:
        return {}
    visits_s = 0.0
    for side in (*sides, sides[0]):
        side.time(1)
        begun_s = time.perf_counter()
        side.time(1)
        visits_s += time.perf_counter() - begun_s
    # A round visits everybody twice, once untimed; some of the time goes to the warm-up.
    needed_s = 1.5 * MIN_ROUNDS * 2 * visits_s
    if most_s is not None and needed_s > most_s:
        needed_s = seconds
    found = compare(
        *sides,
        names=names,
        min_rounds=MIN_ROUNDS,
        budget_s=patience * max(seconds, needed_s) / others,
        seed=seed,
        threads=threads,
    )
    results = found if isinstance(found, list) else [found]
    return dict(zip(names[1:], results, strict=True))


class CallersSide:
    """Several callers of one side; a call's time is that between two calls that finish."""

    def __init__(self, stage: Stage, name: str, callers: int) -> None:
        self._stage, self._name, self._callers = stage, name, callers

    def time(self, calls: int) -> float:
        return calls / float(self._stage.ask(self._name, "window", self._callers, WINDOW_S))


def single_calls(
    stage: Stage, names: Sequence[str], *, seconds: float, seed: int
) -> dict[str, list[float]]:
    """µs of single calls of each, in turns of random order; `seconds` for each of them."""
    order = random.Random(seed)
    turns: dict[str, int] = {}
    for name in names:
        stage.ask(name, "latencies", 1)
        (once_s,) = stage.ask(name, "latencies", 1)
        turns[name] = max(1, min(MOST_TURN_CALLS, int(TURN_S / max(once_s, 1e-9))))
    found: dict[str, list[float]] = {name: [] for name in names}
    end_s = time.perf_counter() + seconds * len(names)
    while True:
        for name in order.sample(list(names), len(names)):
            found[name] += [1e6 * s for s in stage.ask(name, "latencies", turns[name])]
        if time.perf_counter() > end_s or all(len(us) >= MOST_CALLS for us in found.values()):
            return found
