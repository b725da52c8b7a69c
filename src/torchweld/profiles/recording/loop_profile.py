"""`tw.profiling`: watches a few steps of a loop that runs anyway.

    with tw.profiling(model) as p:
        for batch in loader:
            train(batch)
            p.step()
    print(p.profile)

Steps without the profiler, with it, and with the modules shown to it take turns, so that its cost
can be calibrated on the loop's own steps, and checked on later ones. Outside the profiled steps
nothing is attached to the model, and `step` only counts and reads the clock. When the schedule is
over, it only counts.
"""

from __future__ import annotations

import time
from contextlib import ExitStack, suppress
from enum import Enum
from types import TracebackType

from torch import nn

from torchweld.core.argument_checks import check_model, check_whole
from torchweld.core.errors import NotMeasuredError, TorchweldError
from torchweld.core.not_measured import NotMeasured
from torchweld.core.passing_exceptions import is_interrupt
from torchweld.machine.machine_load import load_words
from torchweld.machine.page_faults import UNCOUNTED, FaultCount, FaultMeter
from torchweld.profiles.profile import Profile
from torchweld.profiles.recorded_events import Recording
from torchweld.profiles.recording.module_instrument import instrumented
from torchweld.profiles.recording.profile_building import Samples, build, cuda_wait
from torchweld.profiles.recording.profiler_overhead import Round, step_us
from torchweld.profiles.recording.torch_profiler import Recorder
from torchweld.timing.core_waiting import CoreWaiting


class _Kind(Enum):
    """What a step of the loop is to the schedule."""

    PASS = "untouched, its time not used"
    PLAIN = "untouched and timed"
    START_OPS = "warming up under the profiler, the modules not shown to it"
    OPS = "recorded, the modules not shown"
    START_MODULES = "warming up under the profiler, the modules shown to it"
    MODULES = "recorded, the modules shown"
    START_FULL = "warming up, with shapes and memory"
    FULL = "recorded with shapes and memory"
    CHECK = "untouched and timed, held out from the calibration"


# Starting and stopping the profiler leaves cold caches, so one step is skipped after each.
_ROUND = (_Kind.PLAIN, _Kind.START_OPS, _Kind.OPS, _Kind.START_MODULES, _Kind.MODULES)
_START = (_Kind.START_OPS, _Kind.START_MODULES, _Kind.START_FULL)
_RECORDED = (_Kind.OPS, _Kind.MODULES, _Kind.FULL)
_TIMED = (_Kind.PLAIN, _Kind.CHECK)


def _plan(wait: int, active: int) -> tuple[_Kind, ...]:
    """The kinds of all steps, from the first of the loop on."""
    return (
        *(_Kind.PASS,) * (wait - 1),
        *_ROUND,
        *(_Kind.PASS, *_ROUND) * (active - 1),
        _Kind.START_FULL,
        _Kind.FULL,
        _Kind.PASS,
        *(_Kind.CHECK,) * active,
    )


