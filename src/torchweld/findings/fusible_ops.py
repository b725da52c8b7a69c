"""Finds ops that could run as one: runs of element-wise ops, and blocks of Linears around them.

In: an `Evidence`. Out: `PointwiseRun`s and `FusibleBlock`s, structure only; `weld_bounds.py` says
what they would save.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torchweld.findings.data_flow import Value
from torchweld.findings.evidence import Evidence
from torchweld.findings.product_shapes import Factors, factors_of
from torchweld.profiles.accounting.op_calls import OpCall, broadcast

# Element by element; so is the mask of a dropout.
_ELEMENTWISE = ("pointwise", "random")


@dataclass(frozen=True, kw_only=True)
class PointwiseRun:
    """Element-wise ops over the same elements, joined by what they write and read."""

    ops: tuple[int, ...]  # in order


@dataclass(frozen=True, kw_only=True)
class FusibleBlock:
    """Linears with element-wise ops between them: a chain of layers."""

    products: tuple[int, ...]  # in order
    between: tuple[int, ...]  # the element-wise ops
    gated: bool

    @property
    def ops(self) -> tuple[int, ...]:
        return (*self.products, *self.between)


class _Sets:
    """Disjoint sets of ops."""

    def __init__(self) -> None:
        self.leader: dict[int, int] = {}

    def find(self, i: int) -> int:
        self.leader.setdefault(i, i)
        while self.leader[i] != i:
            self.leader[i] = self.leader[self.leader[i]]
            i = self.leader[i]
        return i

    def join(self, a: int, b: int) -> None:
        a, b = self.find(a), self.find(b)
        self.leader[max(a, b)] = min(a, b)

    def groups(self) -> list[list[int]]:
        found: dict[int, list[int]] = {}
        for i in sorted(self.leader):
            found.setdefault(self.find(i), []).append(i)
        return list(found.values())


def runs_of(case: Evidence) -> list[PointwiseRun]:
    """All runs, those of a single op too.

    Two ops are in one run if one reads what the other wrote, over the same elements, in the same
    phase, and only element-wise ops lie on any path between them: what has to wait for a product
    in the middle cannot be one op.
    """
    flow, sets = case.flow, _Sets()
    # How many ops that are not element-wise come before, on the longest path. If two joined ops
    # have equal numbers, no such op lies between them.
    stage: dict[int, int] = {}
    elements: dict[int, int] = {}
    free: set[int] = set()  # random numbers, and what is made only of them: can be made anywhere
    for i in flow.order:
        kind = case.about(i).kind
        before = [value.producer for value, _ in flow.reads[i] if value.producer >= 0]
        stage[i] = max((stage[p] for p in before if p not in free), default=0)
        if kind not in _ELEMENTWISE or not case.is_priced(i):
            stage[i] += 1
            continue
        elements[i] = broadcast(OpCall(case.ops[i]).inputs)
        if (kind == "random" or before) and all(p in free for p in before):
            free.add(i)
        sets.find(i)
        for p in before:
            same = elements.get(p) == elements[i] and case.ops[p].phase == case.ops[i].phase
            if same and (stage[p] == stage[i] or _is_used_here(case, p, free)):
                sets.join(p, i)
    return [PointwiseRun(ops=tuple(group)) for group in sets.groups()]


def _is_used_here(case: Evidence, i: int, free: set[int]) -> bool:
    """Whether only element-wise ops read what this op makes of random numbers."""
    return i in free and all(
        case.about(reader).kind in _ELEMENTWISE
        for value, _ in case.flow.writes[i]
        for reader in value.readers
    )


def linears_of(case: Evidence) -> dict[int, Factors]:
    """The products of the forward that a Linear is made of."""
    found = {}
    for i, op in enumerate(case.ops):
        if case.is_forward(i) and case.is_priced(i) and case.about(i).kind == "product":
            factors = factors_of(op)
            if factors is not None:
                found[i] = factors
    return found


def input_of(case: Evidence, i: int, factors: Factors) -> Value | None:
    """The value that a product reads as its x."""
    reads = case.flow.reads[i]
    return reads[factors.position][0] if factors.position < len(reads) else None


def blocks_of(
    case: Evidence, runs: Iterable[PointwiseRun], linears: dict[int, Factors]
) -> list[FusibleBlock]:
    """Chains: a run joins products if it reads products and only products read its result.

    Not part of a chain are runs that read another full-size tensor (a residual), join two products
    of different inputs, or join products of different numbers of rows (a reshape between them mixes
    rows). A gate is two products of one input that meet in a run.
    """
    sets = _Sets()
    gates: set[int] = set()
    for run in runs:
        ends = _ends(case, run, linears)
        if ends is None:
            continue
        sources, targets = ends
        for op in (*sources, *targets, *run.ops):
            sets.join(run.ops[0], op)
        if len(sources) > 1:
            gates.update(run.ops)
    found = []
    for group in sets.groups():
        between = tuple(i for i in group if i not in linears)
        found.append(
            FusibleBlock(
                products=tuple(i for i in group if i in linears),
                between=between,
                gated=any(i in gates for i in between),
            )
        )
    return found


def _ends(
    case: Evidence, run: PointwiseRun, linears: dict[int, Factors]
) -> tuple[list[int], list[int]] | None:
    """The products before and after a run; None if it does not lie between products."""
    members = set(run.ops)
    sources: set[int] = set()
    targets: set[int] = set()
    for i in run.ops:
        if not case.is_forward(i):
            return None
        tensors = OpCall(case.ops[i]).inputs
        whole = broadcast(tensors)
        for position, (value, _) in enumerate(case.flow.reads[i]):
            if value.producer in members:
                continue
            if value.producer in linears:
                sources.add(value.producer)
            elif position >= len(tensors) or not _is_small(tensors[position].shape, whole):
                return None
        for value, _ in case.flow.writes[i]:
            for reader in value.readers:
                if reader in members or not case.is_forward(reader):
                    continue
                if reader not in linears or input_of(case, reader, linears[reader]) is not value:
                    return None
                targets.add(reader)
    if not sources or not targets or len(sources) > 2:
        return None
    inputs = {id(input_of(case, source, linears[source])) for source in sources}
    rows = {linears[i].M for i in (*sources, *targets)}
    return (sorted(sources), sorted(targets)) if len(inputs) == len(rows) == 1 else None


def _is_small(shape: tuple[int, ...], whole: int) -> bool:
    """A number or a vector, such as a bias. With one row, a vector is as large as the rest."""
    count = 1
    for n in shape:
        count *= n
    return len([n for n in shape if n != 1]) <= 1 and (len(shape) <= 1 or count < whole)
