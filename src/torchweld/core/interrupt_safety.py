"""Interrupts, at whatever moment they come, leave the process as it was.

A signal's handler may raise between any two steps of the main thread: KeyboardInterrupt, or a
timeout of the user's. `undisturbed` puts back what a call has switched for its thread or for the
process, even if the interrupt hits the code that puts it back. `Apart` runs code that must not stop
halfway, such as torch's tracer with its stacks of modes, in its own thread: no handler runs there,
and what the thread has switched ends with it.
"""

from __future__ import annotations

import _thread
import contextvars
import functools
import gc
import queue
import threading
import warnings
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, ParamSpec, TypeVar

import torch

from torchweld.core.model_state import random_numbers

_overrides: Any = torch.overrides
_dispatch: Any = torch.utils._python_dispatch
_DISPATCH_FLAGS = (
    "_is_in_torch_dispatch_mode",
    "_is_in_non_infra_torch_dispatch_mode",
    "_is_in_any_mode_without_ignore_compile_internals",
)
_modules: Any = torch.nn.modules.module
# Torch's counter of FLOPs registers hooks here, among others.
_HOOKS_OF_ALL_MODULES: tuple[dict[int, Any], ...] = (
    _modules._global_forward_pre_hooks,
    _modules._global_forward_hooks,
    _modules._global_forward_hooks_always_called,
    _modules._global_forward_hooks_with_kwargs,
    _modules._global_backward_pre_hooks,
    _modules._global_backward_hooks,
)

P = ParamSpec("P")
T = TypeVar("T")

_LOOK_S = 1.0  # how often a thread checks whether it is still needed


def undisturbed(function: Callable[P, T]) -> Callable[P, T]:
    """Afterwards random numbers, modes, hooks of all modules, threads and filters are as before."""

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        put_back = _state()
        # Twice: an interrupt may come while things are put back, or just before.
        try:
            try:
                return function(*args, **kwargs)
            finally:
                put_back()
        except BaseException:
            put_back()
            raise

    return wrapped


def _state() -> Callable[[], None]:
    """A function that puts everything back, any number of times."""
    put_random_numbers_back = random_numbers()
    grad, filters = torch.is_grad_enabled(), warnings.filters
    threads, collecting = torch.get_num_threads(), gc.isenabled()
    put_modes_back = _modes()
    hooks = [(there, set(there)) for there in _HOOKS_OF_ALL_MODULES]

    def put_back() -> None:
        put_random_numbers_back()
        put_modes_back()
        for there, before in hooks:
            for hook in there.keys() - before:
                there.pop(hook, None)
        torch._C._set_grad_enabled(grad)
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        if gc.isenabled() != collecting:
            (gc.enable if collecting else gc.disable)()
        if warnings.filters is not filters:
            warnings.filters = filters
            # Python then forgets what it cached for the other filters.
            with warnings.catch_warnings():
                pass

    return put_back


def _modes() -> Callable[[], None]:
    """Takes off the modes that were entered since: no `with` does, if its `__enter__` was hit."""
    dispatch_modes = torch._C._len_torch_dispatch_stack()
    function_modes = torch._C._len_torch_function_stack()
    # torch.compile decides by these flags whether it compiles at all.
    flags = {name: getattr(_dispatch, name) for name in _DISPATCH_FLAGS}

    def put_back() -> None:
        while torch._C._len_torch_dispatch_stack() > dispatch_modes:
            _dispatch._pop_mode()
        while torch._C._len_torch_function_stack() > function_modes:
            _overrides._pop_mode()
        vars(_dispatch).update(flags)
        _dispatch.set_is_in_mode_without_ignore_compile_internals(flags[_DISPATCH_FLAGS[-1]])

    return put_back


# ---- a thread without interrupts ----


class Apart:
    """A thread for what must not be interrupted: `Apart()(function, *args)` gives its result.

    An interrupt of the caller is raised as soon as the function at work has ended; a second one at
    once. Outside of the main thread, where no handler runs, nothing is handed over.
    """

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[_Task | None] | None = None

    def __enter__(self) -> Apart:
        return self

    def __exit__(self, *_: object) -> None:
        if self._tasks is not None:
            self._tasks.put(None)

    def __call__(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        if threading.get_ident() != threading.main_thread().ident:
            return function(*args, **kwargs)
        if self._tasks is None:
            # Kept before the thread starts: this queue tells it to end.
            tasks = self._tasks = queue.SimpleQueue()
            # A plain thread, since `Thread.start` can be interrupted while it holds a lock.
            _thread.start_new_thread(_work, (tasks, weakref.ref(self)))
        task = _Task(functools.partial(function, *args, **kwargs))
        try:
            self._tasks.put(task)
            task.running.acquire()
        except BaseException:
            task.cancelled = True
            if task.begun and not task.ended:  # else nobody would release the lock
                task.running.acquire()
            raise
        if task.error is not None:
            try:
                raise task.error
            finally:
                del task  # the error leads to this frame
        result: T = task.result
        return result


class _Task:
    """Something to do, with the modes that its caller has set for its own thread."""

    def __init__(self, run: Callable[[], Any]) -> None:
        self._run = run
        self._context = contextvars.copy_context()
        self._grad, self._inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        self._modes: list[Any] = _overrides._get_current_function_mode_stack()
        self.begun = self.cancelled = self.ended = False
        self.running = threading.Lock()  # until it is done
        self.running.acquire()
        self.result: Any = None
        self.error: BaseException | None = None

    def __call__(self) -> None:
        self.begun = True
        try:
            if self.cancelled:
                return
            with ExitStack() as stack:
                stack.enter_context(torch.inference_mode(self._inference))
                stack.enter_context(torch.set_grad_enabled(self._grad))
                for mode in self._modes:  # entered already: by the caller
                    _overrides._push_mode(mode)
                    stack.callback(_overrides._pop_mode)
                self.result = self._context.run(self._run)
        except BaseException as error:  # raised in the caller's thread
            self.error = error
        finally:
            self.ended = True
            self.running.release()


def _work(tasks: queue.SimpleQueue[_Task | None], owner: weakref.ref[Apart]) -> None:
    torch.get_num_threads()  # as many for this thread as for the others
    task: _Task | None = None
    # An interrupt may have kept the owner from saying that it is done. It has no __del__ for that:
    # an interrupt that came while it runs would be lost.
    while owner() is not None:
        try:
            task = tasks.get(timeout=_LOOK_S)
        except queue.Empty:
            continue
        if task is None:
            return
        task()
        task = None
