"""Corrected times against times taken without the profiler: how far off, and how surely.

In: rounds that calibrated nothing. Out: `TimeCheck`s. Both times of a round were taken one after
the other, so their ratio does not depend on what the machine did between rounds, and the median of
the ratios does not depend on a few disturbed rounds. On a shared machine, means of the two can
differ by a tenth only because they were taken at different times.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from torchweld.profiles.attributing.attribution import Costs
from torchweld.profiles.profile import TimeCheck
from torchweld.profiles.recorded_events import MODULE, ON_DEVICE
from torchweld.profiles.recording.profiler_overhead import Round, corrected_inside_us, count_events
from torchweld.timing.timing_statistics import sign_test_ranks

# A correction that is off by more than this is reported.
TOLERATED_ERROR = 0.10
# An interval misses the true error in at most this share of all cases.
ALPHA = 0.05
# A time said to be "at least" is too long in at most this share: a bound on gains depends on it.
AT_LEAST_ALPHA = 0.01


def checks_of(held_out: Sequence[Round], costs: Costs) -> tuple[TimeCheck, ...]:
    """Checks of the step, and of each module that was timed alone.

    Modules on a device are not checked: the recording has the host's time alone, and the clock
    has both.
    """
    if not held_out:
        return ()
    steps = _corrected_us(held_out, costs)
    found = [check("held-out steps", steps, [r.plain_us for r in held_out])]
    if any(event.kind in ON_DEVICE for event in held_out[0].recording.events):
        return tuple(found)
    for path in held_out[0].alone_us:
        inside = [corrected_inside_us(r.recording, path, costs) for r in held_out]
        found.append(check(path or "the model", inside, [r.alone_us[path] for r in held_out]))
    return tuple(found)


def checks_of_loop(
    rounds: Sequence[Round], unprofiled_us: Sequence[float], costs: Costs
) -> tuple[TimeCheck, ...]:
    """The rounds' corrected time against steps of the same loop that they were not timed with."""
    if not rounds or not unprofiled_us:
        return ()
    return (check("held-out steps", _corrected_us(rounds, costs), unprofiled_us),)


def check(what: str, corrected_us: Sequence[float], timed_us: Sequence[float]) -> TimeCheck:
    """Compares two series of times by the median of their ratios. Unpaired times are left out."""
    pairs = zip(corrected_us, timed_us, strict=False)
    ratios = sorted(corrected / timed for corrected, timed in pairs if timed > 0)
    usual_us = statistics.median(timed_us)
    if not ratios:
        return TimeCheck(what=what, corrected_us=statistics.median(corrected_us), timed_us=usual_us)
    low, high = sign_test_ranks(len(ratios), ALPHA)
    return TimeCheck(
        what=what,
        corrected_us=usual_us * statistics.median(ratios),
        timed_us=usual_us,
        interval=(ratios[low] - 1, ratios[high] - 1) if low >= 0 else None,
    )


def surely_off(rounds: Sequence[Round], costs: Costs) -> bool:
    """Whether profiled steps, corrected, took another time than those without the profiler.

    By more than rounds differ: the same step can take a tenth longer a moment later.
    """
    found = check("steps", _corrected_us(rounds, costs), [r.plain_us for r in rounds])
    return found.interval is not None and not found.interval[0] <= 0.0 <= found.interval[1]


def around_us(held_out: Sequence[Round]) -> float:
    """The least that a step spends around the model's own forward, if that was timed alone.

    The lower end of an interval, since it is a difference of two times, which is mostly noise in a
    long step. No more than what was recorded there, with the profiler's cost.
    """
    rounds = [r for r in held_out if "" in r.alone_us]
    low, _ = sign_test_ranks(len(rounds), AT_LEAST_ALPHA)
    if low < 0:
        return 0.0
    timed = sorted(r.plain_us - r.alone_us[""] for r in rounds)[low]
    recorded = statistics.median(r.profiled_us - _inside_us(r) for r in rounds)
    return max(0.0, min(timed, recorded))


def _inside_us(held_out: Round) -> float:
    """Recorded inside the model's own calls."""
    calls = (e for e in held_out.recording.events if e.kind == MODULE and not e.name)
    return sum(event.duration_us for event in calls)


def complaint(made: TimeCheck) -> str:
    """A sentence about a check that is off by more than tolerated; "" if it is not."""
    if not abs(made.error) > TOLERATED_ERROR:
        return ""
    if made.interval is None:
        known = "too few rounds for an interval"
    else:
        low, high = (100 * error for error in made.interval)
        known = f"{low:+.0f} to {high:+.0f} % with 95 % confidence"
    return (
        f"the corrected time of {made.what} is {100 * made.error:+.0f} % off what was timed "
        f"without the profiler ({known}); the machine may have been busy"
    )


def _corrected_us(rounds: Sequence[Round], costs: Costs) -> list[float]:
    ops, modules = count_events(rounds[0].recording)
    cost_us = costs.op_us * ops + costs.module_us * modules
    return [r.profiled_us - cost_us for r in rounds]
