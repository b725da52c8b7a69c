"""An interrupt at any moment leaves the model, random numbers and modes as they were."""

from __future__ import annotations

import contextlib
import gc
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any

import pytest
import torch
from tests.support.serving_state import Stateful, snapshot
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import torchweld as tw
from torchweld.core import interrupt_safety
from torchweld.core.interrupt_safety import Apart, undisturbed

X = torch.linspace(-1, 1, 32).view(4, 8)
POINTS = 30  # at which each operation is interrupted

# What is raised in a callback of a weak reference, Python reports and forgets: torch has some.
LOST = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def process() -> list[Any]:
    """What an operation may switch, of the process and of this thread."""
    return [
        hash(bytes(torch.get_rng_state().tolist())),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch._C._len_torch_dispatch_stack(),
        torch._C._len_torch_function_stack(),
        torch.utils._python_dispatch.is_in_torch_dispatch_mode(),
        [len(hooks) for hooks in interrupt_safety._HOOKS_OF_ALL_MODULES],
        torch._C._dispatch_tls_local_exclude_set().has(torch._C.DispatchKey.ADInplaceOrView),
        torch.get_num_threads(),
        gc.isenabled(),
        id(warnings.filters),
        list(warnings.filters),
    ]


def check_same(now: Any, before: Any, when: str) -> None:
    for seen, expected in zip(now, before, strict=True):
        others = [pair for pair in zip(seen, expected, strict=False) if pair[0] != pair[1]]
        assert not others[:3], f"interrupted at {when}"
        assert len(seen) == len(expected)


class Lines:
    """Counts the lines that this thread runs, and raises at the one that was asked for."""

    def __init__(self, at: int = -1) -> None:
        self.count, self._at = 0, at

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line":
            self.count += 1
            if self.count == self._at:
                raise KeyboardInterrupt
        return self

    def run(self, operation: Callable[[nn.Module], object], model: nn.Module) -> bool:
        """Whether the operation was interrupted."""
        before = sys.gettrace()
        # A collection runs callbacks, hypothesis' for one. Their lines are not the operation's, and
        # an interrupt in them is swallowed.
        collects = gc.isenabled()
        gc.disable()
        sys.settrace(self)
        try:
            operation(model)
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(before)
            if collects:
                gc.enable()
        return False


def operations() -> dict[str, Callable[[], tuple[nn.Module, Callable[[nn.Module], object]]]]:
    """Each with a model that is prepared for it."""

    def plain() -> nn.Module:
        return Stateful().eval()

    def welded() -> nn.Module:
        model = plain()
        return tw.apply(model, tw.plan(model, X, force=True))

    def applied(model: nn.Module) -> Callable[[nn.Module], object]:
        plan = tw.plan(model, X, force=True)
        return lambda m: tw.apply(m, plan)

    def over() -> tuple[nn.Module, Callable[[nn.Module], object]]:
        model = welded()
        return model, applied(model)

    def fresh() -> tuple[nn.Module, Callable[[nn.Module], object]]:
        model = plain()
        return model, applied(model)

    return {
        "find": lambda: (plain(), lambda m: tw.find(m, X)),
        "find in training": lambda: (plain(), lambda m: tw.find(m, X, training=True)),
        "find in a welded model": lambda: (welded(), lambda m: tw.find(m, X)),
        "plan": lambda: (welded(), lambda m: tw.plan(m, X, force=True)),
        "apply": fresh,
        "apply over what is welded": over,
        "undo": lambda: (welded(), tw.undo),
    }


