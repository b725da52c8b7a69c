"""What the memory traffic of a step costs, and how much of it is round trips: written, read back.

In: the `Work` of every op of a step, and the rates at which this machine reads working sets of
several sizes. Out: one `Traffic` per op.

Round trips follow from the recording: bytes whose storage another op of the step wrote before, and
the writing of bytes that a later op reads back. Weights and inputs existed before the
step, and its outputs are not read back: neither is a round trip. If a recording does not name the
storages, none can be found.

The rate is that of the op's own working set, or of everything touched since the same memory was
touched last, if that is more: a weight that fits into a cache is not read from there if the rest
of the model passed through the cache in between.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from torchweld.machine.measured_peaks import Peaks
from torchweld.profiles.accounting.op_calls import Work
from torchweld.profiles.profile import Op


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """The memory traffic of one op. `round_trip_us` is part of `memory_us`."""

    memory_us: float
    round_trip_us: float
    round_trip_bytes: int


NONE = Traffic(memory_us=0.0, round_trip_us=0.0, round_trip_bytes=0)


@dataclass(frozen=True, kw_only=True)
class Rates:
    """GB/s for working sets up to `sizes`; what is larger has the last rate."""

    sizes: tuple[int, ...]
    gbps: tuple[float, ...]

    @staticmethod
    def measured(peaks: Peaks, threads: int) -> Rates | None:
        """None if nothing was measured at this many threads."""
        rows = sorted(
            (row.working_set_bytes, row.gbps) for row in peaks.read if row.threads == threads
        )
        if not rows:
            return None
        sizes, gbps = zip(*rows, strict=True)
        return Rates(sizes=sizes, gbps=gbps)


def traffic_of(ops: Sequence[Op], works: Sequence[Work | None], rates: Rates) -> list[Traffic]:
    """`works[i]` is the work of `ops[i]`, None if it does none."""
    order = [i for i in finishing_order(ops) if works[i] is not None]
    made = {storage for op in ops for storage, _ in op.written}
    return _TrafficPricing(order, works, made, rates).run()


def round_trips_of(ops: Sequence[Op], works: Sequence[Work | None]) -> list[int]:
    """How many values each op reads back that others wrote and no op read before it.

    A value that several ops read is one round trip, of the first of them.
    """
    order = [i for i in finishing_order(ops) if works[i] is not None]
    return _round_trips(order, works).values


def uncosted(ops: Sequence[Op], works: Sequence[Work | None]) -> list[Traffic]:
    """The bytes of round trips where no rate is known: they are counted, and need none."""
    order = [i for i in finishing_order(ops) if works[i] is not None]
    trips = _round_trips(order, works)
    found = [NONE] * len(works)
    for i in order:
        work = works[i]
        assert work is not None
        read = sum(size for at, (_, size) in enumerate(work.reads) if (i, at) in trips.reads)
        written = sum(size for at, (_, size) in enumerate(work.writes) if (i, at) in trips.writes)
        if read or written:
            found[i] = Traffic(memory_us=0.0, round_trip_us=0.0, round_trip_bytes=read + written)
    return found


def finishing_order(ops: Sequence[Op]) -> list[int]:
    """Indices of the ops in the order in which they end: what is inside an op ends before it."""
    children: dict[int, list[int]] = {}
    for i, op in enumerate(ops):
        children.setdefault(op.parent, []).append(i)
    roots = sorted(children.get(-1, ()), key=lambda i: ops[i].start_us)
    # Taken from the end, parents before their last children: the reverse of what is wanted.
    order: list[int] = []
    pending = roots
    while pending:
        i = pending.pop()
        order.append(i)
        pending.extend(children.get(i, ()))
    order.reverse()
    return order


@dataclass(kw_only=True, slots=True)
class _RoundTrips:
    reads: set[tuple[int, int]]  # (op, which read) of what was written before
    writes: set[tuple[int, int]]  # (op, which write) of what is read later
    values: list[int]  # by op: how many it is the first to read


def _round_trips(order: Sequence[int], works: Sequence[Work | None]) -> _RoundTrips:
    found = _RoundTrips(reads=set(), writes=set(), values=[0] * len(works))
    pending: dict[int, list[tuple[int, int]]] = {}  # storage -> writes that no op has read yet
    for i in order:
        work = works[i]
        assert work is not None
        for position, (storage, _) in enumerate(work.reads):
            if storage is not None and storage in pending:
                found.reads.add((i, position))
                # Two writes before the first read are one value: a bias, and the product added to
                # it.
                found.values[i] += bool(pending[storage])
                found.writes.update(pending[storage])
                pending[storage].clear()
        for position, (storage, _) in enumerate(work.writes):
            if storage is not None:
                pending.setdefault(storage, []).append((i, position))
    return found


class _TrafficPricing:
    def __init__(
        self, order: list[int], works: Sequence[Work | None], made: set[int], rates: Rates
    ) -> None:
        self.order = order
        self.works = works
        self.made = made
        self.rates = rates
        self.us_per_byte = [1e-3 / rate for rate in rates.gbps]

    def run(self) -> list[Traffic]:
        trips = _round_trips(self.order, self.works)
        found = [NONE] * len(self.works)
        caches = _Caches(self.rates.sizes)
        ends = self._last_touches()
        # Steps repeat: the first round leaves the caches as the step before would have.
        for last_round in (False, True):
            for i in self.order:
                work = self.works[i]
                assert work is not None
                levels = self._levels(work, caches)
                if last_round:
                    found[i] = self._price(i, work, levels, trips)
                for storage in ends.get(i, ()):
                    caches.forget(storage)
        return found

    def _last_touches(self) -> dict[int, list[int]]:
        """Op -> storages made in this step that no op touches after it."""
        last: dict[int, int] = {}
        for i in self.order:
            work = self.works[i]
            assert work is not None
            for storage, _ in (*work.reads, *work.writes):
                if storage in self.made:
                    last[storage] = i
        ends: dict[int, list[int]] = {}
        for storage, i in last.items():
            ends.setdefault(i, []).append(storage)
        return ends

    def _levels(self, work: Work, caches: _Caches) -> dict[int, int]:
        """Storage -> which working set it is read from."""
        levels: dict[int, int] = {}
        for storage, size in (*work.reads, *work.writes):
            if storage is not None and storage not in levels:
                known = storage not in self.made or caches.knows(storage)
                level = caches.touch(storage, size)
                # New memory was freed just before, so it is as near as the rest of the op.
                levels[storage] = level if known else 0
        return levels

    def _price(
        self,
        i: int,
        work: Work,
        levels: dict[int, int],
        found: _RoundTrips,
    ) -> Traffic:
        sizes = self.rates.sizes
        read_from = {storage for storage, _ in work.reads if storage is not None}
        working_set = work.read_bytes + sum(
            size for storage, size in work.writes if storage not in read_from
        )
        own = min(bisect_left(sizes, working_set), len(sizes) - 1)
        memory_us = round_trip_us = 0.0
        round_trip_bytes = 0
        for accesses, trips, free in (
            (work.reads, found.reads, frozenset()),
            # Memory that is read and written in place costs no more than to read it: neg_ of 4 MB
            # took 43 us where neg took 105, of 64 MB 3.0 ms against 6.8 (2-core EPYC, one thread).
            (work.writes, found.writes, read_from),
        ):
            for position, (storage, size) in enumerate(accesses):
                level = own if storage is None else max(own, levels[storage])
                price_us = 0.0 if storage in free else size * self.us_per_byte[level]
                memory_us += price_us
                if (i, position) in trips:
                    round_trip_us += price_us
                    round_trip_bytes += size
        return Traffic(
            memory_us=memory_us, round_trip_us=round_trip_us, round_trip_bytes=round_trip_bytes
        )


class _Caches:
    """Memories of several sizes that each keep what was touched last."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.levels: list[OrderedDict[int, int]] = [OrderedDict() for _ in sizes]
        self.sizes = sizes
        self.free = list(sizes)

    def knows(self, storage: int) -> bool:
        return storage in self.levels[-1]

    def touch(self, storage: int, size: int) -> int:
        """The smallest memory that has it, or the largest of all; afterwards all have it."""
        found = len(self.levels) - 1
        for level in range(found, -1, -1):
            kept, free = self.levels[level], self.free[level]
            before = kept.pop(storage, 0)
            if before:
                found = level
                free += before
                if before > size:
                    size = before
            free -= size
            if size > self.sizes[level]:
                kept.clear()  # it drives out everything, and in the end its own beginning
                free = self.sizes[level]
            else:
                kept[storage] = size
                while free < 0:
                    free += kept.popitem(last=False)[1]
            self.free[level] = free
        return found

    def forget(self, storage: int) -> None:
        for level, kept in enumerate(self.levels):
            self.free[level] += kept.pop(storage, 0)
