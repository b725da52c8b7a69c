"""A runtime that answers commands: its outputs, how long calls take, and what else they cost.

`RuntimeServer` has one method per command. `serve_runtime` makes it in a worker process.
"""

from __future__ import annotations

import functools
import math
import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchweld.bench.bench_cases import Array
from torchweld.bench.concurrent_callers import callers, dismiss
from torchweld.bench.eager_block import BlockSource
from torchweld.bench.kernel_counts import kernels_of
from torchweld.bench.runtimes.runtime import Runtime
from torchweld.bench.runtimes.torch_runtimes import EagerRuntime
from torchweld.bench.training_step import TrainingStep
from torchweld.core.not_measured import NotMeasured
from torchweld.machine.device_waiting import wait_for_gpu
from torchweld.machine.hardware import hardware
from torchweld.numerics.model_results import floating
from torchweld.profiles.dispatch_counts import count
from torchweld.timing import CallableSide, core_waiting

# A visit to a worker times up to five blocks of calls and gives their median; a longer one costs
# rounds and gains nothing. Calls so short that a block has several get the core to themselves for
# a moment first: other processes have used its caches and predictors since.
BLOCKS_PER_VISIT = 5
VISIT_S = 5e-3
WARM_UP_S = 0.5e-3
LEAST_FLUSH_BYTES = 64 << 20
# Costs are not compared. Each is the median of blocks of calls, each about this long.
COST_BLOCKS, COST_BLOCK_S = 9, 500e-6
CPU_S = 20e-3
# A call that takes at most so many times its host part is timed in turn with it: noise between two
# moments would be larger than their difference.
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


