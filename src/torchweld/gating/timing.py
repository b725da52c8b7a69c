"""Wall time: measured in pairs here and now, judged against what the baseline measured.

Two questions, each with its own judge. Against history: has the speed-up over the model's own code
become smaller than the baseline's, beyond both intervals and the tolerance? Against another model
in the same rounds: is this one slower, beyond noise and the tolerance? What looks slower is
measured once more, and both comparisons have to say so.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from torchweld.errors import NotMeasuredError
from torchweld.figures import duration
from torchweld.gating.outcome import TimeVerdict, Verdict
from torchweld.inputs import Workload
from torchweld.measuring import CallableSide, Comparison, compare
from torchweld.planning.timing import Face
from torchweld.planning.whole import runner

ITSELF = "the model with welding disabled"
# A comparison is made to these shares of the tolerance, so that its interval does not use it up.
THRESHOLD, PRECISION = 0.2, 0.3
# By how much the time of the model's own code may differ from the baseline's. Beyond, the machine
# is in another state: on two shared cores a speed-up went from 1.23 to 1.40 within a minute, while
# eager went from 1.7 to 2.3 ms.
SAME_STATE = 0.10

# A comparison that cannot tell is made once more.
TRIES = 2

Measure = Callable[[], Comparison]
Look = Callable[[Comparison], tuple[Verdict, str]]


# ---- measuring ----


class FacedSide(CallableSide):
    """A step of the model with one of its faces."""

    def __init__(self, face: Face, run: Callable[[], Any]) -> None:
        super().__init__(run)
        self._face = face

    def time(self, calls: int) -> float:
        self._face.show()
        return super().time(calls)


def measure_welded(
    model: nn.Module,
    original: Face,
    welded: Face,
    workload: Workload,
    *,
    training: bool,
    seconds: float,
    tolerance: float,
) -> Comparison:
    """The welded model against its own code, in the same rounds."""
    run = runner(model, workload, training)
    return compare_sides(FacedSide(original, run), FacedSide(welded, run), seconds, tolerance)


def compare_sides(
    baseline: Any, candidate: Any, seconds: float, tolerance: float, names: Sequence[str] = ()
) -> Comparison:
    return compare(
        baseline,
        candidate,
        names=tuple(names) or ("eager", "welded"),
        budget_s=seconds,
        threshold=THRESHOLD * tolerance,
        precision=PRECISION * tolerance,
    )


def too_wide(found: Comparison, tolerance: float) -> str:
    """Why an interval is of no use where a change by the tolerance is the question; "" if it is."""
    low, high = found.interval
    if math.log(high / low) / 2 <= math.log1p(tolerance):
        return ""
    return (
        f"the speed-up lies somewhere in {low:.3f} to {high:.3f}, too wide for a tolerance of "
        f"{tolerance:.1%}; the machine is busy, or needs more seconds"
    )


# ---- what a baseline keeps ----


@dataclass(frozen=True, kw_only=True)
class KeptTime:
    """The baseline's comparisons of one workload: their middle, and all that they span."""

    workload: str
    comparisons: tuple[Comparison, ...]

    def problems(self) -> Iterator[str]:
        """What is wrong with one that was read from a file: only what was measured is kept."""
        for one in self.comparisons:
            figures = (one.speedup, *one.interval, one.baseline_us)
            if not all(0 < figure < math.inf for figure in figures):
                yield f"has the speed-up {one.speedup} in {one.interval}; expected are times"

    @property
    def speedup(self) -> float:
        return statistics.median_low(one.speedup for one in self.comparisons)

    @property
    def interval(self) -> tuple[float, float]:
        lows, highs = zip(*(one.interval for one in self.comparisons), strict=True)
        return min(lows), max(highs)

    @property
    def noise(self) -> float:
        """What is not to be told from chance: within a comparison, or between them."""
        speedups = [one.speedup for one in self.comparisons]
        within = max(one.noise or 0.0 for one in self.comparisons)
        return max(within, max(speedups) / min(speedups) - 1.0)

    def other_state(self, now: Comparison) -> str:
        """How the machine differs from what it was, by the model's own code; "" if it does not."""
        before_us = [one.baseline_us for one in self.comparisons]
        low_us, high_us = min(before_us) / (1 + SAME_STATE), max(before_us) * (1 + SAME_STATE)
        if low_us <= now.baseline_us <= high_us:
            return ""
        return (
            f"the speed-up is smaller, but {ITSELF} takes {duration(now.baseline_us)} now and took "
            f"{duration(statistics.median(before_us))} in the baseline: the machine is in another "
            "state, or the model's own code changed, so the two do not compare; try again, or use "
            "--against-worktree"
        )


