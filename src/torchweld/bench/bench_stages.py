"""Stages on which sides run: a process for each, or all in this one. `open_stage` chooses.

Runtimes outside of PyTorch, and torch.compile, need a process each, and then every side gets one:
pools of threads would disturb each other, and compilers change the process they run in. If only
eager and our own backends take part, they run in this process, and nothing has to start. In
training every side has its own process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from torchweld.bench.runtime_server import RuntimeServer, serve_runtime
from torchweld.bench.runtimes.runtime_names import RUNTIMES, Runtimes
from torchweld.bench.training_step import Malloc, malloc_environment
from torchweld.bench.workers.local_worker import LocalWorker
from torchweld.bench.workers.worker_process import NOTHING, WorkerError, WorkerProcess

Worker = WorkerProcess | LocalWorker


class Stage:
    """Sides by name: started, asked, timed. At most one runs; processes of the others are stopped.

    processes:   each side has a process of its own
    environment: of these processes, where it differs from ours
    """

    def __init__(
        self,
        threads: int,
        runtimes: Runtimes = RUNTIMES,
        *,
        processes: bool = False,
        environment: Mapping[str, str | None] = NOTHING,
    ) -> None:
        self.threads, self.processes, self.environment = threads, processes, environment
        self._runtimes = runtimes
        self.workers: dict[str, Worker] = {}
        self._running: Worker | None = None

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.workers.values():
            worker.end()

    @property
    def names(self) -> list[str]:
        """Who has started, and can be asked."""
        return list(self.workers)

    def start(self, names: Iterable[str]) -> dict[str, str]:
        """Starts these, processes all at the same time; gives who cannot start, and why."""
        self.park_all()
        new = list(names)
        for name in new:
            self.workers[name] = self._worker(name)
        reasons = {}
        for name in new:
            try:
                self.workers[name].ready()
                self.workers[name].park()
            except WorkerError as error:  # noqa: PERF203
                self.workers.pop(name).end()
                reasons[name] = str(error)
        return reasons

    def helper(self, name: str, make: Callable[..., Any], *arguments: Any) -> Worker:
        """A worker that is not a side, started where sides would be. The caller ends it."""
        self.park_all()
        if self.processes:
            return WorkerProcess(name, make, *arguments, environment=self.environment)
        return LocalWorker(name, make, *arguments)

    def _worker(self, name: str) -> Worker:
        make = self._runtimes[name]
        if self.processes:
            return self.helper(name, serve_runtime, make, self.threads)
        if torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)
        return self.helper(name, RuntimeServer, make)

    def ask(self, name: str, command: str, *arguments: Any) -> Any:
        """The answer of one side, all others being parked."""
        worker = self.workers[name]
        if self._running is not worker:
            self.park_all()
            worker.wake()
            self._running = worker
        return worker.ask(command, *arguments)

    def side(self, name: str, cold: bool = False) -> StageSide:
        return StageSide(self, name, cold)

    def park_all(self) -> None:
        if self._running is not None:
            self._running.park()
            self._running = None


class StageSide:
    """What a side has prepared, for `torchweld.compare` to drive."""

    def __init__(self, stage: Stage, name: str, cold: bool = False) -> None:
        self._stage, self._name, self._cold = stage, name, cold
        # After another process has run, a side has to warm up first.
        self._visit = stage.processes or cold
        self.preempted = False

    def time(self, calls: int) -> float:
        ask = self._stage.ask
        if self._visit:
            seconds, self.preempted = ask(self._name, "visit", calls, self._cold)
        else:
            seconds, self.preempted = ask(self._name, "time", calls)
        return float(seconds)


def open_stage(names: Sequence[str], threads: int, runtimes: Runtimes = RUNTIMES) -> Stage:
    """A stage on which all of `names` can run; not started yet."""
    return Stage(threads, runtimes, processes=any(runtimes[name]().apart for name in names))


def open_training_stage(threads: int, runtimes: Runtimes, malloc: Malloc) -> Stage:
    """Each side in a process of its own: heaps, page faults and peaks are those of one side."""
    return Stage(threads, runtimes, processes=True, environment=malloc_environment(malloc))
