"""What one step of a welded model does, as whole numbers that are the same at every run.

In: a model, welded, and what it runs on. Out: `Counters`, by module. They come from one recorded
step after two warm ones: shapes and names, never times. A step is recorded twice, and a counter
that differs between the two is an error rather than a figure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from torchweld.core.errors import NotMeasuredError
from torchweld.core.muted_warnings import untold
from torchweld.core.record_fields import Count
from torchweld.profiles.accounting.op_costs import works_of
from torchweld.profiles.attributing.attribution import attribute
from torchweld.profiles.attributing.launch_counts import launches_of, nodes_of_recording
from torchweld.profiles.recorded_events import Recording
from torchweld.profiles.recording.module_instrument import Roots, instrumented
from torchweld.profiles.recording.profile_building import describe
from torchweld.profiles.recording.profiled_steps import model_step
from torchweld.profiles.recording.torch_profiler import record
from torchweld.welds.swapping.swap import stats

# The counters, in the order in which they are shown. Less is better for all of them.
NAMES = {
    "kernels": "work that is launched: what tw.expect counts as ops",
    "ops": "calls of ops, views and those inside others included",
    "allocations": "memory taken for tensors",
    "bytes moved": "by the kernels, each operand read and each result written once",
    "original calls": "calls of welded blocks that ran their original code",
}
WARM_UP_STEPS = 2


@dataclass(frozen=True, kw_only=True)
class Counters:
    """`own[path][counter]`: of one step, in a module but in none of its children; "" is the root.

    Every module that can be seen has an entry. `welded` are the paths of the blocks that run fused.
    """

    own: dict[str, dict[str, Count]]
    welded: tuple[str, ...] = ()
    reasons: dict[str, str] = field(default_factory=dict)  # path -> why calls ran the original

    def inside(self, counter: str) -> dict[str, int]:
        """A counter for each module, including everything inside it."""
        found: dict[str, int] = defaultdict(int)
        for path, counts in self.own.items():
            for holder in _holders(path):
                found[holder] += counts.get(counter, 0)
        return dict(found)

    def step(self, counter: str) -> int:
        return sum(counts.get(counter, 0) for counts in self.own.values())


def _holders(path: str) -> Iterable[str]:
    """The module itself and all that it stands in."""
    yield ""
    end = path.find(".")
    while end >= 0:
        yield path[:end]
        end = path.find(".", end + 1)
    if path:
        yield path


def count_step(model: nn.Module, inputs: Any, training: bool) -> Counters:
    """Counts one step over all inputs; raises NotMeasuredError where two steps differ."""
    step = model_step(model, inputs, training, None, None)

    def one() -> tuple[Counters, dict[str, int]]:
        before = _original_calls(model)
        with instrumented(step.roots):
            recording = record(step.run, step.prepare, shapes=True, memory=True)
        after = _original_calls(model)
        originals = {path: after[path] - before[path] for path in after}
        return _counted(recording, step.roots, originals), originals

    with untold(), step.keep():  # the counters say which blocks run their original code
        for _ in range(WARM_UP_STEPS):
            step.prepare()
            step.run()
        counted, originals = one()
        again, _ = one()
    _refuse_differences(counted, again)
    found = stats(model)
    return Counters(
        own=counted.own,
        welded=tuple(path for path in found if not originals[path]),
        reasons={
            path: ", ".join(one.originals) for path, one in found.items() if originals[path] > 0
        },
    )


def _original_calls(model: nn.Module) -> dict[str, int]:
    return {path: sum(one.originals.values()) for path, one in stats(model).items()}


def _counted(recording: Recording, roots: Roots, originals: dict[str, int]) -> Counters:
    found = attribute(recording, describe(roots))
    paths = [module.path for module in found.modules]
    own = {path: dict.fromkeys(NAMES, 0) for path in paths}
    for op, work in zip(found.ops, works_of(found.ops), strict=True):
        counts = own[paths[op.module]]
        counts["ops"] += 1
        counts["bytes moved"] += 0 if work is None else work.read_bytes + work.written_bytes
    for launch in launches_of(nodes_of_recording(recording)):
        counts = own.setdefault(launch.module, dict.fromkeys(NAMES, 0))
        counts["kernels"] += launch.works
    for allocation in recording.allocations:
        if allocation.bytes > 0:
            module = found.module_of[allocation.event] if allocation.event >= 0 else 0
            own[paths[module]]["allocations"] += 1
    for path, calls in originals.items():
        own.setdefault(path, dict.fromkeys(NAMES, 0))["original calls"] = calls
    return Counters(own=own)


def _refuse_differences(a: Counters, b: Counters) -> None:
    for path in sorted({*a.own, *b.own}):
        one, other = a.own.get(path, {}), b.own.get(path, {})
        for name in NAMES:
            if one.get(name, 0) != other.get(name, 0):
                raise NotMeasuredError(
                    f"{name} of {path or 'the model'} differ between two steps on the same inputs, "
                    f"{one.get(name, 0)} and {other.get(name, 0)}; what a step does has to depend "
                    "on its inputs alone before it can be gated"
                )
