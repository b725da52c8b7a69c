"""One runtime in a process of its own: commands come in through a pipe, seconds go out.

Started by `peer_processes.Worker` as `peer_workers.py NAME FD THREADS MODULE`, the module having
the runtimes by name. Between commands it blocks on the pipe.
"""

import ctypes
import importlib
import os
import signal
import statistics
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from peer_grid import Array
from torch import Tensor

from torchweld.hardware import hardware
from torchweld.measuring import CallableSide

# A visit to a worker times up to five blocks of calls and gives their median; a longer one costs
# rounds and gains nothing. Calls so short that a block has several get the core to themselves for
# a moment first: other processes have used its caches and predictors since.
BLOCKS_PER_VISIT = 5
VISIT_S = 5e-3
WARM_UP_S = 0.5e-3
LEAST_FLUSH_BYTES = 64 << 20


class Flush:
    """Called, it writes through twice the last-level cache, a part on every core.

    Threads that end, not a pool of torch's: none is left spinning beside the call that follows.
    """

    def __init__(self) -> None:
        size = max(LEAST_FLUSH_BYTES, 2 * (hardware().caches.l3_bytes or 0))
        affinity = getattr(os, "sched_getaffinity", None)
        self.cores = sorted(affinity(0)) if affinity else list(range(os.cpu_count() or 1))
        self.parts = [np.zeros(size // 4 // len(self.cores), np.float32) for _ in self.cores]

    def __call__(self) -> None:
        writers = [
            threading.Thread(target=self._write, args=pair)
            for pair in zip(self.cores, self.parts, strict=True)
        ]
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.join()

    def _write(self, core: int, part: Array) -> None:
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, {core})  # of this thread alone
        np.add(part, 1.0, out=part)


class Server:
    """Answers the commands: each method is one."""

    def __init__(self, name: str, threads: int, runtimes: str) -> None:
        torch.set_num_threads(threads)
        self.runtime = importlib.import_module(runtimes).RUNTIMES[name]()
        self.flush: Flush | None = None

    def load(self, *what: Any) -> None:
        self.runtime.load(*what)

    def prepare(self, *shape: Any) -> Array:
        """Gets ready for a number of rows, or a shape, and returns the output, as float32."""
        self.call = self.runtime.prepare(*shape)
        self.side = CallableSide(self.call)
        output = self.call()
        if isinstance(output, Tensor):
            output = output.detach().float().numpy()
        return np.array(output, dtype=np.float32)

    def visit(self, calls: int, cold: bool) -> tuple[float, bool]:
        """Seconds for `calls` calls, and whether the processor was taken away meanwhile."""
        if cold:
            # One call stands for all: each would need its own flush, a thousand times its cost.
            self.flush = self.flush or Flush()
            self.flush()
            return self.side.time(1) * calls, self.side.preempted
        begun_s = time.perf_counter()
        while calls > 1 and time.perf_counter() - begun_s < WARM_UP_S:
            self.call()
        undisturbed, disturbed = [], []
        begun_s = time.perf_counter()
        for _ in range(BLOCKS_PER_VISIT):
            seconds = self.side.time(calls)
            (disturbed if self.side.preempted else undisturbed).append(seconds)
            if time.perf_counter() - begun_s > VISIT_S:
                break
        return statistics.median(undisturbed or disturbed), not undisturbed

    def details(self) -> dict[str, Any]:
        return self.runtime.details()

    def fma_gflops(self, seconds: float) -> float:
        """The rate of multiply-adds this machine reaches in fp32, with our instruction set."""
        from torchweld import ops

        if ops.compiled is None:
            raise RuntimeError(f"the peak is measured by the compiled part: {ops.problem}")
        return float(ops.compiled.probe_fma("float32", torch.get_num_threads(), seconds))


def die_with_parent() -> None:
    """A parked process cannot notice that its parent is gone; Linux ends it then."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def main() -> None:
    name, handle, threads, runtimes = sys.argv[1:]
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pipe = Connection(int(handle))
    server: Server | None = None
    with torch.no_grad():
        while True:
            try:
                command, arguments = pipe.recv()
            except EOFError:
                return
            try:
                if server is None:
                    server = Server(name, int(threads), runtimes)
                pipe.send((True, getattr(server, command)(*arguments) if command else None))
            except Exception as error:
                traceback.print_exc()
                first = (str(error).strip() or "no message").splitlines()[0]
                pipe.send((False, f"{type(error).__name__}: {first}"))


if __name__ == "__main__":
    main()
