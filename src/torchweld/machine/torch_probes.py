"""How fast torch itself multiplies and reads: the best of some calls, including the cost of a call.

For machines without the compiled part, and for instructions that its probes do not use. Both
functions change torch's number of threads and leave it changed.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

# Sides of square products. The first is enough for a few cores; many cores and matrix units need
# larger ones to show what they can do.
PRODUCT_SIZES = (512, 1024, 2048)


def _least_seconds(run: Callable[[], object], seconds: float) -> float:
    run()
    least, end, rounds = float("inf"), time.perf_counter() + seconds, 0
    while rounds < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        run()
        least = min(least, time.perf_counter() - start)
        rounds += 1
    return least


def fma_gflops_by_torch(
    dtype: str, threads: int, seconds: float, size: int = PRODUCT_SIZES[0]
) -> float:
    torch.set_num_threads(threads)
    square = torch.ones(size, size, dtype=getattr(torch, dtype))
    out = torch.empty_like(square)
    return 2e-9 * size**3 / _least_seconds(lambda: torch.mm(square, square, out=out), seconds)


def read_gbps_by_torch(working_set_bytes: int, threads: int, seconds: float) -> float:
    torch.set_num_threads(threads)
    data = torch.ones(working_set_bytes // 4, dtype=torch.float32)
    return 1e-9 * working_set_bytes / _least_seconds(data.sum, seconds)