class profiling:  # noqa: N801, used as a statement
    """Profile some steps of a running loop; `profile` holds the result when they are over.

    `wait` steps pass untouched, the last of them timed. Then come `active` rounds of an untouched
    and two profiled steps, and one step with shapes and memory. Each time the profiler starts, the
    first step only warms up. Up to `active` later steps, untouched, check the correction. Call
    `step()` at the end of every step of the loop. It raises only timeouts and interrupts; other
    errors are raised when the profile is read.
    """

    def __init__(self, model: nn.Module, *, wait: int = 5, active: int = 3) -> None:
        check_model("profiling", model, scripted=True)
        check_whole("profiling", "wait", wait, least=1)  # one step is timed before it begins
        check_whole("profiling", "active", active, least=2)  # to see how steps vary
        self._roots = [("", model)]
        self._what = type(getattr(model, "_orig_mod", model)).__name__
        self._wait, self._active = wait, active
        self._plan = _plan(wait, active)
        self._samples = Samples()
        self._watch = CoreWaiting()
        self._lost = 0.0  # the largest share of one step of the round
        self._meter = FaultMeter()
        self._faults: FaultCount | NotMeasured = UNCOUNTED  # of the round's untouched step
        self._count = 0
        self._entered = False
        self._begun_s = 0.0
        self._plain_us = 0.0
        self._ops_us = 0.0
        self._recorder: Recorder | None = None
        self._attached = ExitStack()
        self._over = False
        self._error: Exception | None = None
        self._failed = 0  # number of the step in which it arose
        self._profile: Profile | None = None

    def __enter__(self) -> profiling:
        if self._entered:
            raise TorchweldError("a tw.profiling block was entered twice; make one for each loop")
        self._entered = True
        self._samples.load = load_words()
        self._watch.begin()
        self._begun_s = time.perf_counter()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over = True
        self._abandon()  # the loop ended in the middle of a step

    def step(self) -> None:
        """Says that a step of the loop has ended."""
        if not self._entered:
            raise TorchweldError(
                "step() was called outside its block; write `with tw.profiling(model) as p:` "
                "around the loop, and p.step() at the end of each of its steps"
            )
        self._count += 1
        if self._over:
            return
        try:
            self._take(self._plan[self._count - 1])
            self._over = self._count == len(self._plan)
            if not self._over:
                self._arm(self._plan[self._count])
        except Exception as error:  # the loop is the user's, and goes on
            self._over = True
            # The checks of the correction come last, and a profile does not need them.
            self._error = error if self._samples.full is None else None
            self._failed = self._count
            self._abandon()
            if is_interrupt(error):
                raise

    @property
    def profile(self) -> Profile:
        """The result; raises what went wrong, and NotMeasuredError while there is none."""
        if self._profile is None:
            if isinstance(self._error, TorchweldError):
                raise self._error
            if self._error is not None:
                raise NotMeasuredError(
                    f"step {self._failed} of the loop could not be profiled: "
                    f"{type(self._error).__name__}: {self._error}"
                ) from self._error
            if self._samples.full is None:
                needed = self._plan.index(_Kind.FULL) + 1
                raise NotMeasuredError(
                    f"{self._count} steps were seen and {needed} are needed "
                    f"(wait={self._wait}, active={self._active}): run the loop longer, or lower "
                    "wait or active"
                )
            self._profile = build(self._samples, self._roots, what=self._what)
        return self._profile

    # ---- the schedule ----

    def _take(self, ended: _Kind) -> None:
        """A step of this kind has ended."""
        samples = self._samples
        if ended in _RECORDED:
            recording = self._stop()
            if ended is _Kind.OPS:
                self._ops_us = step_us(recording)
            elif ended is _Kind.MODULES:
                done = Round(
                    plain_us=self._plain_us,
                    ops_us=self._ops_us,
                    recording=recording,
                    lost=self._lost,
                    faults=self._faults,
                )
                samples.rounds.append(done)
            else:
                samples.full = recording
            return
        if self._count == 1 or ended in _TIMED:
            cuda_wait()
        elapsed_us = 1e6 * (time.perf_counter() - self._begun_s)
        if self._count == 1:
            samples.first_us = elapsed_us
        if ended is _Kind.PLAIN:
            self._faults = self._meter.taken()
            self._plain_us, self._lost = elapsed_us, self._watch.lost()
        elif ended is _Kind.CHECK:
            samples.unprofiled_us.append(elapsed_us)

    def _arm(self, coming: _Kind) -> None:
        """Prepares for a step of this kind, and starts its clock last."""
        if coming in _START:
            full = coming is _Kind.START_FULL
            recorder = Recorder(shapes=full, memory=full)
            recorder.start()
            self._recorder = recorder
            shown = () if coming is _Kind.START_OPS else self._roots
            self._attached.enter_context(instrumented(shown))
        elif coming in _RECORDED:
            assert self._recorder is not None
            cuda_wait()
            self._watch.begin()
            self._attached.enter_context(self._recorder.step())
        elif coming in _TIMED:
            cuda_wait()
            self._watch.begin()
            self._meter.begin()
        self._begun_s = time.perf_counter()

    def _stop(self) -> Recording:
        assert self._recorder is not None
        self._attached.close()
        self._lost = max(self._lost, self._watch.lost())
        recorder, self._recorder = self._recorder, None
        return recorder.stop()

    def _abandon(self) -> None:
        """Removes everything; an error on the way must not hide the user's own."""
        recorder, self._recorder = self._recorder, None
        with suppress(Exception):
            self._attached.close()
        if recorder is not None:
            with suppress(Exception):
                recorder.cancel()
