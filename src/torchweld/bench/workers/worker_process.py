"""A worker process as its parent sees it: started, asked, parked, woken, ended.

A pool of threads spins for milliseconds after each call, waiting for the next, and would take the
cores from whatever is measured then. A process that was sent SIGSTOP uses no processor at all, and
later goes on with its pool as it was.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from multiprocessing import Pipe
from types import MappingProxyType
from typing import Any

from torchweld.bench.workers.worker_messages import receive_value
from torchweld.core.errors import TorchweldError

MAIN = "from torchweld.bench.workers.worker_server import main; main()"
LOG_LINES = 5

# torch.compile's compilers would be processes of their own, which nobody parks. Files in the
# current folder must not be imported in place of libraries.
ENVIRONMENT = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "PYTHONSAFEPATH": "1"}
NOTHING: Mapping[str, str | None] = MappingProxyType({})


class WorkerError(TorchweldError):
    """A worker could not do what it was asked, or its process has ended; the message says why."""


class WorkerProcess:
    """A process that holds what `make(*arguments)` gives, and answers commands: its methods.

    `make` must be importable by name. The process starts at once and runs until `park`. `name` is
    for messages. It ends with the parent, and at the end of a `with` block. `environment` has what
    differs from ours; None: it is not there.
    """

    def __init__(
        self,
        name: str,
        make: Callable[..., Any],
        *arguments: Any,
        environment: Mapping[str, str | None] = NOTHING,
    ) -> None:
        self.name = name
        self._ready = False
        whole: dict[str, str | None] = {**os.environ, **ENVIRONMENT, **environment}
        self._pipe, theirs = Pipe()
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115, until `end`
        try:
            self._pipe.send((make, arguments))  # small: it waits in the pipe for its reader
            self._process = subprocess.Popen(
                [sys.executable, "-c", MAIN, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={name: text for name, text in whole.items() if text is not None},
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
            )
        except BaseException:
            self._pipe.close()
            self._log.close()
            raise
        finally:
            theirs.close()

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    @property
    def pid(self) -> int:
        return self._process.pid

    def ready(self) -> None:
        """Waits until the object is made; raises a WorkerError if that fails."""
        if not self._ready:
            self._receive()
            self._ready = True

    def ask(self, command: str, *arguments: Any) -> Any:
        self.ready()
        try:
            self._pipe.send((command, arguments))
        except OSError as error:
            raise self._gone() from error
        return self._receive()

    def park(self) -> None:
        """Stops the process and waits until it has stopped."""
        if self._process.returncode is not None:
            return
        os.kill(self._process.pid, signal.SIGSTOP)
        _, status = os.waitpid(self._process.pid, os.WUNTRACED)
        if not os.WIFSTOPPED(status):
            self._process.returncode = os.waitstatus_to_exitcode(status)

    def wake(self) -> None:
        if self._process.returncode is None:
            os.kill(self._process.pid, signal.SIGCONT)

    def end(self) -> None:
        if self._process.returncode is None:
            self._process.kill()
            self._process.wait()
        self._pipe.close()
        self._log.close()

    def _receive(self) -> Any:
        try:
            done, value = receive_value(self._pipe)
        except (EOFError, OSError) as error:
            raise self._gone() from error
        if not done:
            raise WorkerError(value)
        return value

    def _gone(self) -> WorkerError:
        code = self._process.wait()
        self._log.seek(0)
        lines = [line.strip() for line in self._log if line.strip()][-LOG_LINES:]
        return WorkerError(f"the process of {self.name} ended with {code}: {' | '.join(lines)}")
