"""What a step of training costs besides its time: bytes saved, page faults, the peak of memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from torchweld.core.not_measured import NotMeasured

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

# Steps that are counted, after some that are not: memory that is kept is there by then.
WARM_UP_STEPS, LEAST_STEPS, MOST_STEPS, COUNTED_S = 3, 5, 200, 0.2

STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
# What Linux takes as: begin the peak anew.
RESET_PEAK = "5"


def saved_bytes(forward: Callable[[], Any], parameters: Iterable[Tensor]) -> int:
    """What a forward keeps for its backward: each storage once, those of parameters left out."""
    own = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    found: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.enable_grad(), saved_tensors_hooks(pack, lambda tensor: tensor):
        output = forward()  # kept until all is counted: a freed address would be used again
    total = sum(found.values())
    del output
    return total


def faults_and_peak(
    call: Callable[[], Any],
) -> tuple[float | NotMeasured, int | NotMeasured]:
    """Minor page faults per call, and the most memory that the process held meanwhile."""
    for _ in range(WARM_UP_STEPS):
        begun_s = time.perf_counter()
        call()
        once_s = time.perf_counter() - begun_s
    steps = min(MOST_STEPS, max(LEAST_STEPS, round(COUNTED_S / max(once_s, 1e-9))))
    forgotten = _forget_peak()
    before = minor_faults()
    for _ in range(steps):
        call()
    after = minor_faults()
    peak = peak_bytes() if forgotten else NotMeasured("this system cannot begin a peak anew")
    if before is None or after is None:
        return NotMeasured("this system does not count page faults"), peak
    return (after - before) / steps, peak


def minor_faults() -> int | None:
    """Of all threads of this process so far; None where the system does not tell."""
    return None if resource is None else resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def _forget_peak() -> bool:
    """Begins the peak of this process anew; False where the system cannot."""
    with suppress(OSError):
        CLEAR_REFS.write_text(RESET_PEAK)
        return True
    return False


def peak_bytes() -> int | NotMeasured:
    """The most memory this process held. `ru_maxrss` may be that of the parent before the start."""
    with suppress(OSError, ValueError, IndexError):
        for line in STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return 1024 * int(line.split()[1])
    return NotMeasured("this system does not tell the peak of a process")
