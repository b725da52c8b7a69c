"""One runtime in a process of its own: commands come in through a pipe, seconds go out.

`main` is started by `processes.Worker` with the arguments NAME FD THREADS MODULE, the module having
the runtimes by name. Between commands it blocks on the pipe. `Server` is what answers; a
`LocalStage` has one for each side in this process.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import math
import os
import signal
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from torchweld.bench.callers import callers, dismiss
from torchweld.bench.cases import Array
from torchweld.core.errors import TorchweldError
from torchweld.core.inputs import first_line
from torchweld.core.not_measured import NotMeasured
from torchweld.machine.hardware import hardware
from torchweld.machine.kernel_build import compiled_part
from torchweld.numerics.model_check import floating
from torchweld.profiles.dispatch_counts import count
from torchweld.timing import CallableSide

# A visit to a worker times up to five blocks of calls and gives their median; a longer one costs
# rounds and gains nothing. Calls so short that a block has several get the core to themselves for
# a moment first: other processes have used its caches and predictors since.
BLOCKS_PER_VISIT = 5
VISIT_S = 5e-3
WARM_UP_S = 0.5e-3
LEAST_FLUSH_BYTES = 64 << 20
# What is not compared, but stands beside the times: blocks of calls, each of about so long.
COST_BLOCKS, COST_BLOCK_S = 9, 500e-6
CPU_S = 20e-3
# A call that takes no more than so many times what it takes with nothing to compute is timed in
# turn with that: noise between two moments would be larger than what tells them apart.
NEAR = 4.0


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


@functools.cache
def _flush() -> Flush:
    return Flush()


def _undisturbed(
    block: Callable[[], tuple[float, float] | None], most_s: float
) -> tuple[float, float] | tuple[NotMeasured, NotMeasured]:
    """Medians of what `block` gives, in about `most_s`; it gives None where it was disturbed.

    A team whose core was taken away spins for the rest of a time slice, a thousand calls' worth.
    """
    found: list[tuple[float, float]] = []
    tried, end_s = 0, time.perf_counter() + most_s
    while tried < COST_BLOCKS or (not found and tried < 3 * COST_BLOCKS):
        one = block()
        tried += 1
        if one is not None:
            found.append(one)
        if time.perf_counter() > end_s:
            break
    if not found:
        unknown = NotMeasured(f"other processes took the processor away in each of {tried} tries")
        return unknown, unknown
    return statistics.median(a for a, _ in found), statistics.median(b for _, b in found)


class Server:
    """Answers the commands: each method is one."""

    def __init__(self, name: str, threads: int, runtimes: str) -> None:
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        self.runtime = importlib.import_module(runtimes).RUNTIMES[name]()
        # Where runtimes share a model, it is made this one's before the clock starts.
        self.show = getattr(self.runtime, "show", lambda: None)
        self.prepared = False

    def load(self, *what: Any) -> None:
        self.runtime.load(*what)

    def prepare(self, *shape: Any) -> list[Array]:
        """Gets ready for a number of rows, or a shape; the floating outputs of a call, as float32.

        What is computed in float64 comes as float64.
        """
        self.call = self.runtime.prepare(*shape)
        self.side = CallableSide(self.call)
        self.prepared = True
        self.show()
        return arrays_of(self.call())

    def visit(self, calls: int, cold: bool) -> tuple[float, bool]:
        """Seconds for `calls` calls, and whether the processor was taken away meanwhile."""
        self.show()
        if cold:
            # One call stands for all: each would need its own flush, a thousand times its cost.
            _flush()()
            return self.side.time(1) * calls, self.side.preempted
        begun_s = time.perf_counter()
        while calls > 1 and time.perf_counter() - begun_s < WARM_UP_S:
            self.call()
        undisturbed: list[float] = []
        disturbed: list[float] = []
        begun_s = time.perf_counter()
        for _ in range(BLOCKS_PER_VISIT):
            seconds = self.side.time(calls)
            (disturbed if self.side.preempted else undisturbed).append(seconds)
            if time.perf_counter() - begun_s > VISIT_S:
                break
        return statistics.median(undisturbed or disturbed), not undisturbed

    def latencies(self, calls: int) -> list[float]:
        """Seconds of so many single calls, after one that is not timed."""
        self.show()
        call, clock = self.call, time.perf_counter
        call()
        found = []
        for _ in range(calls):
            begun_s = clock()
            call()
            found.append(clock() - begun_s)
        return found

    def window(self, count: int, seconds: float) -> float:
        """Calls a second by `count` callers at once."""
        self.show()
        return callers(count).rate(self.call, seconds)

    def dismiss(self) -> None:
        """Ends the callers, before anything else is timed here."""
        dismiss()

    def cost(self) -> dict[str, Any]:
        """What a call costs beside its time; what cannot be told is left out.

        ops, buffers: as they reach the dispatcher
        host_us:      what a call takes that has nothing to compute
        host_share:   the same, to a call in the same rounds
        cpu_us:       processor time of all threads
        cores:        the same, to the time of the same calls
        """
        self.show()
        found: dict[str, Any] = self._processor()
        if getattr(self.runtime, "countable", False):
            counts = count(self.call)
            found |= {"ops": len(counts.ops), "buffers": counts.buffers}
            if torch.cuda.is_available() and hasattr(self.runtime, "cuda_us"):
                found["cuda_us"] = self.runtime.cuda_us()
            found |= self._host()
        return found

    def _host(self) -> dict[str, float | NotMeasured]:
        if hasattr(self.runtime, "host"):  # a whole model
            found = self.runtime.host()
            if isinstance(found, NotMeasured):
                return {"host_us": found}
            return {"host_us": float(found[0]), "host_share": float(found[1])}
        idle = CallableSide(self.runtime.idle())
        try:
            once_s = min(idle.time(1) for _ in range(3))
        except Exception:  # an op that does not take an empty x
            return {}
        calls = max(1, round(COST_BLOCK_S / once_s))
        near = min(self.side.time(1) for _ in range(3)) < NEAR * once_s

        def block() -> tuple[float, float] | None:
            idle_s = idle.time(calls)
            whole_s = self.side.time(calls) if near else math.inf
            disturbed = idle.preempted or (near and self.side.preempted)
            return None if disturbed else (1e6 * idle_s / calls, idle_s / whole_s)

        host_us, share = _undisturbed(block, math.inf)
        return {"host_us": host_us, **({"host_share": share} if near else {})}

    def _processor(self) -> dict[str, float | NotMeasured]:
        once_s = min(self.side.time(1) for _ in range(3))
        calls = max(1, round(COST_BLOCK_S / once_s))

        def block() -> tuple[float, float] | None:
            # The processor's clock is read inside the wall's, so that no core counts twice.
            begun_s, cpu_s = time.perf_counter(), time.process_time()
            self.side.time(calls)
            cpu_s = time.process_time() - cpu_s
            elapsed_s = time.perf_counter() - begun_s
            return None if self.side.preempted else (1e6 * cpu_s / calls, cpu_s / elapsed_s)

        cpu_us, cores = _undisturbed(block, CPU_S)
        return {"cpu_us": cpu_us, "cores": cores}

    def details(self) -> dict[str, Any]:
        """What the runtime says of itself, right after a call: others may have run since."""
        if self.prepared:
            self.show()
            self.call()
        return dict(self.runtime.details())

    def about(self) -> dict[str, Any]:
        return dict(self.runtime.about())

    def check(self) -> None:
        """Raises where what was loaded cannot be timed."""
        self.show()
        self.runtime.check()

    def work(self) -> dict[str, Any]:
        return dict(self.runtime.work())

    def truth(self) -> dict[str, Any]:
        self.show()
        return dict(self.runtime.truth())

    def fma_gflops(self, seconds: float) -> float:
        """The rate of multiply-adds this machine reaches in fp32, with our instruction set."""
        compiled = compiled_part()
        if compiled is None:
            raise RuntimeError("the peak is measured by the compiled part, which is missing")
        return float(compiled.probe_fma("float32", torch.get_num_threads(), seconds))


def arrays_of(output: Any) -> list[Array]:
    """The floating tensors and arrays of whatever a call returns, in order."""
    found = [output] if isinstance(output, np.ndarray) else output
    if isinstance(found, (list, tuple)) and all(isinstance(item, np.ndarray) for item in found):
        return [_wide(item) for item in found if np.issubdtype(item.dtype, np.floating)]
    tensors = [tensor.detach() for tensor in floating(output)]
    return [_wide((t if t.dtype == torch.float64 else t.float()).numpy()) for t in tensors]


def _wide(values: Any) -> Array:
    kind = np.float64 if values.dtype == np.float64 else np.float32
    return np.array(values, dtype=kind)


def said(error: BaseException) -> str:
    """An error in one line; ours need no kind before them."""
    return " ".join(str(error).split()) if isinstance(error, TorchweldError) else first_line(error)


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
                pipe.send((False, said(error)))
