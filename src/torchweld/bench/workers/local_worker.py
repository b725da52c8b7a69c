"""The same as a `WorkerProcess`, without a process: for sides that do not disturb each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchweld.bench.workers.worker_process import WorkerError
from torchweld.bench.workers.worker_server import one_line
from torchweld.core.passing_exceptions import is_interrupt


class LocalWorker:
    """Holds what `make(*arguments)` gives, in this process. Commands run without gradients."""

    def __init__(self, name: str, make: Callable[..., Any], *arguments: Any) -> None:
        self.name = name
        self._make = lambda: make(*arguments)
        self.held: Any = None

    def ready(self) -> None:
        if self.held is None:
            self.held = self._answer(self._make)

    def ask(self, command: str, *arguments: Any) -> Any:
        return self._answer(lambda: getattr(self.held, command)(*arguments))

    def _answer(self, question: Callable[[], Any]) -> Any:
        try:
            with torch.no_grad():
                return question()
        except Exception as error:  # as from a process: one line that says what
            if is_interrupt(error):
                raise
            raise WorkerError(one_line(error)) from error

    def park(self) -> None:
        """Does nothing, because nothing of this process runs by itself."""

    def wake(self) -> None:
        """Does nothing, like `park`: there is no process to wake."""

    def end(self) -> None:
        self.held = None
