"""A profile with its account, and what several rules read of both: trees, places, data flow."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

from torchweld.core.module_paths import grouped_paths
from torchweld.core.not_measured import NotMeasured
from torchweld.findings.data_flow import Flow, flow_of
from torchweld.findings.finding import Claims, Slice
from torchweld.profiles.accounting.op_calls import Work
from torchweld.profiles.accounting.op_costs import works_of
from torchweld.profiles.accounting.time_account import peaks_hold
from torchweld.profiles.accounting.time_splits import PARTS, Account, OpAccount, Split, measured
from torchweld.profiles.profile import Op, Profile

# How the model itself is called where a place is named.
ROOT = "the model"
ACCUMULATION = "AccumulateGrad"
_NOT_FORWARD = ("backward", "optimizer")
# The correction for the profiler's cost is right to within a tenth of what modules take on their
# own. So a tenth of what is claimed, or of what is left, may belong to the other part, and an upper
# bound has to include it.
MARGIN = 0.10


class Evidence:
    """What the rules read; only for a profile whose step was measured."""

    def __init__(self, profile: Profile, account: Account) -> None:
        self.profile = profile
        self.account = account
        self.step = measured(account.step)
        self.step_us = self.step.total_us
        self.on_device = profile.device is not None
        self.parents = [op.parent for op in profile.ops]

    @property
    def ops(self) -> Sequence[Op]:
        return self.profile.ops

    def about(self, i: int) -> OpAccount:
        return self.account.ops[i]

    def split(self, i: int) -> Split:
        return measured(self.account.ops[i].split)

    def time_us(self, members: Iterable[int]) -> float:
        return sum(self.split(i).total_us for i in members)

    def is_forward(self, i: int) -> bool:
        """Part of neither the backward pass nor the optimizer; a recomputed forward is one."""
        return self.profile.ops[i].phase not in _NOT_FORWARD

    # ---- what does work ----

    @cached_property
    def works(self) -> list[Work | None]:
        """What every op has to do; None for one that does nothing itself."""
        return works_of(self.ops)

    @cached_property
    def flow(self) -> Flow:
        return flow_of(self.ops, self.works)

    def is_priced(self, i: int) -> bool:
        """Whether the machine's peaks say how fast this op could be."""
        about = self.about(i)
        return self.works[i] is not None and about.bound != "unknown" and about.roofline_us > 0

    # ---- trees ----

    @cached_property
    def children(self) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in self.ops]
        for i, parent in enumerate(self.parents):
            if parent >= 0:
                found[parent].append(i)
        return found

    def inside(self, i: int) -> Iterator[int]:
        """The op itself and all that runs inside it."""
        pending = [i]
        while pending:
            i = pending.pop()
            yield i
            pending.extend(self.children[i])

    def around(self, i: int) -> Iterator[int]:
        """The ops around this one, the nearest first."""
        while (i := self.parents[i]) >= 0:
            yield i

    def caller(self, i: int) -> str:
        """Name of the outermost op that called this one: what the model's code says."""
        outer = [j for j in self.around(i) if self.about(j).kind not in ("autograd", "dynamo")]
        return self.ops[outer[-1] if outer else i].name.removeprefix("aten::")

    @cached_property
    def working_inside(self) -> list[int]:
        """How many ops do work in each op, itself counted."""
        found = [int(work is not None) for work in self.works]
        for i in range(len(found) - 1, -1, -1):
            if self.parents[i] >= 0:
                found[self.parents[i]] += found[i]
        return found

    @cached_property
    def ops_of_module(self) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in self.profile.modules]
        for i, op in enumerate(self.ops):
            found[op.module].append(i)
        return found

    @cached_property
    def forward_work_of_module(self) -> list[list[int]]:
        """Ops of the forward that do work, in a module or in one of its children."""
        found: list[list[int]] = [[] for _ in self.profile.modules]
        for i, op in enumerate(self.ops):
            if self.works[i] is not None and self.is_forward(i):
                for module in self.modules_around(op.module):
                    found[module].append(i)
        return found

    @cached_property
    def outermost(self) -> list[int]:
        """The ops that run in no other, thread by thread in order."""
        alone = [i for i, parent in enumerate(self.parents) if parent < 0]
        return sorted(alone, key=lambda i: (self.ops[i].thread, self.ops[i].start_us))

    def modules_around(self, module: int) -> Iterator[int]:
        """The module itself and those it stands in, the root last."""
        while module >= 0:
            yield module
            module = self.profile.modules[module].parent

    # ---- backward ----

    @cached_property
    def backward_of(self) -> dict[int, list[int]]:
        """Forward op -> the outermost backward ops of the nodes that it made.

        If several forward ops note a sequence number, the last to begin made the node. Threads
        count separately: if two threads use the same number, neither is joined.
        """
        made: dict[int, int] = {}
        threads: dict[int, int] = {}
        for i, op in enumerate(self.ops):
            if op.sequence >= 0 and self.is_forward(i):
                if threads.setdefault(op.sequence, op.thread) != op.thread:
                    threads[op.sequence] = -1
                made[op.sequence] = i
        found: dict[int, list[int]] = {}
        for i, op in enumerate(self.ops):
            if op.phase != "backward" or op.sequence not in made or ACCUMULATION in op.name:
                continue
            outer = self.parents[i]
            if outer >= 0 and self.ops[outer].sequence == op.sequence:
                continue  # the engine's event around the node has the number too
            if threads[op.sequence] >= 0:
                found.setdefault(made[op.sequence], []).append(i)
        return found

    def backward_ops(self, i: int) -> Iterator[int]:
        """All backward ops of the nodes that this op made, without recomputed forward ops."""
        for node in self.backward_of.get(i, ()):
            yield from (j for j in self.inside(node) if self.ops[j].phase == "backward")

    # ---- claims ----

    def claim(self, i: int, parts: Sequence[str] = PARTS) -> dict[Slice, float]:
        """These parts of an op's own time, never more than the op takes."""
        split = self.split(i)
        found = {
            Slice("op", i, part): us for part in parts if (us := float(getattr(split, part))) > 0
        }
        return scaled(found, split.total_us)

    @cached_property
    def host_of_module(self) -> list[float]:
        """What each module spends outside ops: Python, and the backward engine."""
        if self.on_device:  # hidden behind the device, or seen as its idle time
            return [0.0] * len(self.profile.modules)
        return [max(0.0, m.python_us + m.engine_us) for m in self.profile.modules]

    @cached_property
    def cheapest_call_us(self) -> float:
        """The least that one call of a fused block costs: as measured on the profile's CPU.

        At least the Python time of the module that takes least; on a device only that is known.
        """
        called = [m for m in self.profile.modules if m.calls and m.python_us > 0]
        least_us = min((m.python_us / m.calls for m in called), default=0.0)
        fused_us = self.profile.fused_call_us
        if self.on_device or isinstance(fused_us, NotMeasured):
            return least_us
        return max(fused_us, least_us)

    @property
    def around_us(self) -> float:
        """What the step does around the call of the model; no change of the model can save it."""
        timing = self.profile.timing
        return timing.around_us if timing is not None else 0.0

    @cached_property
    def gaps(self) -> dict[int, tuple[int, float]]:
        """Outermost op -> the module that ran just before it, and for how long, as recorded."""
        found = {}
        for before, i in zip(self.outermost, self.outermost[1:], strict=False):
            earlier, op = self.ops[before], self.ops[i]
            if earlier.thread == op.thread:
                pause_us = op.start_us - earlier.start_us - earlier.raw_us
                found[i] = (self.place((before, i)), max(0.0, pause_us))
        return found

    def recorded_us(self, claims: Claims) -> float:
        """The sum of claims, in recorded time.

        A module cannot give more than it spends outside ops. What it spends before single ops is
        part of that. Claims on the step are not recorded time.
        """
        total_us = 0.0
        whole: dict[tuple[int, str], float] = {}
        pauses: dict[tuple[int, str], float] = {}
        for (of, number, part), us in claims.items():
            if of == "op":
                total_us += us
            elif of == "module":
                whole[number, part] = us
            elif of == "before op":
                module, _ = self.gaps[number]
                pauses[module, part] = pauses.get((module, part), 0.0) + us
        for key in {*whole, *pauses}:
            us = max(whole.get(key, 0.0), pauses.get(key, 0.0))
            total_us += us if self.on_device else min(us, self.host_of_module[key[0]])
        return total_us

    def settled_us(self, claims: Claims) -> float:
        """The most that can be saved of a step on the clock.

        Where in the step a claim on all of it lies is not known. It may be time that nothing else
        claims, as long as there is such time; but arithmetic at the peak is left.
        """
        saved_us = min(self.recorded_us(claims) * self.scale, self.step_us)
        if self.profile.timing is not None:
            saved_us += MARGIN * min(saved_us, self.step_us - saved_us)
        anywhere_us = sum(us for slice_, us in claims.items() if slice_.of == "step")
        kept_us = self.step.arithmetic_us if peaks_hold(self.account) else 0.0
        return saved_us + min(anywhere_us, max(0.0, self.step_us - kept_us - saved_us))

    @cached_property
    def scale(self) -> float:
        """The factor from recorded time to time on the clock.

        With one thread, claims are shares of the recorded step, so they are scaled to the timed
        step if the two differ. A trace has no other clock. Parallel threads add up to more than the
        step, but what one of them saves is saved in full.
        """
        if self.profile.timing is None or self.on_device or len({o.thread for o in self.ops}) > 1:
            return 1.0
        # Nothing can be claimed of times that the correction made negative.
        ops_us = sum(max(0.0, measured(about.split).total_us) for about in self.account.ops)
        recorded_us = ops_us + sum(self.host_of_module)
        return self.step_us / recorded_us if recorded_us > 0 else 1.0

    # ---- places ----

    def path(self, module: int) -> str:
        return self.profile.modules[module].path or ROOT

    def place(self, members: Iterable[int]) -> int:
        """The innermost module that all these ops belong to."""
        common: list[int] | None = None
        for module in {self.ops[i].module for i in members}:
            chain = list(self.modules_around(module))
            if common is None:
                common = chain
            else:
                kept = set(chain)
                common = [each for each in common if each in kept]
        return common[0] if common else 0

    def patterns(self, modules: Iterable[int]) -> tuple[str, ...]:
        """Paths in the model's order; those that differ only in numbers become one pattern."""
        ordered = sorted(set(modules))
        return tuple(grouped_paths([self.path(module) for module in ordered]))


def scaled(claims: dict[Slice, float], most_us: float) -> dict[Slice, float]:
    """Claims that come to no more than `most_us`, each cut by the same factor."""
    whole_us = sum(claims.values())
    if whole_us <= most_us:
        return claims
    if most_us <= 0:
        return {}
    return {slice_: us * most_us / whole_us for slice_, us in claims.items()}