def kept_time(workload: str, measures: Sequence[Measure], tolerance: float) -> KeptTime:
    """What a baseline keeps; raises NotMeasuredError where a comparison is of no use, twice."""
    found: list[Comparison] = []
    for measure in measures:
        for _ in range(TRIES):
            one = measure()
            why_not = one.reason if one.verdict == "not measured" else too_wide(one, tolerance)
            if not why_not:
                break
        else:
            raise NotMeasuredError(
                f"no baseline was written: the wall time of {workload!r} was not measured, "
                f"{why_not}; try again, give --seconds more, or accept counters alone with "
                "--no-time"
            )
        found.append(one)
    return KeptTime(workload=workload, comparisons=tuple(found))


# ---- judging ----


def against_history(
    kept: KeptTime, measure: Measure, again: Measure, tolerance: float
) -> TimeVerdict:
    """Whether the speed-up over the model's own code is what it was, on the same machine."""
    low, high = kept.interval

    def look(found: Comparison) -> tuple[Verdict, str]:
        change = found.speedup / kept.speedup - 1.0
        if found.interval[1] < low and change < -tolerance:
            if other := kept.other_state(found):
                return "not measured", other
            return "slower", f"the speed-up is {-change:.1%} smaller"
        if found.interval[0] > high and change > tolerance:
            return "faster", f"the speed-up is {change:.1%} larger"
        return "as before", f"the speed-up changed by {change:+.1%}"

    return _judged(kept.workload, ITSELF, measure, again, look, tolerance, kept)


def against_other(workload: str, other: str, measure: Measure, tolerance: float) -> TimeVerdict:
    """Whether this model is as fast as another one, which ran in the same rounds."""

    def look(found: Comparison) -> tuple[Verdict, str]:
        if found.verdict == "slower" and 1.0 / found.speedup > 1.0 + tolerance:
            return "slower", f"it takes {1.0 / found.speedup - 1.0:.1%} longer"
        if found.verdict == "faster" and found.speedup > 1.0 + tolerance:
            return "faster", f"it is {found.speedup - 1.0:.1%} faster"
        return "as before", "no difference beyond noise and tolerance"

    return _judged(workload, other, measure, measure, look, tolerance)


def _judged(
    workload: str,
    against: str,
    measure: Measure,
    again: Measure,
    look: Look,
    tolerance: float,
    kept: KeptTime | None = None,
) -> TimeVerdict:
    """Slower only if two comparisons in a row say so."""

    def tried(measure: Measure) -> tuple[Comparison, Verdict, str]:
        """What a comparison says; of a second one, where the first cannot tell."""
        for _ in range(TRIES):
            found = measure()
            verdict, reason = _seen(found, look, tolerance)
            if verdict != "not measured":
                break
        return found, verdict, reason

    found, verdict, reason = tried(measure)
    count = 1
    if verdict == "slower":
        first, count = found.speedup, 2
        found, verdict, reason = tried(again)
        if verdict == "slower":
            reason += f", beyond noise and the tolerance of {tolerance:.1%}, in two comparisons"
        elif verdict != "not measured":
            reason += f"; a first comparison said {first:.3f}, the second one did not"
    return TimeVerdict(
        workload=workload,
        verdict=verdict,
        reason=reason,
        against=against,
        speedup=found.speedup if found.rounds else 0.0,
        interval=found.interval if found.rounds else (0.0, 0.0),
        noise=found.noise if kept is None else max(found.noise or 0.0, kept.noise),
        baseline_speedup=0.0 if kept is None else kept.speedup,
        baseline_interval=(0.0, 0.0) if kept is None else kept.interval,
        tolerance=tolerance,
        measured=count,
    )


def _seen(found: Comparison, look: Look, tolerance: float) -> tuple[Verdict, str]:
    """A clear difference may have any interval; "as before" needs a narrow one."""
    if found.verdict == "not measured":
        return "not measured", found.reason.replace("budget_s", "--seconds")  # as typed here
    verdict, reason = look(found)
    why_not = too_wide(found, tolerance) if verdict == "as before" else ""
    return ("not measured", why_not) if why_not else (verdict, reason)


def undecided(workload: str, reason: str, tolerance: float) -> TimeVerdict:
    """A workload whose time cannot be compared at all."""
    return TimeVerdict(
        workload=workload,
        verdict="not measured",
        reason=reason,
        against=ITSELF,
        tolerance=tolerance,
    )
