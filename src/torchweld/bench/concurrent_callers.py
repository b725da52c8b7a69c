"""Several threads that call one thing at once, as the workers of a server do."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from torchweld.core.errors import TorchweldError
from torchweld.machine.device_waiting import gpu_in_use, wait_for_gpu

Call = Callable[[], Any]
Task = tuple[Call, float]


class Callers:
    """`count` threads, kept from window to window: so are the pools that calls of theirs make.

    They have to be ended before anything else is timed: while a process has more threads in its
    pools than there are cores, OpenMP sleeps at barriers instead of spinning. Eager's 8 ×
    256→1024→256 took twice as long beside two callers that were idle (two cores, Zen 3).
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._answers: queue.SimpleQueue[tuple[int, float] | BaseException] = queue.SimpleQueue()
        self._tasks: list[queue.SimpleQueue[Task | None]] = [
            queue.SimpleQueue() for _ in range(count)
        ]
        self._threads = [
            threading.Thread(target=self._work, args=(tasks,), daemon=True) for tasks in self._tasks
        ]
        try:
            for thread in self._threads:
                thread.start()
        except RuntimeError as error:  # the system gives no more
            self._threads = [thread for thread in self._threads if thread.ident is not None]
            self.end()
            raise TorchweldError(
                f"{len(self._threads)} of {count} callers could be started ({error}); give fewer"
            ) from error

    def rate(self, call: Call, seconds: float) -> float:
        """Calls per second that all of them together finish, in a window of about `seconds`."""
        for tasks in self._tasks:
            tasks.put((call, seconds))
        answers = [self._answers.get() for _ in self._tasks]
        total = 0.0
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
            calls, taken_s = answer
            total += calls / taken_s
        return total

    def end(self) -> None:
        for tasks in self._tasks:
            tasks.put(None)
        for thread in self._threads:
            thread.join()

    def _work(self, tasks: queue.SimpleQueue[Task | None]) -> None:
        torch.set_grad_enabled(False)  # of this thread alone
        while (task := tasks.get()) is not None:
            call, seconds = task
            on_gpu = gpu_in_use()
            try:
                calls, begun_s = 0, time.perf_counter()
                while (taken_s := time.perf_counter() - begun_s) < seconds or not calls:
                    call()
                    if on_gpu:  # a caller has its answer when the kernels have run
                        wait_for_gpu()
                    calls += 1
                self._answers.put((calls, taken_s))
            except BaseException as error:
                self._answers.put(error)


_team: Callers | None = None


def callers(count: int) -> Callers:
    """The team of this process, shared by all that is measured in it."""
    global _team
    if _team is None or _team.count != count:
        dismiss()
        _team = Callers(count)
    return _team


def dismiss() -> None:
    """Ends the team, if there is one."""
    global _team
    if _team is not None:
        _team.end()
        _team = None
