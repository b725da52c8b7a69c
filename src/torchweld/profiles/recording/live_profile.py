"""`tw.profile`: runs a model or a workload a few times and says where its time went.

The first step is timed cold, and some steps warm up. Then steps without the profiler, with it, and
with the modules shown to it take turns, to calibrate its cost. A second set checks the calibration:
steps without the profiler, with it, and with a clock around some modules take turns. One more step,
whose time is not used, records shapes and memory.
"""

from __future__ import annotations

import ctypes
import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from torchweld.core.argument_checks import (
    check_flags,
    check_kind,
    check_progress,
    check_whole,
    misfit,
)
from torchweld.core.errors import TorchweldError
from torchweld.core.not_measured import NotMeasured
from torchweld.machine.machine_load import load_words
from torchweld.machine.page_faults import UNCOUNTED, FaultCount, FaultMeter
from torchweld.profiles.attributing.compilation_watch import watch_compilation
from torchweld.profiles.profile import Profile
from torchweld.profiles.recorded_events import Recording
from torchweld.profiles.recording.module_instrument import (
    Forward,
    Roots,
    instrumented,
    places,
    shadowed,
)
from torchweld.profiles.recording.profile_building import (
    Samples,
    build,
    cuda_wait,
    heaviest_modules,
)
from torchweld.profiles.recording.profiled_steps import Loss, Step, model_step, workload_step
from torchweld.profiles.recording.profiler_overhead import (
    Round,
    measure_loop,
    step_us,
    usual_cost_us,
)
from torchweld.profiles.recording.torch_profiler import record
from torchweld.profiles.step_faults import KEEP_MEMORY
from torchweld.timing.core_waiting import TOLERATED, CoreWaiting

Progress = Callable[[str, float], None]

# Short steps are repeated until a set of them takes about this long, up to MOST_STEPS.
SET_SECONDS = 0.3
MOST_STEPS = 60
CHECKED_MODULES = 4
# Fewer rounds give no interval. If they would take longer than this, the rounds to calibrate on
# are counted among them.
CHECKED_ROUNDS = 6
CHECK_SECONDS = 15.0
SHORT_US = 200_000.0
LEAST_COST = 0.02
# How many rounds are taken per wanted round if other processes disturb them, and for how long. An
# idle machine takes half of this for the shortest steps.
MOST_TRIES = 3
RETAKE_SECONDS = 8.0
# A short step is repeated this long before it is measured. After one run of 50 µs the next one
# still took 58, after eight 48.
WARM_US = 500.0
MOST_WARM_UPS = 8
FRESH_FACTOR = 1.25  # a step in a fresh process must be slower by this much to be mentioned
# Pages of the smallest block that glibc returns to the system when it is freed. A step with fewer
# extra page faults was slower for another reason.
LEAST_FAULTS = 32
# Just below the largest block whose release makes glibc keep memory.
LARGE_BLOCK_BYTES = 31 << 20


def profile(
    model: nn.Module | Callable[[], object],
    inputs: Any = None,
    *,
    training: bool = False,
    loss: Loss | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    steps: int = 3,
    stacks: bool = False,
    progress: Progress | None = None,
) -> Profile:
    """Profile a model on inputs, or any callable workload.

    A model runs in eval mode without gradients; with `training=True` forward, loss (given, or the
    sum of the floating outputs), backward, and the optimizer if given. It is left as it was:
    modes, gradients, buffers, and parameters if an optimizer stepped. A workload is called as it
    is, some dozens of times. `steps` is the least number of profiled steps in a set; `stacks` notes
    for every op which of the user's functions called it (`Op.where`); `progress` is called with
    what is being done and how far it is (0 to 1).
    """
    check_whole("profile", "steps", steps, least=2)  # to see how they vary
    check_flags("profile", training=training, stacks=stacks)
    check_progress("profile", progress)
    if loss is not None and not callable(loss):
        raise misfit("profile", "loss", loss, "a function of the model's output")
    if optimizer is not None:
        remedy = "one over the model's parameters"
        check_kind("profile", "optimizer", optimizer, torch.optim.Optimizer, remedy)
    if isinstance(model, nn.Module):
        if inputs is None:
            raise TorchweldError(
                "no inputs: give what the model is called with, such as tw.profile(model, x), a "
                "mapping of keyword arguments, or tw.Inputs(...)"
            )
        step = model_step(model, inputs, training, loss, optimizer)
    elif callable(model):
        if inputs is not None or training or loss is not None or optimizer is not None:
            raise TorchweldError(
                "a workload is called without arguments, as it is; inputs, training, loss and "
                "optimizer go with a model"
            )
        step = workload_step(model)
    else:
        raise TorchweldError(
            f"cannot profile a {type(model).__name__}; give an nn.Module and its inputs, or a "
            "callable without arguments"
        )
    load = load_words()
    with step.keep():
        samples = _sample(step, steps, stacks, progress or (lambda doing, share: None))
    samples.load = load
    return build(samples, step.roots, what=step.what, inputs=step.inputs, training=step.training)


