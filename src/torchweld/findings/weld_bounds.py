"""What ops take now, and the least that one op in place of several could take.

In: sets of ops that do work, each of which one op could replace. Out: `Welds`, with claims on the
difference.

Why the difference is an upper bound on the gain: one op in place of a set has to

- do the same arithmetic, no faster than the machine's measured peak;
- read what it is given and write what others need of its results, each once, no faster than memory
  was measured to be read. What passes between the ops need not move; what other ops read, what the
  step leaves behind, weights and inputs must. A byte costs what the account says for the op that
  moves it now;
- be started once, forward and backward, and be called from Python if a module did the work. That
  takes as long as the cheapest call of any module in the profile, or as the cheapest call of a
  fused block, if the profile says how long that takes on its machine.

It can do arithmetic while it waits for memory, so the larger of the first two counts. What a step
does around the call of the model stays, though the profile shows it as the model's Python. All
other time of the ops and of what belongs to them (views, allocations, autograd nodes, Python of
modules that do nothing else) is claimed, whether or not such a good kernel exists.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from torchweld.findings.evidence import Evidence
from torchweld.findings.finding import Claims, Slice

_WASTED = ("launch_us", "host_us", "round_trip_us", "traffic_us", "slow_us", "unexplained_us")
# Time for what has to move is taken off these claims, in this order.
_MOVING = ("traffic_us", "round_trip_us")


@dataclass(frozen=True, kw_only=True)
class Weld:
    """One set of ops that one op could replace. Times without Python, as recorded."""

    members: frozenset[int]  # all ops that would disappear, also those that do no work
    now_us: float
    least_us: float
    spared_bytes: int
    launches: int


@dataclass(frozen=True, kw_only=True)
class Welds:
    """All sets together. Times with the Python that would disappear."""

    each: tuple[Weld, ...]
    claims: Claims
    now_us: float
    least_us: float

    @property
    def members(self) -> set[int]:
        return {i for weld in self.each for i in weld.members}

    @property
    def spared_bytes(self) -> int:
        return sum(weld.spared_bytes for weld in self.each)

    @property
    def launches(self) -> int:
        return sum(weld.launches for weld in self.each)


def weld(case: Evidence, sets: Sequence[Iterable[int]], with_backward: bool = False) -> Welds:
    """One op in place of each of `sets`; `with_backward`, another one for its backward.

    The sets share no op, but a set of backward ops may overlap with the backward of another set.
    """
    groups = [_with_what_belongs(case, set(chosen)) for chosen in sets]
    whole = _whole_modules(case, groups)
    _add_idle_ops(case, groups, whole)
    if with_backward:
        for members in groups:
            members |= {j for i in members for j in case.backward_ops(i)}
    claims: dict[Slice, float] = {}
    each = tuple(_one(case, members, claims) for members in groups)
    python = _python(case, groups, whole, with_backward)
    claims.update(python)
    return Welds(
        each=each,
        claims=claims,
        now_us=case.time_us(set().union(*groups)) + case.recorded_us(python),
        least_us=sum(weld.least_us for weld in each),
    )


def _one(case: Evidence, members: set[int], claims: dict[Slice, float]) -> Weld:
    """One set; adds what it claims to `claims`."""
    works = [i for i in members if case.works[i] is not None]
    needed = needed_bytes(case, works)
    mine: dict[Slice, float] = {}
    for i in members:
        mine.update(case.claim(i, _WASTED))
    start_us = _keep_one_start(case, members, mine)
    arithmetic_us = sum(case.split(i).arithmetic_us for i in works)
    memory_us = sum(count * price_of_byte(case, i) for i, count in needed.items())
    _keep(mine, members, memory_us - arithmetic_us)
    for slice_, us in mine.items():
        claims[slice_] = max(us, claims.get(slice_, 0.0))
    moved = sum(case.about(i).read_bytes + case.about(i).written_bytes for i in works)
    return Weld(
        members=frozenset(members),
        now_us=case.time_us(members),
        least_us=max(arithmetic_us, memory_us) + start_us,
        spared_bytes=moved - sum(needed.values()),
        launches=sum(case.about(i).launches for i in members),
    )


def needed_bytes(case: Evidence, works: Collection[int]) -> dict[int, int]:
    """Op -> bytes that it has to move even if all of `works` were one op.

    A value from outside is read once, by the first op that reads it. A value of their own is
    written if anything outside reads it, or if it is left when the step ends.
    """
    flow, members = case.flow, set(works)
    seen: set[int] = set()  # identities of values; the flow keeps them alive
    found = dict.fromkeys(works, 0)
    for i in sorted(works):
        for value, size in flow.reads[i]:
            if value.producer not in members and id(value) not in seen:
                seen.add(id(value))
                found[i] += size
        for value, size in flow.writes[i]:
            if flow.outside(value, members):
                found[i] += size
    return found


def price_of_byte(case: Evidence, i: int) -> float:
    """µs, by the account of this op; 0 if its traffic hides behind its arithmetic."""
    about = case.about(i)
    moved = about.read_bytes + about.written_bytes
    excess_us = case.split(i).traffic_us + case.split(i).round_trip_us
    return about.roofline_us / moved if moved and excess_us > 0 else 0.0


# ---- what belongs to a set of ops ----


def _with_what_belongs(case: Evidence, chosen: set[int]) -> set[int]:
    """Adds what runs inside the chosen ops, and ops around them that contain no other work."""
    members = {inner for i in chosen for inner in case.inside(i)}
    counts: dict[int, int] = {}
    for i in [i for i in members if case.works[i] is not None]:
        for outer in case.around(i):
            counts[outer] = counts.get(outer, 0) + 1
    for outer, count in counts.items():
        if outer not in members and count == case.working_inside[outer]:
            members.update(case.inside(outer))
    return members


def _whole_modules(case: Evidence, groups: Sequence[set[int]]) -> set[int]:
    """Modules whose forward does only work of the sets, in any call, children included."""
    members = {i for group in groups for i in group}
    candidates = {
        outer
        for module in {case.ops[i].module for i in members}
        for outer in case.modules_around(module)
    }
    return {
        module
        for module in candidates
        if all(i in members for i in case.forward_work_of_module[module])
    }


def _add_idle_ops(case: Evidence, groups: Sequence[set[int]], whole: set[int]) -> None:
    """Adds views, allocations and the like of modules that do nothing else.

    Each goes to the set that began last before it.
    """
    taken = {i for group in groups for i in group}
    ordered = sorted(range(len(groups)), key=lambda number: min(groups[number]))
    begins = [min(groups[number]) for number in ordered]
    for module in whole:
        for i in case.ops_of_module[module]:
            if i not in taken and case.is_forward(i):
                place = max(0, bisect_right(begins, i) - 1)
                groups[ordered[place]].add(i)


def _python(
    case: Evidence, groups: Sequence[set[int]], whole: set[int], with_backward: bool
) -> dict[Slice, float]:
    """Claims on what modules do outside ops.

    In modules that do nothing else: all of it (the backward engine's part only with the backward),
    except for one call per set, since something is called in their place. In other modules: what
    was recorded between two ops of a set.
    """
    if case.on_device:
        return {}
    claims: dict[Slice, float] = {}
    called = Counter(_outermost_module(case, members, whole) for members in groups)
    for module in whole:
        engine_us = case.profile.modules[module].engine_us if with_backward else 0.0
        us = min(case.profile.modules[module].python_us + engine_us, case.host_of_module[module])
        us -= called[module] * case.cheapest_call_us
        us -= case.around_us if module == 0 else 0.0
        if us > 0:
            claims[Slice("module", module, "host_us")] = us
    for members in groups:
        outermost = sorted(i for i in members if case.parents[i] < 0 and case.is_forward(i))
        for i in outermost[1:]:
            module, pause_us = case.gaps.get(i, (0, 0.0))
            if module not in whole and pause_us > 0:
                claims[Slice("before op", i, "host_us")] = pause_us
    return claims


def _outermost_module(case: Evidence, members: set[int], whole: set[int]) -> int | None:
    """A module that does nothing else and stands in no other such module."""
    for i in sorted(members):
        found = [m for m in case.modules_around(case.ops[i].module) if m in whole]
        if found:
            return found[-1]
    return None


# ---- what stays ----


def _keep_one_start(case: Evidence, members: set[int], claims: dict[Slice, float]) -> float:
    """Gives up the claim on one start, forward and backward; gives the µs that stay."""
    kept_us = 0.0
    for forward in (True, False):
        starts = [
            slice_
            for i in members
            if case.is_forward(i) == forward and (slice_ := Slice("op", i, "launch_us")) in claims
        ]
        if starts:
            kept_us += claims.pop(max(starts, key=lambda start: claims[start]))
    return kept_us


def _keep(claims: dict[Slice, float], members: set[int], kept_us: float) -> None:
    """Takes `kept_us` off the claims on traffic."""
    for part in _MOVING:
        slices = [slice_ for i in members if (slice_ := Slice("op", i, part)) in claims]
        whole_us = sum(claims[slice_] for slice_ in slices)
        if kept_us <= 0 or whole_us <= 0:
            continue
        left = max(0.0, 1 - kept_us / whole_us)
        for slice_ in slices:
            if left > 0:
                claims[slice_] *= left
            else:
                del claims[slice_]
        kept_us -= whole_us * (1 - left)
