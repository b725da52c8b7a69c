"""How fast this machine is at best: measured when asked for, and kept for later calls."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType

import torch

from torchweld.core.errors import NotMeasuredError, TorchweldError
from torchweld.core.files import cache_dir
from torchweld.core.record_fields import Amount, Count
from torchweld.core.record_format import RecordFormat
from torchweld.core.saved_records import SavedRecord
from torchweld.machine import fingerprint, hardware, kernel_build
from torchweld.machine.torch_probes import PRODUCT_SIZES, fma_gflops_by_torch, read_gbps_by_torch

PROBED_DTYPES = ("float32", "float64", "bfloat16", "float16")
# Instructions for 16-bit products that torchweld's own loops do not use. If the CPU has one of
# them, torch's products are measured too.
UNPROBED = {
    "bfloat16": ("amx_bf16", "bf16"),
    "float16": ("avx512_fp16", "amx_fp16", "asimdhp"),
}
# Working sets that fit into L1, into L2, into L2 or L3, into most L3s, and into memory alone.
WORKING_SETS_BYTES = (32 * 2**10, 256 * 2**10, 2 * 2**20, 16 * 2**20, 256 * 2**20)
PROBE_SECONDS = 0.1
TOLERATED_EXCESS = 1.03


@dataclass(frozen=True, kw_only=True)
class FmaPeak:
    """Multiply-adds, two operations each, by the fastest way that was tried.

    float32 and float64 by torchweld's own loop. 16-bit types are widened and computed in fp32 by
    the same loop, and by the CPU's own instruction for them if it has one; the larger rate counts.
    """

    dtype: str
    threads: Count
    gflops: Amount


@dataclass(frozen=True, kw_only=True)
class ReadPeak:
    """Bytes read from a working set that is divided among all threads."""

    working_set_bytes: Count
    threads: Count
    gbps: Amount


@dataclass(frozen=True, kw_only=True)
class Peaks:
    """The highest rates that this machine reached, in the best of many short rounds."""

    fingerprint: str
    method: str
    fma: tuple[FmaPeak, ...]
    read: tuple[ReadPeak, ...]

    def fma_gflops(self, dtype: str, threads: int) -> float | None:
        """The rate for `dtype` ("float32") at `threads`; None if that was not measured."""
        return next((p.gflops for p in self.fma if (p.dtype, p.threads) == (dtype, threads)), None)

    def read_gbps(self, working_set_bytes: int, threads: int) -> float | None:
        """The rate at the next larger working set that was measured, else at the largest."""
        rows = sorted(
            (p for p in self.read if p.threads == threads), key=lambda p: p.working_set_bytes
        )
        if not rows:
            return None
        return next((p for p in rows if p.working_set_bytes >= working_set_bytes), rows[-1]).gbps


@dataclass(frozen=True, kw_only=True)
class KeptPeaks(SavedRecord):
    """The file in the cache."""

    FORMAT = RecordFormat(
        what="peaks",
        version=1,
        unmarked=0,
        upgrades={0: lambda fields: {"peaks": fields}},
        remedy="measure them again with torchweld info --measure",
    )

    peaks: Peaks


def peaks(measure: bool = False) -> Peaks | None:
    """The peaks measured on this machine as it is set up now; None if that was never done.

    `measure=True` measures now (about three seconds) and keeps the result for later calls. A cache
    that cannot be read, or was measured on another set-up or in another way, is ignored. Raises
    NotMeasuredError if the figures cannot be right.
    """
    key, method = fingerprint.key_here(), _method()
    path = cache_dir() / f"peaks-{key}.json"
    if measure:
        found = _measure_peaks(key, method)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            KeptPeaks(peaks=found).save(path)
        except (OSError, TorchweldError) as error:
            warnings.warn(
                f"the measured peaks are not kept for later: {error}; set XDG_CACHE_HOME to a "
                "folder that can be written",
                RuntimeWarning,
                stacklevel=2,
            )
        return found
    try:
        kept = KeptPeaks.load(path).peaks
    except TorchweldError:
        return None
    return kept if (kept.fingerprint, kept.method) == (key, method) else None


def read_gbps_now(working_set_bytes: int, threads: int) -> float | None:
    """GB/s that can be read right now, which on a shared machine is less than the peak.

    Measured by torchweld's own loop; without it the kept peak, None if there is none.
    """
    compiled = kernel_build.compiled_part()
    if compiled is None:
        kept = peaks()
        return None if kept is None else kept.read_gbps(working_set_bytes, threads)
    size = min(working_set_bytes, max(WORKING_SETS_BYTES))
    return float(compiled.probe_read(size, threads, PROBE_SECONDS))


def holds(kept: Peaks, dtypes: Iterable[str] = ("float32",)) -> bool:
    """Whether short probes stay below `kept`; they exceed peaks taken on a busy machine."""
    compiled = kernel_build.compiled_part()
    threads = torch.get_num_threads()
    if compiled is None:
        return True
    for dtype in dtypes:
        peak = kept.fma_gflops(dtype, threads)
        if peak is None:
            continue
        if _fma_gflops(compiled, dtype, threads, PROBE_SECONDS) >= TOLERATED_EXCESS * peak:
            return False
    return True


def _method() -> str:
    """How peaks are measured here; figures of another method are not comparable."""
    compiled = kernel_build.compiled_part()
    if compiled is None:
        return "torch.mm and torch.sum, the cost of a call included"
    by_torch = [dtype for dtype in PROBED_DTYPES if _only_torch_has_it(dtype)]
    natively = (
        "; bfloat16 by avx512_bf16" if "avx512_bf16" in hardware.hardware().instruction_sets else ""
    )
    also = f"; {', '.join(by_torch)} also by torch.mm" if by_torch else ""
    return f"torchweld's own loops, {compiled.isa()}{natively}{also}"


def _only_torch_has_it(dtype: str) -> bool:
    here = hardware.hardware().instruction_sets
    return any(flag in here for flag in UNPROBED.get(dtype, ()))


def _fma_gflops(compiled: ModuleType, dtype: str, threads: int, seconds: float) -> float:
    """The best of all ways to multiply and add `dtype`; see `FmaPeak`."""
    best = float(compiled.probe_fma(dtype, threads, seconds))
    best = max(best, float(compiled.probe_native(dtype, threads, seconds)))
    if _only_torch_has_it(dtype):
        for size in PRODUCT_SIZES:
            found = fma_gflops_by_torch(dtype, threads, seconds, size)
            if found < best / 2:  # torch does not use the instruction, or is slow for other reasons
                break
            best = max(best, found)
    return best


def _measure_peaks(key: str, method: str) -> Peaks:
    compiled = kernel_build.compiled_part()
    all_threads = torch.get_num_threads()
    if compiled is None:
        fma_gflops, read_gbps = fma_gflops_by_torch, read_gbps_by_torch
    else:
        fma_gflops, read_gbps = functools.partial(_fma_gflops, compiled), compiled.probe_read

    def fma_peaks(dtype: str) -> list[FmaPeak]:
        rates = _rates_by_team(lambda n: fma_gflops(dtype, n, PROBE_SECONDS), all_threads)
        _check_team(f"{dtype} GFLOP/s", rates)
        return [FmaPeak(dtype=dtype, threads=n, gflops=rate) for n, rate in rates.items()]

    def read_peaks(size: int) -> list[ReadPeak]:
        rates = _rates_by_team(lambda n: read_gbps(size, n, PROBE_SECONDS), all_threads)
        if compiled is not None:  # the start of a team makes torch.sum slower on small tensors
            _check_team(f"GB/s from {size} bytes", rates)
        return [ReadPeak(working_set_bytes=size, threads=n, gbps=r) for n, r in rates.items()]

    try:
        return Peaks(
            fingerprint=key,
            method=method,
            fma=tuple(peak for dtype in PROBED_DTYPES for peak in fma_peaks(dtype)),
            read=tuple(peak for size in WORKING_SETS_BYTES for peak in read_peaks(size)),
        )
    finally:
        torch.set_num_threads(all_threads)


def _rates_by_team(probe: Callable[[int], float], all_threads: int) -> dict[int, float]:
    """Rates of one and of all threads. Disturbance only slows, so a poor rate is measured again."""
    rates = {n: probe(n) for n in sorted({1, all_threads})}
    for _ in range(3):
        if rates[all_threads] < rates[1]:
            rates[all_threads] = max(rates[all_threads], probe(all_threads))
    return rates


def _check_team(what: str, rates: dict[int, float]) -> None:
    threads = max(rates)
    if rates[threads] < 0.9 * rates[1]:
        raise NotMeasuredError(
            f"{threads} threads reached {rates[threads]:.0f} {what} where one alone reached "
            f"{rates[1]:.0f}: the machine is busy, or this process may not use {threads} CPUs; try "
            "again when it is idle, or set OMP_NUM_THREADS to the CPUs it may use"
        )
