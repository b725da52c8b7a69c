"""Ops inside ops: which of them does the work, and which of them counts.

In: the names of ops, and for each the index of the op around it (-1 for none), which stands before
it. Out: one answer per op. `working` says which ops do the work, `launching` which count as a
launch, `leaves` the same with views and allocations. So `tw.expect`, `--expect` and the launches of
the account on a CPU are the same count. Its rules:

- What runs inside an op that counts belongs to that op. `aten::addmm` copies its bias inside, but
  is one product and no copy; `aten::clone` calls `aten::copy_`, and is one copy.
- An op that only calls others (`aten::linear`, `aten::contiguous`, backward nodes, ranges) does not
  count; what it calls does. If a view or an allocation calls an op that does work, that op counts.
- If a fused op, an attention op or a product runs products inside, it was not one kernel: those
  count, and it does not.
- An op of unknown kind always counts, even if it runs known ones: a factorisation copies its
  operand and checks its result, which does not say what else it does. If a product, an attention, a
  convolution or a fused op runs inside it, what runs inside counts as well.
- Of a compiled graph, the ops that show inside it count.
- Work of the compiler itself is not part of the model.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from torchweld.profiles.attributing.op_kinds import (
    WORK_KINDS,
    Kind,
    hides_kernels,
    is_compiler_work,
    kind_of,
)

# Kinds that do most of a model's arithmetic.
_HEAVY: frozenset[Kind] = frozenset(("product", "attention", "convolution", "fused"))
_PREPARING: frozenset[Kind] = frozenset(("copy", "fill"))
# These may hand their work to what they run inside.
_OPENED: frozenset[Kind] = frozenset(("product", "attention", "fused"))
_SILENT: frozenset[Kind] = frozenset(("metadata", "allocation"))
_LOSS = re.compile(r"_loss|cross_entropy")


def working(names: Sequence[str], parents: Sequence[int]) -> list[bool]:
    """Which ops are charged with what they have to do: the operations and the bytes.

    An op of a working kind that hands its work to an op inside it (aten::clone to aten::copy_,
    aten::mean to aten::sum) does none; one that only has its operands prepared (aten::addmm copies
    the bias into its result) does. An op of unknown kind that runs known ones is charged with
    nothing, so that no byte counts twice; its own time stays its own.
    """
    return _working(names, parents, kinds_in_place(names, parents))


def launching(names: Sequence[str], parents: Sequence[int]) -> list[bool]:
    """Which ops count as a launch: the leaves that do work."""
    kinds = kinds_in_place(names, parents)
    found = _leaves(names, parents, kinds)
    return [leaf and kind in WORK_KINDS for leaf, kind in zip(found, kinds, strict=True)]


def leaves(names: Sequence[str], parents: Sequence[int], is_op: Sequence[bool]) -> list[bool]:
    """Which ops count as work, as a view or as an allocation; `is_op` is False for ranges."""
    return _leaves(names, parents, _kinds(names, parents, is_op))


def kinds_in_place(names: Sequence[str], parents: Sequence[int]) -> list[Kind]:
    """The kind of each op by its name; whatever the compiler runs has the compiler's kind."""
    return _kinds(names, parents, None)


def _kinds(
    names: Sequence[str], parents: Sequence[int], is_op: Sequence[bool] | None
) -> list[Kind]:
    """The kind of each event, by name. Ranges and the compiler's work only call others."""
    found: list[Kind] = []
    compiling: list[bool] = []
    for i, name in enumerate(names):
        inside = parents[i] >= 0 and compiling[parents[i]]
        compiling.append(inside or is_compiler_work(name))
        if compiling[i]:
            found.append("dynamo")
        else:
            found.append(kind_of(name) if is_op is None or is_op[i] else "composite")
    return found


def _working(names: Sequence[str], parents: Sequence[int], kinds: Sequence[Kind]) -> list[bool]:
    works = [kind in WORK_KINDS for kind in kinds]
    found = list(works)
    for i, kind in enumerate(kinds):
        if not works[i]:
            continue
        around = parents[i]
        while around >= 0 and not works[around]:
            around = parents[around]
        if around >= 0 and _hands_over(names[around], kinds[around], names[i], kind):
            found[around] = False
    return found


def _hands_over(name: str, kind: Kind, inner_name: str, inner: Kind) -> bool:
    """Whether `inner`, which runs inside `name`, does the work of `name`."""
    if hides_kernels(name):
        return inner == "fused"
    if _LOSS.search(name) or inner_name == "aten::nonzero":
        return False  # element by element itself, then a sum; looks for indices first
    if kind in _HEAVY:
        return inner in _HEAVY
    if kind in ("optimizer", "unknown"):
        return inner not in _PREPARING
    return inner == kind or (kind == "normalisation" and inner == "reduction")


def _leaves(names: Sequence[str], parents: Sequence[int], kinds: Sequence[Kind]) -> list[bool]:
    works = _working(names, parents, kinds)
    holds_work = _hold(parents, kinds, WORK_KINDS)
    holds_heavy = _hold(parents, kinds, _HEAVY)
    found: list[bool] = []
    inside: list[bool] = []  # something around it counts, or it counts itself
    for i, kind in enumerate(kinds):
        around = parents[i] >= 0 and inside[parents[i]]
        if kind in _SILENT:
            leaf = not holds_work[i]
        elif kind in _OPENED:
            leaf = works[i] and not hides_kernels(names[i])
        else:
            leaf = kind in WORK_KINDS
        found.append(leaf and not around)
        owns = leaf and not (kind == "unknown" and holds_heavy[i])
        inside.append(owns or around)
    return found


def _hold(parents: Sequence[int], kinds: Sequence[Kind], wanted: frozenset[Kind]) -> list[bool]:
    """Which ops have one of the wanted kinds somewhere inside."""
    found = [False] * len(kinds)
    for i in range(len(kinds) - 1, -1, -1):
        if parents[i] >= 0 and (found[i] or kinds[i] in wanted):
            found[parents[i]] = True
    return found
