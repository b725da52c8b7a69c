"""Page faults: how often a piece of code was given fresh memory, and what that costs here.

Memory that was given back to the system comes back page by page: the first write to a page stops
the program until the kernel has found a free one and cleared it. The system counts these faults and
the time that the kernel took, for the whole process (`getrusage`; Linux and macOS).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import statistics
import time
from dataclasses import dataclass

from torchweld.core.not_measured import NotMeasured

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

UNCOUNTED = NotMeasured("this system does not count page faults")
# More than the second-level cache of most cores, so that pages are cleared in cold memory: 1.55 µs
# per page in 1 MB, 1.84 in 8, 1.93 in 32 (Zen 4, virtual). 13 ms in all.
PROBED_BYTES = 8 << 20
TRIALS = 3
# Where the system hands out huge pages by itself, it does so on these boundaries.
HUGE_PAGE_BYTES = 2 << 20
# Most systems do not time the kernel but look which side runs when a tick comes, 100 to 1000 times
# a second.
TICK_US = 10_000.0


@dataclass(frozen=True, kw_only=True)
class FaultCount:
    """The faults of all threads of the process while a piece of code ran."""

    faults: int  # minor ones: nothing had to be read from a disk
    system_us: float  # in the kernel, for whatever reason


@dataclass(frozen=True, kw_only=True)
class FaultCost:
    """What one page fault costs on this machine."""

    us: float  # of one thread: to be given fresh memory, to touch it, and to give it back
    bytes: int  # that one fault brings: a page, or a huge one where the system prefers those


class FaultMeter:
    """`begin` before a piece of code, `taken` after it. Each takes about a microsecond."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        self._begun = _usage()

    def taken(self) -> FaultCount | NotMeasured:
        """The faults since `begin`."""
        now = _usage()
        if self._begun is None or now is None:
            return UNCOUNTED
        return FaultCount(
            faults=now.ru_minflt - self._begun.ru_minflt,
            system_us=1e6 * max(0.0, now.ru_stime - self._begun.ru_stime),
        )


def fault_cost() -> FaultCost | NotMeasured:
    """What a fault costs, measured by touching fresh pages: the median of a few trials.

    The clock is that of this thread, so other processes do not add to it. Giving the pages back is
    included, because a program that keeps its memory saves that too.
    """
    if resource is None:
        return UNCOUNTED
    try:
        found = [_trial() for _ in range(TRIALS)]
    except (OSError, ValueError) as error:  # no memory, or no such mapping
        return NotMeasured(f"fresh pages could not be mapped: {error}")
    if any(faults <= 0 for _, faults in found):
        return UNCOUNTED
    return FaultCost(
        us=statistics.median(us / faults for us, faults in found),
        bytes=round(statistics.median(PROBED_BYTES / faults for _, faults in found)),
    )


def allocator() -> str:
    """What serves malloc in this process: "glibc 2.36", a preloaded library; "" if not known."""
    preloaded = os.environ.get("LD_PRELOAD", "").replace(":", " ").split()
    for library in map(os.path.basename, preloaded):
        if "malloc" in library:
            return library
    try:
        return os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (AttributeError, ValueError, OSError):
        return ""


def _trial() -> tuple[float, int]:
    """µs of this thread, and the faults that it took, to map, touch and unmap `PROBED_BYTES`."""
    before = _faults_of_thread()
    begun_s = time.thread_time()
    # One mapping for the probe, with room to begin on a boundary.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    with mmap.mmap(-1, PROBED_BYTES + HUGE_PAGE_BYTES, flags=flags) as region:
        anchor = ctypes.c_char.from_buffer(region)
        first = -ctypes.addressof(anchor) % HUGE_PAGE_BYTES
        del anchor  # a mapping with users cannot be closed
        with (
            memoryview(region) as whole,
            whole[first : first + PROBED_BYTES : mmap.PAGESIZE] as one_of_each_page,
        ):
            one_of_each_page[:] = bytes(len(one_of_each_page))
    elapsed_us = 1e6 * (time.thread_time() - begun_s)
    return elapsed_us, _faults_of_thread() - before


def _usage() -> resource.struct_rusage | None:
    return None if resource is None else resource.getrusage(resource.RUSAGE_SELF)


def _faults_of_thread() -> int:
    """The faults of this thread, or of the process if the system does not tell threads apart."""
    whom = getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)
    return resource.getrusage(whom).ru_minflt
