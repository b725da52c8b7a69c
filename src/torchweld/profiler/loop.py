"""`tw.profiling`: watches a few steps of a loop that runs anyway.

    with tw.profiling(model) as p:
        for batch in loader:
            train(batch)
            p.step()
    print(p.profile)

Steps without the profiler, with it, and with the modules shown to it take turns, so that its cost
can be calibrated on the loop's own steps. Outside the profiled steps nothing is attached to the
model, and `step` does nothing but count and read the clock; when the schedule is over it only
counts.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from types import TracebackType

from torch import nn

from torchweld.errors import NotMeasuredError, TorchweldError
from torchweld.profiler.build import Samples, build, cuda_wait
from torchweld.profiler.collect import Recorder
from torchweld.profiler.events import Recording
from torchweld.profiler.instrument import instrumented
from torchweld.profiler.overhead import Round, step_us
from torchweld.profiler.profile import Profile


class profiling:  # noqa: N801, used as a statement
    """Profile some steps of a running loop; `profile` holds the result when they are over.

    `wait` steps pass untouched, then come `active` rounds of an untouched and two profiled steps,
    and one step with shapes and memory. Call `step()` at the end of every step of the loop.
    """

    def __init__(self, model: nn.Module, *, wait: int = 5, active: int = 3) -> None:
        if wait < 1 or active < 2:
            raise TorchweldError(
                f"wait is {wait} and active {active}; at least 1 step must pass before profiling "
                "begins, and 2 are needed to see how steps vary"
            )
        self._roots = [("", model)]
        self._what = type(getattr(model, "_orig_mod", model)).__name__
        self._wait, self._active = wait, active
        self._samples = Samples()
        self._count = 0
        self._begun_s = 0.0
        self._plain_us: float | None = None
        self._ops_us: float | None = None
        self._recorder: Recorder | None = None
        self._attached = ExitStack()
        self._over = False
        self._profile: Profile | None = None

    def __enter__(self) -> profiling:
        self._begun_s = time.perf_counter()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._recorder is not None:  # the loop ended in the middle of a step
            self._attached.close()
            self._recorder.cancel()
            self._recorder = None
        self._over = True

    def step(self) -> None:
        """Says that a step of the loop has ended."""
        self._count += 1
        if self._over:
            return
        if self._recorder is not None:
            self._take(self._stop())
        else:
            self._pass()
        self._arm()

    @property
    def profile(self) -> Profile:
        """The result; raises NotMeasuredError while there is none."""
        if self._profile is None:
            if self._samples.full is None:
                needed = self._wait + 3 * self._active
                raise NotMeasuredError(
                    f"{self._count} steps were seen and {needed} are needed (wait={self._wait}, "
                    f"active={self._active}): run the loop longer, or lower wait or active"
                )
            self._profile = build(self._samples, self._roots, what=self._what)
        return self._profile

    # ---- the schedule ----

    def _pass(self) -> None:
        """A step without the profiler has ended."""
        if self._count == 1 or self._count >= self._wait:
            cuda_wait()
        elapsed_us = 1e6 * (time.perf_counter() - self._begun_s)
        if self._count == 1:
            self._samples.first_us = elapsed_us
        self._plain_us = elapsed_us

    def _take(self, recording: Recording) -> None:
        """A step with the profiler has ended."""
        samples = self._samples
        if len(samples.rounds) == self._active:
            samples.full = recording
            self._over = True
        elif self._ops_us is None:
            self._ops_us = step_us(recording)
        else:
            assert self._plain_us is not None
            done = Round(plain_us=self._plain_us, ops_us=self._ops_us, recording=recording)
            samples.rounds.append(done)
            self._plain_us = self._ops_us = None

    def _arm(self) -> None:
        """Decides what the next step is, and starts its clock last."""
        if self._over:
            return
        complete = len(self._samples.rounds) == self._active
        if self._count >= self._wait and (complete or self._plain_us is not None):
            shown = complete or self._ops_us is not None
            self._attached.enter_context(instrumented(self._roots if shown else ()))
            self._recorder = Recorder(shapes=complete, memory=complete)
            self._recorder.start()
            self._attached.enter_context(self._recorder.step())
        self._begun_s = time.perf_counter()

    def _stop(self) -> Recording:
        assert self._recorder is not None
        recorder, self._recorder = self._recorder, None
        self._attached.close()
        return recorder.stop()
