"""What this machine costs, as pricing needs it: peaks, the smallest op, the cheapest fused call."""

from __future__ import annotations

import math
import time

import torch

from torchweld import ops
from torchweld.core.errors import NotMeasuredError
from torchweld.core.not_measured import NotMeasured
from torchweld.machine import fingerprint, hardware, measured_peaks
from torchweld.machine.measured_peaks import Peaks
from torchweld.ops.fused_mlp import FusedMLP
from torchweld.profiles.profile import Machine
from torchweld.profiles.recording.profiler_overhead import measure_loop

_CALLS, _TRIALS = 50, 40
# The best that this process has seen: whatever else runs on the machine only adds to it.
_least_us = math.inf


def this_machine(notices: list[str]) -> Machine:
    """This machine, for a recording made here. Adds a notice if peaks cannot be measured."""
    here = hardware.hardware()
    return Machine(
        torch=here.torch_version,
        cpu=here.cpu_model,
        threads=here.threads,
        fingerprint=fingerprint.key_here(),
        op_cost_us=measure_loop().smallest_op_us,
        fused_call_us=fused_call_us(),
        peaks=_usual_peaks(notices),
    )


def _usual_peaks(notices: list[str]) -> Peaks | None:
    """This machine's peaks; measured now if that was never done, or only while it was busy."""
    try:
        kept = measured_peaks.peaks()
        return (
            kept
            if kept is not None and measured_peaks.holds(kept)
            else measured_peaks.peaks(measure=True)
        )
    except NotMeasuredError as error:
        notices.append(f"without this machine's peaks nothing can be priced: {error}")
        return None


def fused_call_us() -> float | NotMeasured:
    """The least that calling a fused block costs, whatever it computes; measured in 5 ms.

    Of a `FusedMLP` with one Linear from 1 to 1. A welded module is called in the same way and also
    checks its guard: 3.8 µs for a welded Linear and 4.5 for Linear, Tanh, Linear, against 2.3 here
    (an EPYC with AVX-512).
    """
    global _least_us
    if ops.compiled is None:
        return NotMeasured("torchweld's kernels are not built here")
    with torch.random.fork_rng(devices=[]):  # the user's random numbers stay as they are
        block = FusedMLP((1, 1), device="cpu", dtype=torch.float32).eval()
    x = torch.zeros(1, 1, device="cpu", dtype=torch.float32)
    with torch.no_grad():
        for _ in range(_TRIALS):
            begun_s = time.perf_counter()
            for _ in range(_CALLS):
                block(x)
            _least_us = min(_least_us, 1e6 * (time.perf_counter() - begun_s) / _CALLS)
    return _least_us
