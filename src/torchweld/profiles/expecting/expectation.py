"""`tw.expect`: guess what a piece of code launches, then look. As a test, or to learn.

In: guesses such as `linear=3, ops="<=12"`, and a `with` block. Out: nothing if they hold; else an
`ExpectationError` with guess and truth side by side and the ops that broke it. `launch_counts.py`
says what is counted, `launch_guesses.py` how guesses are written and judged.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterable, Mapping
from contextlib import ContextDecorator, ExitStack, suppress
from difflib import get_close_matches
from fnmatch import fnmatchcase
from itertools import count
from types import TracebackType

from torch import nn

from torchweld.core.argument_checks import check_flags, check_model, misfit
from torchweld.core.errors import NotMeasuredError, TorchweldError
from torchweld.profiles.attributing.launch_counts import (
    Launch,
    counts_of,
    launches_of,
    nodes_of_profile,
    nodes_of_recording,
)
from torchweld.profiles.expecting.launch_guesses import (
    Guess,
    Verdict,
    judge,
    parse_expectations,
    parse_guesses,
)
from torchweld.profiles.profile import Profile
from torchweld.profiles.recorded_events import Recording
from torchweld.profiles.recording.module_instrument import instrumented, is_compiled, places
from torchweld.profiles.recording.torch_profiler import Recorder, annotated

__all__ = ["Expectation", "ExpectationError", "check_profile", "expect", "parse_expectations"]


class ExpectationError(AssertionError):
    """What ran is not what was expected. `verdict` has the guesses and the truth.

    Not a TorchweldError: code that handles those must not swallow a failed test.
    """

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(str(verdict))
        self.verdict = verdict


def check_profile(
    profile: Profile, guesses: Mapping[str, int | str], *, backward: bool = False
) -> Verdict:
    """Checks guesses, as `expect` takes them, against what a profile recorded.

    It counts the ops that do work (the leaf rule of `op_nesting.py`), only of the forward pass
    unless `backward`: of the one step of a live profile; of the last whole step of a trace, or of
    all of it if it has fewer than two steps. Times do not matter. Raises TorchweldError for a
    counter that does not exist.
    """
    parsed = parse_guesses(guesses)
    launches = launches_of(nodes_of_profile(profile))
    return judge(parsed, {}, [x for x in launches if backward or x.forward])


# The open expectations, outermost first. All belong to one thread, since torch has one profiler.
_open: list[Expectation] = []
_entering = threading.Lock()
_numbers = count()


class Expectation(ContextDecorator):
    """What `expect` gives: enter it once. `counts` and `ops` are the truth, known at the end."""

    def __init__(
        self,
        guesses: Mapping[str, int | str],
        *,
        model: nn.Module | None = None,
        modules: Mapping[str, Mapping[str, int | str]] | None = None,
        backward: bool = False,
        where: str = "",
    ) -> None:
        if model is not None:
            check_model("expect", model, scripted=True)
        if modules is not None and not isinstance(modules, Mapping):
            raise misfit("expect", "modules", modules, "a mapping of patterns to guesses")
        for pattern, inner in (modules or {}).items():
            if not isinstance(pattern, str) or not isinstance(inner, Mapping):
                allowed = 'guesses by path, as in {"layers.*.mlp": dict(linear=2)}'
                raise misfit("expect", f"modules[{pattern!r}]", inner, allowed)
        check_flags("expect", backward=backward)
        self._guesses = parse_guesses(guesses)
        self._model = model
        self._modules = _matched(model, modules or {})
        self._backward = backward
        self._where = where
        self._again = (guesses, modules)
        self._mark = f"torchweld expect {next(_numbers)}"
        self._around: ExitStack | None = None
        self._recorder: Recorder | None = None
        self._within: list[Expectation] = []  # of the outermost: the nested ones that ended well
        self._verdict: Verdict | None = None
        self._used = False
        self._thread = 0

    def _recreate_cm(self) -> Expectation:
        """Each call of a decorated function is a separate block."""
        guesses, modules = self._again
        return Expectation(
            guesses,
            model=self._model,
            modules=modules,
            backward=self._backward,
            where=self._where,
        )

    @property
    def verdict(self) -> Verdict:
        if self._verdict is None:
            raise TorchweldError(
                "what ran is known when the block has ended without an error; a block inside "
                "another is looked at when the outermost ends"
            )
        return self._verdict

    @property
    def counts(self) -> dict[str, int]:
        """Every counter -> how often."""
        return counts_of(self.verdict.launches)

    @property
    def ops(self) -> tuple[Launch, ...]:
        """All work that was launched, in order."""
        return tuple(x for x in self.verdict.launches if x.works)

    def __enter__(self) -> Expectation:
        if self._used:
            raise TorchweldError("an expectation serves one block; make another with tw.expect")
        self._used = True
        self._thread = threading.get_ident()
        with _entering, ExitStack() as around:
            self._refuse_misplaced()
            if self._model is not None:
                around.enter_context(instrumented([("", self._model)]))
            if not _open:
                self._recorder = Recorder(shapes=True)
                self._recorder.start()
                around.enter_context(self._recorder.step())
            around.enter_context(annotated(self._mark))
            self._around = around.pop_all()
            _open.append(self)
        return self

    def _refuse_misplaced(self) -> None:
        if _open and _open[0]._thread != self._thread:
            raise TorchweldError(
                "another thread is inside tw.expect, and torch has one profiler for all; let one "
                "end before the next begins"
            )
        if _open and self._model is not None:
            raise TorchweldError(
                "model= was given to an expectation inside another; give it to the outermost, "
                "and guess there about its modules"
            )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        __tracebackhide__ = True  # pytest shows the user's lines instead of these
        assert self._around is not None
        self._around.close()
        if self._recorder is None:
            self._leave(error)
            return
        _open.clear()
        if error is not None:
            # Whatever the profiler raises now, the user must see the error of the block.
            with suppress(Exception):
                self._recorder.cancel()
            return
        recording = self._recorder.stop()
        launches = launches_of(nodes_of_recording(recording))
        blocks = [*self._within, self]
        for block in blocks:
            block._look(recording, launches)
        for block in blocks:
            if not block.verdict.holds:
                raise ExpectationError(block.verdict)

    def _leave(self, error: BaseException | None) -> None:
        """The end of a block inside another, which will look at it."""
        if self in _open:
            _open.remove(self)
            if error is None:
                _open[0]._within.append(self)
        elif error is None:
            raise TorchweldError(
                "the expectation around this one has ended already, so this one was not looked "
                "at; end them in the opposite order"
            )

    def _look(self, recording: Recording, launches: Iterable[Launch]) -> None:
        """Judges what ran in the block: by time, since a device's backward has its own thread."""
        events = recording.events
        if self._recorder is None:
            mark = next((event for event in events if event.name == self._mark), None)
            if mark is None:
                raise NotMeasuredError("the profiler lost sight of an expectation inside another")
            begin, end = mark.start_us, mark.end_us
            launches = [x for x in launches if begin <= events[x.node].start_us <= end]
        ran = [x for x in launches if self._backward or x.forward]
        # The error of a block inside another is raised far from it.
        where = self._where if self._recorder is None else ""
        self._verdict = judge(self._guesses, self._modules, ran, where)


