"""Where sides run: in processes of their own, or in this one. `open_stage` chooses.

What is foreign to PyTorch, and torch.compile, get a process each, and then so does everybody:
pools of threads would disturb each other, and compilers change the process they run in. Where only
eager and our own backends take part, this process does, and nothing has to start.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Protocol

import torch

from torchweld.bench.worker import Server, said
from torchweld.bench.worker_processes import BLOCK_RUNTIMES, Stage, WorkerError
from torchweld.core.interrupts import is_interrupt
from torchweld.timing import Side

FOREIGN = ("onnxruntime", "openvino", "compile")


class AnyStage(Protocol):
    """Sides by name: started, asked, timed."""

    threads: int

    @property
    def names(self) -> list[str]: ...
    def start(self, names: Iterable[str]) -> dict[str, str]: ...
    def ask(self, name: str, command: str, *arguments: Any) -> Any: ...
    def side(self, name: str, cold: bool = False) -> Side: ...
    def park_all(self) -> None: ...


class LocalStage:
    """All sides in this process, one `Server` each; the same interface as `processes.Stage`."""

    def __init__(self, threads: int, runtimes: str = BLOCK_RUNTIMES) -> None:
        self.threads, self._runtimes = threads, runtimes
        self._servers: dict[str, Server] = {}

    def __enter__(self) -> LocalStage:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._servers.clear()

    @property
    def names(self) -> list[str]:
        return list(self._servers)

    def start(self, names: Iterable[str]) -> dict[str, str]:
        """Who cannot start, and why."""
        reasons = {}
        for name in names:
            try:
                self._servers[name] = Server(name, self.threads, self._runtimes)
            except Exception as error:  # noqa: PERF203 (whatever a runtime raises)
                if is_interrupt(error):
                    raise
                reasons[name] = said(error)
        return reasons

    def ask(self, name: str, command: str, *arguments: Any) -> Any:
        try:
            with torch.no_grad():
                return getattr(self._servers[name], command)(*arguments)
        except Exception as error:  # as from a process: one line that says what
            if is_interrupt(error):
                raise
            raise WorkerError(said(error)) from error

    def side(self, name: str, cold: bool = False) -> Side:
        return LocalSide(self._servers[name], cold)

    def park_all(self) -> None:
        """Nothing of this process runs by itself."""


class LocalSide:
    """What a server of this process has prepared, as a side of `torchweld.compare`."""

    def __init__(self, server: Server, cold: bool) -> None:
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


def is_foreign(name: str) -> bool:
    """Whether it gets a process of its own; `compile-…` and `compile:…` are compile's."""
    return name.startswith(FOREIGN)


def open_stage(
    names: Sequence[str], threads: int, runtimes: str = BLOCK_RUNTIMES
) -> AbstractContextManager[AnyStage]:
    """A stage on which all of `names` can run; not started yet."""
    if any(map(is_foreign, names)):
        return Stage(threads, runtimes=runtimes)
    return LocalStage(threads, runtimes)