def untraced(_: Apart, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`Apart.__call__`, without a look at the lines that it runs.

    No handler runs there. What a trace raises there can pass through torch's dispatcher, which
    then aborts the process: which lines are met depends on how many there are in all.
    """
    tracing = sys.gettrace()
    sys.settrace(None)
    try:
        return function(*args, **kwargs)
    finally:
        sys.settrace(tracing)


@LOST
@pytest.mark.parametrize("name", operations())
def test_an_interrupt_at_any_line_leaves_everything_as_it_was(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Apart, "__call__", untraced)
    # In a thread of its own: what a trace raises at the end of an `except`, Python 3.11 keeps as
    # the exception that the thread is handling, and all later ones would be raised "during" it.
    with ThreadPoolExecutor(1) as pool:
        pool.submit(_interrupt_at_any_line, name).result()


def _interrupt_at_any_line(name: str) -> None:
    build = operations()[name]
    for _ in range(3):  # what is made once is made by then
        counting = Lines()
        model, operation = build()
        with torch.random.fork_rng():
            counting.run(operation, model)
    model, operation = build()
    # The last lines are those that put things back.
    total = counting.count
    last = range(max(total - POINTS // 2, 1), total + 1)
    interrupted = 0
    for at in [*range(1, total, max(total // (POINTS // 2), 1)), *last]:
        before = snapshot(model), process()
        stopped = Lines(at).run(operation, model)
        interrupted += stopped
        if stopped:
            check_same((snapshot(model), process()), before, f"line {at} of {total}")
        else:
            model, operation = build()
    assert interrupted > POINTS // 3
    assert operation(model) is not None


def test_an_interrupt_at_any_line_of_a_mode_leaves_no_mode_and_no_hook() -> None:
    """All lines of a short call: torch's counter of FLOPs, entered, used and left."""
    model = nn.Linear(8, 8).eval()

    @undisturbed
    def counted(model: nn.Module) -> object:
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            model(X)
        return counter.get_total_flops()

    with ThreadPoolExecutor(1) as pool:
        pool.submit(_interrupt_at_every_line, counted, model).result()


def _interrupt_at_every_line(operation: Callable[[nn.Module], object], model: nn.Module) -> None:
    for _ in range(2):  # what is made once is made by then
        counting = Lines()
        counting.run(operation, model)
    assert counting.count > 100
    for at in range(1, counting.count + 1):
        before = process()
        assert Lines(at).run(operation, model)
        check_same([process()], [before], f"line {at} of {counting.count}")


class TooLong(Exception):  # noqa: N818
    """An ordinary exception, as a user's own timeout would be."""


# Undoing is over too soon: the signal would come before, or after.
@LOST
@pytest.mark.parametrize("name", [name for name in operations() if name != "undo"])
def test_a_signal_at_any_moment_leaves_everything_as_it_was(name: str) -> None:
    def raising(*_: object) -> None:
        raise TooLong

    model, operation = operations()[name]()
    before_handler = signal.signal(signal.SIGALRM, raising)
    interrupted = 0
    try:
        for step in range(30):
            before = snapshot(model), process()
            stopped = False
            try:
                signal.setitimer(signal.ITIMER_REAL, 1e-5 * 1.6**step)
                operation(model)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except TooLong:
                stopped = True
            interrupted += stopped
            if not stopped:
                break
            check_same((snapshot(model), process()), before, f"{1e-5 * 1.6**step} s")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before_handler)
    assert interrupted


def test_a_timeout_is_no_reason_to_refuse_a_block() -> None:
    class Slow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.calls = nn.Linear(8, 8), 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not isinstance(x, torch.Tensor) or type(x) is not torch.Tensor:
                signal.raise_signal(signal.SIGALRM)  # while it is traced
            y: torch.Tensor = self.inner(x)
            return y

    def raising(*_: object) -> None:
        raise TooLong

    before = signal.signal(signal.SIGALRM, raising)
    try:
        with pytest.raises(TooLong):
            tw.find(Slow(), X)
    finally:
        signal.signal(signal.SIGALRM, before)


# ---- a thread of its own ----


def test_what_runs_apart_has_the_modes_of_its_caller() -> None:
    with Apart() as apart:
        with torch.no_grad(), torch.device("meta"):
            assert apart(torch.zeros, 2).is_meta
            assert not apart(torch.is_grad_enabled)
        with torch.inference_mode():
            assert apart(torch.is_inference_mode_enabled)
        assert apart(torch.is_grad_enabled)
        assert not apart(torch.zeros, 2).is_meta
        assert apart(threading.get_ident) != threading.get_ident()


def test_what_is_raised_apart_is_raised_here() -> None:
    def failing() -> None:
        raise KeyError("lost")

    with Apart() as apart:
        with pytest.raises(KeyError, match="lost"):
            apart(failing)
        assert apart(int, "3") == 3


def test_an_interrupt_waits_for_what_runs_apart() -> None:
    ended = []

    def slow() -> None:
        signal.raise_signal(signal.SIGINT)
        threading.Event().wait(0.1)
        ended.append(True)

    with contextlib.suppress(KeyboardInterrupt), Apart() as apart:
        apart(slow)
    assert ended


def test_no_thread_is_left_behind() -> None:
    before = len(sys._current_frames())
    for _ in range(3):
        tw.find(nn.Linear(8, 8), X)
    for _ in range(100):
        if len(sys._current_frames()) <= before:
            break
        time.sleep(0.05)
    assert len(sys._current_frames()) <= before
