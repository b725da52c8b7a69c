"""Which op reads what another op wrote.

In: the ops of a profile with the work each has to do. Out: a `Flow`. A `Value` is what one op wrote
to one storage, until another op writes to it. So an op that works in place reads one value and
makes the next.

If a recording does not name the storages (a trace from a file), values are matched by order and
size: an op reads the latest value of its thread and phase that has the size and type of one of its
inputs and that no op has read yet. A second reader of the same value cannot be told from a reader
of something older, so it is not joined. Of a product, only the left factor is matched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torchweld.findings.product_shapes import factors_of
from torchweld.profiles.accounting.memory_traffic import finishing_order
from torchweld.profiles.accounting.op_calls import Work
from torchweld.profiles.profile import Op, Phase

# How many results back an input is searched for if storages have no names. Two products, an
# activation and what joins them lie within four.
LOOK_BACK = 4


@dataclass(eq=False, slots=True)
class Value:
    """What `producer` wrote; -1 if it was there before the step."""

    producer: int
    readers: list[int] = field(default_factory=list)
    overwritten: bool = False


Reading = tuple[Value, int]  # and how many bytes


@dataclass(frozen=True, kw_only=True)
class Flow:
    """`reads[i]` and `writes[i]` run parallel to the reads and writes of the work of op i."""

    reads: Sequence[tuple[Reading, ...]]
    writes: Sequence[tuple[Reading, ...]]
    order: Sequence[int]  # the ops that do work, as they end
    inferred: bool  # by order and size

    def outside(self, value: Value, members: set[int] | frozenset[int]) -> bool:
        """Whether ops outside `members` need this value."""
        if value.readers:
            return any(reader not in members for reader in value.readers)
        # No op read it: it is a result of the step, unless it was overwritten.
        return not value.overwritten


def flow_of(ops: Sequence[Op], works: Sequence[Work | None]) -> Flow:
    """`works[i]` is None for an op that does no work."""
    order = [i for i in finishing_order(ops) if works[i] is not None]
    named = any(
        storage is not None
        for work in works
        if work is not None
        for storage, _ in (*work.reads, *work.writes)
    )
    reader = _ByStorage() if named else _ByOrder(ops, works)
    reads: list[tuple[Reading, ...]] = [()] * len(ops)
    writes: list[tuple[Reading, ...]] = [()] * len(ops)
    for i in order:
        work = works[i]
        assert work is not None
        reads[i] = tuple(reader.reads(i, work))
        for value, _ in reads[i]:
            value.readers.append(i)
        writes[i] = tuple(reader.writes(i, work))
    return Flow(reads=reads, writes=writes, order=order, inferred=not named)


class _ByStorage:
    def __init__(self) -> None:
        self.current: dict[int, Value] = {}

    def reads(self, i: int, work: Work) -> list[Reading]:
        found = []
        for storage, size in work.reads:
            if storage is None:
                found.append((Value(-1), size))
            else:
                found.append((self.current.setdefault(storage, Value(-1)), size))
        return found

    def writes(self, i: int, work: Work) -> list[Reading]:
        found = []
        for storage, size in work.writes:
            value = Value(i)
            if storage is not None:
                before = self.current.get(storage)
                if before is not None:
                    before.overwritten = True
                self.current[storage] = value
            found.append((value, size))
        return found


class _ByOrder:
    def __init__(self, ops: Sequence[Op], works: Sequence[Work | None]) -> None:
        self.ops = ops
        self.nested = [False] * len(ops)
        for i, op in enumerate(ops):
            if op.parent >= 0:
                self.nested[i] = self.nested[op.parent] or works[op.parent] is not None
        # (thread, phase) -> value, bytes and type of the latest results, oldest first
        self.recent: dict[tuple[int, Phase], list[tuple[Value, int, str]]] = {}

    def reads(self, i: int, work: Work) -> list[Reading]:
        recent = self.recent.get((self.ops[i].thread, self.ops[i].phase), [])
        dtype = _type_of(self.ops[i])
        free = [
            (value, size) for value, size, kind in recent if not value.readers and kind == dtype
        ]
        factors = factors_of(self.ops[i])
        open_positions = (
            list(range(len(work.reads)))
            if factors is None
            else [factors.position] * (factors.position < len(work.reads))
        )
        found: list[Reading] = [(Value(-1), size) for _, size in work.reads]
        # The latest result goes to the last input that it fits: what was there before is usually
        # the first operand of a sum.
        for value, size in reversed(free):
            fitting = [position for position in open_positions if found[position][1] == size]
            if fitting:
                found[fitting[-1]] = (value, size)
                open_positions.remove(fitting[-1])
        return found

    def writes(self, i: int, work: Work) -> list[Reading]:
        key = (self.ops[i].thread, self.ops[i].phase)
        found = [(Value(i), size) for _, size in work.writes]
        if not self.nested[i]:  # what runs inside an op prepares its result, and is not a result
            recent = self.recent.setdefault(key, [])
            recent.extend((value, size, _type_of(self.ops[i])) for value, size in found)
            del recent[:-LOOK_BACK]
        return found


def _type_of(op: Op) -> str:
    return next((tensor.dtype for tensor in op.inputs if tensor is not None), "")
