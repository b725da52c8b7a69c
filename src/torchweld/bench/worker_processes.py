"""The runtimes as processes, of which one runs at a time: all others are stopped by the kernel.

A pool of threads spins for milliseconds after each call, waiting for the next, and would take the
cores from whoever is measured then. A process that was sent SIGSTOP uses no processor at all, and
goes on with its pool as it was. `WorkerSide` is what `torchweld.compare` drives.
`stages.LocalStage` is the same without processes.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from multiprocessing import Pipe
from pathlib import Path
from types import TracebackType
from typing import Any

from torchweld.core.errors import TorchweldError
from torchweld.timing import Side

MAIN = "from torchweld.bench.worker import main; main()"
LOG_LINES = 5
BLOCK_RUNTIMES = "torchweld.bench.block_runtimes"
MODEL_RUNTIMES = "torchweld.bench.model_runtimes"

# Of every worker. The compilers of torch.compile would be processes of their own, which nobody
# parks; and what lies in the current folder is not to be imported in place of a library.
WORKER_ENVIRONMENT = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "PYTHONSAFEPATH": "1"}

# What torch, oneDNN and MKL heed on a CPU that has more. OpenVINO's oneDNN heeds it too, but
# neither its MLAS products nor those of ONNX Runtime can be told.
AVX2_ENVIRONMENT = {
    "TORCHWELD_ISA": "avx2",
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
}


class WorkerError(TorchweldError):
    """A worker could not do what it was asked, or is gone; the message says why."""


class Worker:
    """One runtime's process. It runs until `park`; `wake` makes it go on.

    `runtimes` is the module whose RUNTIMES has `name`; `folder` is where the process works.
    """

    def __init__(
        self,
        name: str,
        threads: int,
        environment: Mapping[str, str],
        runtimes: str,
        folder: Path | None = None,
    ) -> None:
        self.name = name
        self._pipe, theirs = Pipe()
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115, until `end`
        handle = theirs.fileno()
        self._process = subprocess.Popen(
            [sys.executable, "-c", MAIN, name, str(handle), str(threads), runtimes],
            pass_fds=[handle],
            env={**os.environ, **WORKER_ENVIRONMENT, **environment},
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        theirs.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def cpu_s(self) -> float:
        """Processor time of all its threads so far; NaN where the system does not tell."""
        files = list(Path(f"/proc/{self.pid}/task").glob("*/schedstat"))
        return sum(int(f.read_text().split()[0]) for f in files) / 1e9 if files else math.nan

    def ask(self, command: str, *arguments: Any) -> Any:
        self.send(command, *arguments)
        return self.receive()

    def send(self, command: str, *arguments: Any) -> None:
        try:
            self._pipe.send((command, arguments))
        except OSError as error:
            raise self._gone() from error

    def receive(self) -> Any:
        try:
            well, value = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise self._gone() from error
        if not well:
            raise WorkerError(value)
        return value

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

    def _gone(self) -> WorkerError:
        code = self._process.wait()
        self._log.seek(0)
        lines = [line.strip() for line in self._log if line.strip()][-LOG_LINES:]
        return WorkerError(f"the process of {self.name} ended with {code}: {' | '.join(lines)}")


class Stage:
    """All workers, at most one of which runs. `runtimes` is the module that has them."""

    def __init__(
        self,
        threads: int,
        environment: Mapping[str, str] | None = None,
        runtimes: str = BLOCK_RUNTIMES,
    ) -> None:
        self.threads = threads
        self._runtimes = runtimes
        self.workers: dict[str, Worker] = {}
        self._environment = dict(environment or {})
        self._running: Worker | None = None

    def __enter__(self) -> Stage:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for worker in self.workers.values():
            worker.end()

    @property
    def names(self) -> list[str]:
        """Who has started, and can be asked."""
        return list(self.workers)

    def start(
        self,
        names: Iterable[str],
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
    ) -> dict[str, str]:
        """Starts these and parks them; who cannot start, and why.

        `environment` comes on top of the stage's, and `folder` is where these work.
        """
        self.park_all()
        merged = {**self._environment, **(environment or {})}
        new = {name: Worker(name, self.threads, merged, self._runtimes, folder) for name in names}
        self.workers.update(new)
        for worker in new.values():
            worker.send("")
        reasons = {name: self._started(worker) for name, worker in new.items()}
        return {name: reason for name, reason in reasons.items() if reason is not None}

    def _started(self, worker: Worker) -> str | None:
        """Parks a worker that has started; ends one that could not, and says why."""
        try:
            worker.receive()
        except WorkerError as error:
            self.workers.pop(worker.name).end()
            return str(error)
        worker.park()
        return None

    def ask(self, name: str, command: str, *arguments: Any) -> Any:
        """The answer of one worker, all others being parked."""
        worker = self.workers[name]
        if self._running is not worker:
            self.park_all()
            worker.wake()
            self._running = worker
        return worker.ask(command, *arguments)

    def side(self, name: str, cold: bool = False) -> Side:
        """What is prepared there, for `compare` to drive."""
        return WorkerSide(self, name, cold)

    def cpu_after_visit_s(self, name: str, seconds: float, parked: bool) -> float:
        """Processor time a worker uses in the `seconds` after it was driven."""
        self.ask(name, "visit", 1, False)
        if parked:
            self.park_all()
        worker = self.workers[name]
        before_s = worker.cpu_s()
        time.sleep(seconds)
        return worker.cpu_s() - before_s

    def park_all(self) -> None:
        if self._running is not None:
            self._running.park()
            self._running = None


class WorkerSide:
    """One worker as a side of `torchweld.compare`."""

    def __init__(self, stage: Stage, name: str, cold: bool = False) -> None:
        self._stage, self._name, self._cold = stage, name, cold
        self.preempted = False

    def time(self, calls: int) -> float:
        seconds, self.preempted = self._stage.ask(self._name, "visit", calls, self._cold)
        return float(seconds)


class AfterSide:
    """`name`, timed after `before` was driven and parked: at once, or when `gap_s` have passed.

    The caches are in the same state either way, so what differs is a pool that still runs.
    """

    def __init__(self, stage: Stage, name: str, before: str, gap_s: float) -> None:
        self._stage, self._before, self._gap_s = stage, before, gap_s
        self._side = WorkerSide(stage, name)
        self.preempted = False

    def time(self, calls: int) -> float:
        self._stage.ask(self._before, "visit", calls, False)
        self._stage.park_all()
        time.sleep(self._gap_s)
        seconds = self._side.time(calls)
        self.preempted = self._side.preempted
        return seconds
