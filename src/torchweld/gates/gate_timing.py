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
from dataclasses import dataclass, replace
from typing import Any

from torchweld.core.errors import NotMeasuredError
from torchweld.core.model_inputs import Workload
from torchweld.core.not_measured import NotMeasured
from torchweld.core.number_text import duration
from torchweld.gates.gate_advice import clock_remedies
from torchweld.gates.gate_outcome import GateVerdict, TimeVerdict
from torchweld.gates.gated_model import Clock, Subject
from torchweld.numerics.model_results import step_of
from torchweld.timing import CallableSide, Comparison, Side, compare
from torchweld.welds.swapping.module_faces import Face

ITSELF = "the model with welding disabled"
# A comparison is made to these shares of the tolerance, so that its interval does not use it up.
THRESHOLD, PRECISION = 0.2, 0.3
# The time of the model's own code may differ this much from the baseline's. Beyond that, the
# machine is in another state: on two shared cores a speed-up went from 1.23 to 1.40 within a
# minute, while eager went from 1.7 to 2.3 ms.
SAME_STATE = 0.10

# A comparison that cannot tell is made once more.
TRIES = 2

Measure = Callable[[], Comparison]
Look = Callable[["Comparison", "SeenTime"], tuple[GateVerdict, str]]


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
    subject: Subject, faces: tuple[Face, Face], workload: Workload, clock: Clock
) -> Comparison:
    """The welded model against its own code, in the same rounds. `faces`: original, welded."""
    run = step_of(subject.model, workload, subject.training)
    original, welded = (FacedSide(face, run) for face in faces)
    return compare_sides(original, welded, clock)


def compare_sides(
    baseline: Side, candidate: Side, clock: Clock, names: Sequence[str] = ("eager", "welded")
) -> Comparison:
    return compare(
        baseline,
        candidate,
        names=names,
        budget_s=clock.seconds,
        threshold=THRESHOLD * clock.tolerance,
        precision=PRECISION * clock.tolerance,
    )


@dataclass(frozen=True, kw_only=True)
class SeenTime:
    """The figures of a comparison that has them."""

    speedup: float
    interval: tuple[float, float]
    eager_us: float


def seen_in(found: Comparison) -> SeenTime | NotMeasured:
    """The comparison's figures, whatever its verdict; NotMeasured if it has none."""
    speedup, interval, eager_us = found.speedup, found.interval, found.baseline_us
    if (
        isinstance(speedup, NotMeasured)
        or isinstance(interval, NotMeasured)
        or isinstance(eager_us, NotMeasured)
        or not all(0 < figure < math.inf for figure in (speedup, *interval, eager_us))
    ):
        return NotMeasured(found.reason)
    return SeenTime(speedup=speedup, interval=interval, eager_us=eager_us)


def too_wide(interval: tuple[float, float], tolerance: float) -> str:
    """Why an interval cannot show a change by the tolerance; "" if it can."""
    low, high = interval
    if math.log(high / low) / 2 <= math.log1p(tolerance):
        return ""
    return (
        f"the speed-up lies somewhere in {low:.3f} to {high:.3f}, too wide for a tolerance of "
        f"{tolerance:.1%}"
    )


def usable(found: Comparison, tolerance: float) -> SeenTime | NotMeasured:
    """The figures, if they are precise enough to show a change by the tolerance."""
    seen = seen_in(found)
    if found.verdict == "not measured":
        return NotMeasured(found.reason)
    if isinstance(seen, NotMeasured):
        return seen
    why_not = too_wide(seen.interval, tolerance)
    return NotMeasured(why_not) if why_not else seen


# ---- what a baseline keeps ----


@dataclass(frozen=True, kw_only=True)
class KeptTime:
    """The baseline's comparisons of one workload: their median, and the range of intervals."""

    workload: str
    comparisons: tuple[Comparison, ...]

    def problems(self) -> Iterator[str]:
        """What is wrong with a record that was read from a file: only measured times are kept."""
        for one in self.comparisons:
            if isinstance(seen_in(one), NotMeasured):
                yield f"has the speed-up {one.speedup} in {one.interval}; expected are times"

    @property
    def seen(self) -> list[SeenTime]:
        found = [seen_in(one) for one in self.comparisons]
        return [one for one in found if not isinstance(one, NotMeasured)]

    @property
    def speedup(self) -> float:
        return statistics.median_low(one.speedup for one in self.seen)

    @property
    def interval(self) -> tuple[float, float]:
        lows, highs = zip(*(one.interval for one in self.seen), strict=True)
        return min(lows), max(highs)

    @property
    def noise(self) -> float:
        """The largest change that chance explains, within a comparison or between them."""
        speedups = [one.speedup for one in self.seen]
        between = max(speedups) / min(speedups) - 1.0
        within = (one.noise for one in self.comparisons)
        return max([between, *(one for one in within if not isinstance(one, NotMeasured))])

    def other_state(self, now: SeenTime) -> str:
        """How the machine changed, by the time of the model's own code; "" if it did not."""
        before_us = [one.eager_us for one in self.seen]
        low_us, high_us = min(before_us) / (1 + SAME_STATE), max(before_us) * (1 + SAME_STATE)
        if low_us <= now.eager_us <= high_us:
            return ""
        return (
            f"the speed-up is smaller, but {ITSELF} takes {duration(now.eager_us)} now and took "
            f"{duration(statistics.median(before_us))} in the baseline: the machine is in another "
            "state, or the model's own code changed, so the two do not compare"
        )