class RuntimeServer:
    """Answers the commands: each method is one."""

    def __init__(self, make: Callable[[], Runtime]) -> None:
        self.runtime = make()
        self.runtime.start()
        self.prepared = self.on_gpu = False

    def load(self, source: Any) -> None:
        self.on_gpu = isinstance(source, BlockSource) and source.device != "cpu"
        if self.on_gpu:
            device = torch.device(source.device)
            if device.index is not None:  # what waits for the GPU waits for the current one
                torch.cuda.set_device(device)
        self.runtime.load(source)

    def train(self, step: TrainingStep | None) -> None:
        """Makes each call from the next `prepare` on a step of this kind."""
        self.runtime.train(step)

    def show(self) -> None:
        """Runtimes that share a model make it theirs, before the clock starts.

        Gradients are on in training: until the next `show`, or the end of a local worker's command.
        """
        torch.set_grad_enabled(self.runtime.step is not None)
        self.runtime.show()

    def prepare(self, *shape: Any) -> list[Array]:
        """Gets ready for a number of rows, or a shape; the floating outputs of a call, as float32.

        Outputs in float64 stay float64. In training, gradients follow the output of a block, all as
        they are: copies would be as large as the weights.
        """
        self.call = self.runtime.prepare(*shape)
        self.side = CallableSide(self.call)
        self.prepared = True
        self.show()
        found = self.runtime.judged(self.call)
        return arrays_of(found) if self.runtime.step is None else bare_arrays(found)

    def time(self, calls: int) -> tuple[float, bool]:
        """Seconds for `calls` calls, and whether the processor was taken away meanwhile."""
        self.show()
        return self.side.time(calls), self.side.preempted

    def visit(self, calls: int, cold: bool) -> tuple[float, bool]:
        """Times calls like `time`, but after other processes have run."""
        self.show()
        if cold:
            # Only one call is timed: each would need its own flush, at a thousand times its cost.
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
        """The seconds of each of `calls` single calls, after one that is not timed."""
        self.show()
        call, clock = self.call, time.perf_counter
        call()
        wait_for_gpu()
        found = []
        for _ in range(calls):
            begun_s = clock()
            call()
            wait_for_gpu()
            found.append(clock() - begun_s)
        return found

    def window(self, count: int, seconds: float) -> float:
        """Calls per second by `count` callers at once."""
        self.show()
        return callers(count).rate(self.call, seconds)

    def dismiss(self) -> None:
        """Ends the callers, before anything else is timed here."""
        dismiss()

    def cost(self) -> dict[str, Any]:
        """What a call costs besides its time; unknown costs are left out.

        ops, buffers: as they reach the dispatcher
        host_us:      what a call takes that has nothing to compute
        host_share:   the same, to a call in the same rounds
        cpu_us:       processor time of all threads
        cores:        the same, to the time of the same calls
        kernels:      on a GPU, what a call launches there; `host_us` is then until it returns
        """
        self.show()
        found: dict[str, Any] = self._processor()
        if self.on_gpu:
            found |= {**self._issuing(), "kernels": kernels_of(self.call)}
        if self.runtime.countable:
            counts = count(self.call)
            found |= {"ops": len(counts.ops), "buffers": counts.buffers}
            if self.runtime.step is not None:
                return found  # without rows, weights still get gradients: that is not the host's
            if self.on_gpu:
                return found
            if torch.cuda.is_available():
                found["cuda_us"] = self.runtime.cuda_us()
            found |= self._host()
        return found

    def training_cost(self) -> dict[str, Any]:
        """What a step keeps for its backward, its page faults, and the peak of memory."""
        self.show()
        return self.runtime.training_cost()

    def _host(self) -> dict[str, float | NotMeasured]:
        call = self.runtime.idle()
        if call is None:  # a whole model
            found = self.runtime.profiled_host()
            if isinstance(found, NotMeasured):
                return {"host_us": found}
            return {"host_us": float(found[0]), "host_share": float(found[1])}
        idle = CallableSide(call)
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

    def _issuing(self) -> dict[str, float | NotMeasured]:
        """What the host takes until a call returns, and its share of the whole call."""

        def block() -> tuple[float, float] | None:
            switches = core_waiting.switches()
            wait_for_gpu()
            begun_s = time.perf_counter()
            self.call()
            returned_s = time.perf_counter() - begun_s
            wait_for_gpu()
            done_s = time.perf_counter() - begun_s
            switches = core_waiting.switches() - switches
            if core_waiting.too_many(switches, done_s):
                return None
            return 1e6 * returned_s, returned_s / done_s

        host_us, share = _undisturbed(block, CPU_S)
        return {"host_us": host_us, "host_share": share}

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
        """What the runtime reports, right after a call: others may have run since the last one."""
        if self.prepared:
            self.show()
            self.call()
        return dict(self.runtime.details())

    def about(self) -> dict[str, Any]:
        return self.runtime.about()

    def check(self) -> None:
        """Raises if the loaded model cannot be timed."""
        self._eager().check()

    def work(self) -> dict[str, Any]:
        return self._eager().work()

    def truth(self) -> dict[str, Any]:
        return self._eager().truth()

    def _eager(self) -> EagerRuntime:
        """The eager runtime, which alone knows what a model computes."""
        assert isinstance(self.runtime, EagerRuntime), self.runtime
        self.show()
        return self.runtime


def arrays_of(output: Any) -> list[Array]:
    """The floating tensors and arrays of whatever a call returns, in order."""
    found = [output] if isinstance(output, np.ndarray) else output
    if isinstance(found, (list, tuple)) and all(isinstance(item, np.ndarray) for item in found):
        return [_wide(item) for item in found if np.issubdtype(item.dtype, np.floating)]
    tensors = [tensor.detach() for tensor in floating(output)]
    wide = [t if t.dtype == torch.float64 else t.float() for t in tensors]
    return [_wide(t.cpu().numpy()) for t in wide]


def bare_arrays(tensors: Sequence[Tensor]) -> list[Any]:
    """Tensors as arrays of the same memory; numbers of 16 bits as integers."""
    found = [tensor.detach().contiguous() for tensor in tensors]
    return [(t if t.element_size() > 2 else t.view(torch.int16)).cpu().numpy() for t in found]


def tensors_from(arrays: Sequence[Any], dtype: torch.dtype) -> list[Tensor]:
    """What `bare_arrays` was given; integers are numbers of `dtype`."""
    found = [torch.from_numpy(array) for array in arrays]
    return [t.view(dtype) if t.dtype == torch.int16 else t for t in found]


def _wide(values: Any) -> Array:
    kind = np.float64 if values.dtype == np.float64 else np.float32
    return np.array(values, dtype=kind)


def serve_runtime(make: Callable[[], Runtime], threads: int) -> RuntimeServer:
    """The server of a process that has nothing else to do."""
    torch.set_grad_enabled(False)
    torch.set_num_threads(threads)
    return RuntimeServer(make)
