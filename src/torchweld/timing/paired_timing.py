"""`compare`, the entry to paired timing: sides in, one `Comparison` per candidate out."""

import time
from collections.abc import Sequence
from typing import Any, overload

import torch

from torchweld.core.argument_checks import check_number, shown
from torchweld.core.errors import TorchweldError
from torchweld.timing.comparison import Comparison
from torchweld.timing.timed_sides import Clock, as_side
from torchweld.timing.timing_rounds import FEWEST_ROUNDS, NamedSide, PairedRun, Settings


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
    enough: float | None = None,
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
    enough: float | None = None,
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
    enough: float | None = None,
    cold: bool = False,
    seed: int = 0,
    control: bool = True,
    threads: int | None = None,
    clock: Clock = time.perf_counter,
) -> Comparison | list[Comparison]:
    """Is the candidate faster than the baseline, and by how much?

    Each side is a callable without arguments, or an object with `time(calls) -> seconds`. One
    candidate gives a `Comparison`, several give a list of them, in order, from shared rounds.

    names:      of the baseline and each candidate, for messages
    min_rounds: the fewest rounds for a verdict, at least 20; a plain difference, such as a factor
                of three, is told after 5 rounds if more do not fit, or if `enough` is given
    budget_s:   seconds per candidate, with warm-up but without the first call of each side; the run
                ends earlier once everything is settled
    threshold:  the smallest change that counts as one
    precision:  for "same" the interval must lie within this of 1; 2 * threshold if left out
    enough:     a difference that is surely larger than this needs no more rounds, however wide its
                interval is; use it to learn which side is faster, not by how much
    cold:       empty the caches before every call and time calls singly, so that weights come from
                memory; otherwise they are as warm as the previous call leaves them
    seed:       of the order of the sides and of the bootstrap
    control:    time the baseline against itself too, as the noise floor
    threads:    what to report as the number of threads, where it is not torch's of this process
    clock:      seconds, from any origin; for callables and for the budget
    """
    things = (baseline, candidate, *more)
    check_number("compare", "budget_s", budget_s, above=0)
    check_number("compare", "threshold", threshold, above=0)
    settings = Settings(
        min_rounds=min_rounds,
        budget_s=budget_s * (len(things) - 1),
        threshold=threshold,
        precision=2.0 * threshold if precision is None else precision,
        enough=enough,
        cold=cold,
        seed=seed,
        control=control,
        threads=torch.get_num_threads() if threads is None else threads,
        clock=clock,
    )
    sides = [
        NamedSide(name=name, side=as_side(thing, name, clock))
        for thing, name in zip(things, _names(names, len(things)), strict=True)
    ]
    results = PairedRun(sides, settings).results()
    return results if more else results[0]


def _names(names: Sequence[str] | None, count: int) -> list[str]:
    if names is None:
        numbered = [f"candidate {number}" for number in range(1, count)]
        return ["baseline", *(numbered if count > 2 else ["candidate"])]
    given = names if isinstance(names, (list, tuple)) else ()
    if len({name for name in given if isinstance(name, str)}) != count or len(given) != count:
        raise TorchweldError(
            f"names is {list(given) if given else shown(names)}; it must be {count} different "
            "names, the baseline's first; leave it out to get baseline and candidate"
        )
    return list(names)
