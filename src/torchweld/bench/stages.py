"""Where sides run: each in a worker process, or all in this one. `open_stage` chooses.

Runtimes outside of PyTorch, and torch.compile, need a process each, and then every side gets one:
pools of threads would disturb each other, and compilers change the process they run in. If only
eager and our own backends take part, they run in this process, and nothing has to start.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from torchweld.bench.runtime_server import RuntimeServer, serve_runtime
from torchweld.bench.runtimes.runtime_names import RUNTIMES, Runtimes
from torchweld.bench.workers.worker_process import WorkerError, WorkerProcess
from torchweld.bench.workers.worker_server import one_line
from torchweld.core.interrupts import is_interrupt
from torchweld.timing import Side


class Stage(Protocol):
    """Sides by name: started, asked, timed."""

    threads: int

    @property
    def names(self) -> list[str]: ...
    def start(self, names: Iterable[str]) -> dict[str, str]: ...
    def ask(self, name: str, command: str, *arguments: Any) -> Any: ...
    def side(self, name: str, cold: bool = False) -> Side: ...
    def park_all(self) -> None: ...


class ProcessStage:
    """A process for every side, of which at most one runs; the others are stopped."""

    def __init__(self, threads: int, runtimes: Runtimes = RUNTIMES) -> None:
        self.threads = threads
        self._runtimes = runtimes
        self.workers: dict[str, WorkerProcess] = {}
        self._running: WorkerProcess | None = None

    def __enter__(self) -> ProcessStage:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.workers.values():
            worker.end()

    @property
    def names(self) -> list[str]:
        return list(self.workers)

    def start(self, names: Iterable[str]) -> dict[str, str]:
        """Starts these, all at the same time, and parks them; who cannot start, and why."""
        self.park_all()
        new = list(names)
        for name in new:
            make = self._runtimes[name]
            self.workers[name] = WorkerProcess(name, serve_runtime, make, self.threads)
        reasons = {}
        for name in new:
            try:
                self.workers[name].ready()
                self.workers[name].park()
            except WorkerError as error:  # noqa: PERF203
                self.workers.pop(name).end()
                reasons[name] = str(error)
        return reasons

    def ask(self, name: str, command: str, *arguments: Any) -> Any:
        """The answer of one side, all others being parked."""
        worker = self.workers[name]
        if self._running is not worker:
            self.park_all()
            worker.wake()
            self._running = worker
        return worker.ask(command, *arguments)

    def side(self, name: str, cold: bool = False) -> Side:
        return ProcessSide(self, name, cold)

    def park_all(self) -> None:
        if self._running is not None:
            self._running.park()
            self._running = None


class ProcessSide:
    """What a side of a `ProcessStage` has prepared, for `torchweld.compare` to drive."""

    def __init__(self, stage: ProcessStage, name: str, cold: bool = False) -> None:
        self._stage, self._name, self._cold = stage, name, cold
        self.preempted = False

    def time(self, calls: int) -> float:
        seconds, self.preempted = self._stage.ask(self._name, "visit", calls, self._cold)
        return float(seconds)


class LocalStage:
    """All sides in this process, one `RuntimeServer` each."""

    def __init__(self, threads: int, runtimes: Runtimes = RUNTIMES) -> None:
        self.threads, self._runtimes = threads, runtimes
        self._servers: dict[str, RuntimeServer] = {}

    def __enter__(self) -> LocalStage:
        return self

    def __exit__(self, *_: object) -> None:
        self._servers.clear()

    @property
    def names(self) -> list[str]:
        return list(self._servers)

    def start(self, names: Iterable[str]) -> dict[str, str]:
        """Who cannot start, and why."""
        if torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)
        reasons = {}
        for name in names:
            try:
                self._servers[name] = RuntimeServer(self._runtimes[name])
            except Exception as error:  # noqa: PERF203 (whatever a runtime raises)
                if is_interrupt(error):
                    raise
                reasons[name] = one_line(error)
        return reasons

    def ask(self, name: str, command: str, *arguments: Any) -> Any:
        try:
            with torch.no_grad():
                return getattr(self._servers[name], command)(*arguments)
        except Exception as error:  # as from a process: one line that says what
            if is_interrupt(error):
                raise
            raise WorkerError(one_line(error)) from error

    def side(self, name: str, cold: bool = False) -> Side:
        return LocalSide(self._servers[name], cold)

    def park_all(self) -> None:
        """Nothing of this process runs by itself."""


class LocalSide:
    """What a server of this process has prepared, as a side of `torchweld.compare`."""

    def __init__(self, server: RuntimeServer, cold: bool) -> None:
        self._server, self._cold = server, cold
        self.preempted = False

    def time(self, calls: int) -> float:
        server = self._server
        with torch.no_grad():
            if self._cold:
                seconds, self.preempted = server.visit(calls, True)
                return seconds
            server.show()
            seconds = server.side.time(calls)
        self.preempted = server.side.preempted
        return seconds


def open_stage(
    names: Sequence[str], threads: int, runtimes: Runtimes = RUNTIMES
) -> AbstractContextManager[Stage]:
    """A stage on which all of `names` can run; not started yet."""
    if any(runtimes[name]().apart for name in names):
        return ProcessStage(threads, runtimes)
    return LocalStage(threads, runtimes)