def _sample(step: Step, steps: int, stacks: bool, progress: Progress) -> Samples:
    samples = Samples()
    runner = _Runner(step=step)
    progress("first step", 0.0)
    with watch_compilation() as watched:
        samples.first_us = runner.timed()
        progress("warming up", 0.05)
        measure_loop()
        fresh_us = _settled_us(runner)
        _, fresh_faults = _timed_faults(runner)
        _steady_heap()
        expected_us = fresh_us if fresh_us >= SHORT_US else _settled_us(runner)
        last_us, faults = _timed_faults(runner)
        expected_us = min(expected_us, last_us)
        if expected_us < fresh_us / FRESH_FACTOR and fresh_faults - faults >= LEAST_FAULTS:
            samples.notices.append(
                f"in a fresh process this step takes {fresh_us / expected_us:.1f} times as long, "
                "because memory that is freed goes back to the system and is fetched again page by "
                f"page; {KEEP_MEMORY} in the environment avoids that from the start"
            )
        runner.warm_ups = _warm_ups(expected_us)
        count = max(steps, min(MOST_STEPS, math.ceil(SET_SECONDS * 1e6 / max(expected_us, 1.0))))
        long = 3 * CHECKED_ROUNDS * expected_us > CHECK_SECONDS * 1e6
        held_out = max(CHECKED_ROUNDS - count if long else CHECKED_ROUNDS, 2, count // 2)

        first = runner.recorded()  # the first recording of a process sets things up
        # In a long step of long ops, the cost of recording is far below the noise.
        tells = expected_us < SHORT_US or usual_cost_us(first) > LEAST_COST * expected_us

        def calibrating(number: int) -> Round:
            progress("profiling", 0.1 + 0.7 * min(number, count) / (count + held_out))
            return runner.calibrating_round(tells)

        samples.rounds = _calm(calibrating, count, steps)
        # A module that stands at several places cannot be told apart by a clock around it.
        single = {paths[0] for paths in places(step.roots).values() if len(paths) == 1}
        chosen = heaviest_modules([r.recording for r in samples.rounds], single, CHECKED_MODULES)

        def checking(number: int) -> Round:
            done = count + min(number, held_out)
            progress("checking", 0.1 + 0.7 * done / (count + held_out))
            return runner.checking_round(chosen, turned=number % 2 == 1)

        samples.held_out = _calm(checking, held_out, 2)
        progress("shapes and memory", 0.85)
        samples.full = runner.recorded(shapes=True, memory=True, stacks=stacks)
    samples.compilation = watched.result(samples.full)
    samples.notices += watched.notices
    progress("accounting", 0.95)
    return samples


def _calm(take: Callable[[int], Round], wanted: int, least: int) -> list[Round]:
    """Rounds, of which `wanted` were not disturbed; disturbed ones are taken again.

    As often as there is time for. If all are disturbed, one is enough to say so.
    """
    rounds: list[Round] = []
    calm, begun_s = 0, time.perf_counter()
    while calm < wanted and len(rounds) < MOST_TRIES * wanted:
        late = time.perf_counter() - begun_s > RETAKE_SECONDS
        if late and (len(rounds) >= least or (rounds and not calm)):
            break
        rounds.append(take(len(rounds)))
        calm += rounds[-1].lost <= TOLERATED
    return rounds


@contextmanager
def _without_gc() -> Iterator[None]:
    """Python collects its young garbage before the step, not in the middle of it."""
    was_enabled = gc.isenabled()
    gc.collect(1)  # all generations would take longer than many steps
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@dataclass(kw_only=True)
class _Runner:
    """Runs a step in the ways a profile needs.

    A short step is run a few more times just before it is measured: starting the profiler and
    collecting garbage leave cold caches, which a running loop does not have.
    """

    step: Step
    warm_ups: int = 0
    watch: CoreWaiting = field(default_factory=CoreWaiting)
    lost: float = 0.0  # the largest share of one step since it was last set to 0
    meter: FaultMeter = field(default_factory=FaultMeter)
    faults: FaultCount | NotMeasured = UNCOUNTED  # of the step that was timed last

    def calibrating_round(self, tells: bool) -> Round:
        """`tells`: whether the step can say what an event costs, and what a module's does."""
        self.lost = 0.0
        plain_us = self.timed()
        ops_us = step_us(self.recorded(modules=False)) if tells else None
        recording = self.recorded()
        return self._round(plain_us, recording, ops_us=ops_us)

    def checking_round(self, paths: Sequence[str], turned: bool) -> Round:
        """Measures a round in alternating order, so that neither side gains from coming first."""
        self.lost = 0.0
        if turned:
            alone_us = self.modules_alone(paths) if paths else {}
            recording, plain_us = self.recorded(), self.timed()
        else:
            plain_us, recording = self.timed(), self.recorded()
            alone_us = self.modules_alone(paths) if paths else {}
        return self._round(plain_us, recording, alone_us=alone_us)

    def _round(self, plain_us: float, recording: Recording, **more: Any) -> Round:
        lost, faults = self.lost, self.faults
        return Round(plain_us=plain_us, recording=recording, lost=lost, faults=faults, **more)

    def timed(self) -> float:
        """µs of one step without the profiler; notes its page faults."""
        with _without_gc():
            self._ready()
            self.meter.begin()
            begun = time.perf_counter()
            self.step.run()
            cuda_wait()
            elapsed_us = 1e6 * (time.perf_counter() - begun)
            self.faults = self.meter.taken()
            self._done()
            return elapsed_us

    def recorded(self, modules: bool = True, **options: bool) -> Recording:
        self.step.prepare()  # what this frees is not part of the recording
        with _without_gc(), instrumented(self.step.roots if modules else ()):
            return record(self.step.run, self._ready, self._done, **options)

    def modules_alone(self, paths: Sequence[str]) -> dict[str, float]:
        """µs of one step in some modules, by a bare clock around their forward.

        A clock takes half a microsecond, so in a very short step each module gets its own run.
        """
        found: dict[str, float] = {}
        for group in [[path] for path in paths] if self.warm_ups > 1 else [paths]:
            with _without_gc(), _clocked(self.step.roots, group) as spent:
                self._ready()
                spent.update(dict.fromkeys(group, 0.0))
                self.step.run()
                self._done()
            found.update({path: 1e6 * seconds for path, seconds in spent.items()})
        return found

    def _ready(self) -> None:
        """Warms up; what runs next is measured."""
        # Asking the system leaves cold caches, which would slow a very short step.
        short = self.warm_ups > 1
        if short:
            self.watch.begin()
        for _ in range(self.warm_ups):
            self.step.prepare()
            self.step.run()
            cuda_wait()
        self.step.prepare()
        if not short:
            self.watch.begin()

    def _done(self) -> None:
        """What was measured has ended."""
        self.lost = max(self.lost, self.watch.lost())


def _warm_ups(usual_us: float) -> int:
    """How often a step that takes this long is run before it is measured."""
    if usual_us >= SHORT_US:
        return 0
    return min(MOST_WARM_UPS, max(1, math.ceil(WARM_US / max(usual_us, 1.0))))


def _steady_heap() -> None:
    """Allocates and frees one large block, as any program has that ever freed a large tensor.

    Until then glibc gives the memory of every tensor above 128 KB back to the system when it is
    freed, and each step pays for thousands of page faults: six pointwise ops on 1 MB took 740 µs,
    and 110 afterwards. The profiler must not decide which of the two a step gets.
    """
    try:
        libc = ctypes.CDLL(None)
        libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
        libc.free.argtypes = [ctypes.c_void_p]
        libc.free(libc.malloc(LARGE_BLOCK_BYTES))
    except (OSError, AttributeError, TypeError):
        return  # another system; its allocator is as it is


def _timed_faults(runner: _Runner) -> tuple[float, int]:
    """µs of a step, and its page faults; 0 if the system does not count them."""
    us = runner.timed()
    return us, 0 if isinstance(runner.faults, NotMeasured) else runner.faults.faults


def _settled_us(runner: _Runner) -> float:
    """Runs until a step is no longer much faster than the one before; its µs."""
    before = runner.timed()
    for _ in range(5):
        now = runner.timed()
        if now > 0.9 * before:
            return min(now, before)
        before = now
    return before


@contextmanager
def _clocked(roots: Roots, paths: Sequence[str]) -> Iterator[dict[str, float]]:
    """Inside, seconds spent in the modules at `paths` add up in what is yielded.

    With a GPU, a module begins when nothing is queued there, and ends when its kernels have.
    """
    spent = dict.fromkeys(paths, 0.0)

    def clock(at: list[str], forward: Forward) -> Forward | None:
        path = at[0]
        if len(at) > 1 or path not in spent:
            return None

        def timed(*args: Any, **kwargs: Any) -> Any:
            cuda_wait()
            begun = time.perf_counter()
            try:
                made = forward(*args, **kwargs)
                cuda_wait()
                return made
            finally:
                spent[path] += time.perf_counter() - begun

        return timed

    with shadowed(roots, clock):
        yield spent