def expect(
    *,
    model: nn.Module | None = None,
    modules: Mapping[str, Mapping[str, int | str]] | None = None,
    backward: bool = False,
    **guesses: int | str,
) -> Expectation:
    """States what a block of code launches; raises ExpectationError at its end if not.

    `with tw.expect(linear=3, pointwise="<=2", copies=0): model(x)`. The counters are those of
    docs/expect.md; a guess is a number or a range as text. The forward pass alone counts; with
    `backward=True` the backward pass and an optimizer's step do too. `modules` has guesses for
    every module whose path in `model` matches a pattern: `{"layers.*.mlp": dict(linear=2)}`.
    """
    caller = sys._getframe(1)
    where = f"{os.path.basename(caller.f_code.co_filename)}:{caller.f_lineno}"
    return Expectation(guesses, model=model, modules=modules, backward=backward, where=where)


def _matched(
    model: nn.Module | None, modules: Mapping[str, Mapping[str, int | str]]
) -> dict[str, dict[str, Guess]]:
    """Path of every module meant -> its guesses."""
    if not modules:
        return {}
    if model is None:
        raise TorchweldError(
            f"modules={dict(modules)!r} needs the model whose modules these are: give model= too"
        )
    seen = places([("", model)])
    paths = [path for given in seen.values() for path in given if path]
    found: dict[str, dict[str, Guess]] = {}
    for pattern, guesses in modules.items():
        parsed = parse_guesses(guesses)
        matching = [path for path in paths if fnmatchcase(path, pattern)]
        if not matching:
            near = get_close_matches(pattern, paths, n=5, cutoff=0.3)
            compiled = any(is_compiled(module) for module in seen)
            raise TorchweldError(
                f"no module of the model matches {pattern!r}; "
                + (f"the nearest are {', '.join(near)}" if near else f"it has {len(paths)} modules")
                + ("; modules inside a compiled region cannot be told apart" if compiled else "")
            )
        for path in matching:
            merged = found.setdefault(path, {})
            if twice := sorted(merged.keys() & parsed.keys()):
                raise TorchweldError(
                    f"two patterns of modules= guess {', '.join(twice)} for {path}; "
                    f"{pattern!r} is the second: make them match different modules"
                )
            merged.update(parsed)
    return found