def kept_time(workload: str, measures: Sequence[Measure], clock: Clock) -> KeptTime:
    """The time that a baseline keeps. Raises NotMeasuredError if a comparison was useless twice."""
    found: list[Comparison] = []
    for measure in measures:
        for _ in range(TRIES):
            one = measure()
            seen = usable(one, clock.tolerance)
            if not isinstance(seen, NotMeasured):
                break
        else:
            assert isinstance(seen, NotMeasured)
            raise NotMeasuredError(
                f"no baseline was written: the wall time of {workload!r} was {seen}; what would "
                f"help: {'; '.join(clock_remedies(clock, one.wanted_s))}"
            )
        found.append(one)
    return KeptTime(workload=workload, comparisons=tuple(found))


# ---- judging ----


def against_history(kept: KeptTime, measure: Measure, again: Measure, clock: Clock) -> TimeVerdict:
    """Whether the speed-up over the model's own code is what it was, on the same machine."""
    low, high = kept.interval

    def look(_: Comparison, now: SeenTime) -> tuple[GateVerdict, str]:
        change = now.speedup / kept.speedup - 1.0
        if now.interval[1] < low and change < -clock.tolerance:
            if other := kept.other_state(now):
                return "not measured", other
            return "slower", f"the speed-up is {-change:.1%} smaller"
        if now.interval[0] > high and change > clock.tolerance:
            return "faster", f"the speed-up is {change:.1%} larger"
        return "as before", f"the speed-up changed by {change:+.1%}"

    judged = _judged(kept.workload, ITSELF, measure, again, look, clock)
    noise = judged.noise if isinstance(judged.noise, float) else 0.0
    return replace(
        judged,
        noise=max(noise, kept.noise),
        baseline_speedup=kept.speedup,
        baseline_interval=kept.interval,
    )


def against_other(workload: str, other: str, measure: Measure, clock: Clock) -> TimeVerdict:
    """Whether this model is as fast as another one, which ran in the same rounds."""

    def look(found: Comparison, now: SeenTime) -> tuple[GateVerdict, str]:
        if found.verdict == "slower" and 1.0 / now.speedup > 1.0 + clock.tolerance:
            return "slower", f"it takes {1.0 / now.speedup - 1.0:.1%} longer"
        if found.verdict == "faster" and now.speedup > 1.0 + clock.tolerance:
            return "faster", f"it is {now.speedup - 1.0:.1%} faster"
        return "as before", "no difference beyond noise and tolerance"

    return _judged(workload, other, measure, measure, look, clock)


@dataclass(frozen=True, kw_only=True)
class Tried:
    """What one comparison says, or the second if the first could not tell."""

    found: Comparison
    seen: SeenTime | NotMeasured
    verdict: GateVerdict
    reason: str


def _judged(
    workload: str, against: str, measure: Measure, again: Measure, look: Look, clock: Clock
) -> TimeVerdict:
    """Slower only if two comparisons in a row say so."""
    tried = first = _tried(measure, look, clock.tolerance)
    reason, count = tried.reason, 1
    if first.verdict == "slower":
        tried, count = _tried(again, look, clock.tolerance), 2
        assert isinstance(first.seen, SeenTime)
        if tried.verdict == "slower":
            beyond = f"beyond noise and the tolerance of {clock.tolerance:.1%}"
            reason = f"{tried.reason}, {beyond}, in two comparisons"
        else:
            said = f"a first comparison said {first.seen.speedup:.3f}, slower"
            could = "could not tell" if tried.verdict == "not measured" else "did not"
            reason = f"{tried.reason}; {said}, and the second one {could}"
    seen = tried.seen
    unmeasured = tried.verdict == "not measured"
    return TimeVerdict(
        workload=workload,
        verdict=tried.verdict,
        reason=reason,
        against=against,
        speedup=seen if isinstance(seen, NotMeasured) else seen.speedup,
        interval=seen if isinstance(seen, NotMeasured) else seen.interval,
        noise=_noise(tried),
        tolerance=clock.tolerance,
        measured=count,
        remedies=clock_remedies(clock, tried.found.wanted_s) if unmeasured else (),
    )


def _noise(tried: Tried) -> float | NotMeasured:
    return tried.seen if isinstance(tried.seen, NotMeasured) else tried.found.noise


def _tried(measure: Measure, look: Look, tolerance: float) -> Tried:
    for _ in range(TRIES):
        found = measure()
        verdict, reason = _seen(found, look, tolerance)
        if verdict != "not measured":
            break
    return Tried(found=found, seen=seen_in(found), verdict=verdict, reason=reason)


def _seen(found: Comparison, look: Look, tolerance: float) -> tuple[GateVerdict, str]:
    """A clear difference may have any interval; "as before" needs a narrow one."""
    seen = seen_in(found)
    if found.verdict == "not measured" or isinstance(seen, NotMeasured):
        return "not measured", found.reason
    verdict, reason = look(found, seen)
    why_not = too_wide(seen.interval, tolerance) if verdict == "as before" else ""
    return ("not measured", why_not) if why_not else (verdict, reason)


def undecided(
    workload: str, reason: str, tolerance: float, remedies: tuple[str, ...]
) -> TimeVerdict:
    """A workload whose time cannot be compared with the baseline's at all."""
    why = NotMeasured(reason)
    return TimeVerdict(
        workload=workload,
        verdict="not measured",
        reason=reason,
        against=ITSELF,
        speedup=why,
        interval=why,
        noise=why,
        baseline_speedup=why,
        baseline_interval=why,
        tolerance=tolerance,
        remedies=remedies,
    )
