"""What a piece of code launches: the ops that do work, each counted once, under a few plain names.

In: the ops of a recording or a profile, as a tree. Out: one `Launch` per leaf. `op_nesting.py` says
which ops are leaves. Kernels of a compiled graph that the profiler cannot see are added from the
graph's code.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from torchweld.core.errors import NotMeasuredError
from torchweld.core.not_measured import NotMeasured
from torchweld.profiles.attributing.attribution import ENGINE, attribute
from torchweld.profiles.attributing.compiled_regions import Regions, key_of
from torchweld.profiles.attributing.kernel_names import is_generated
from torchweld.profiles.attributing.op_kinds import is_compiler_work, kind_of
from torchweld.profiles.attributing.op_nesting import leaves
from torchweld.profiles.profile import Phase, Profile, Tensor
from torchweld.profiles.recorded_events import OP, Recording

# Name -> what it counts, in the order of display. `ops` is the sum of all but the last two, which
# launch nothing.
COUNTERS: Mapping[str, str] = {
    "linear": "matrix products: what a Linear is (addmm, mm, mv)",
    "bmm": "batched matrix products",
    "attention": "attention as one op",
    "convolutions": "convolutions",
    "pointwise": "element by element: activations, add, mul",
    "reductions": "sums, means, maxima, losses, sorts",
    "norms": "layer norm, batch norm, softmax",
    "copies": "data moved as they are: contiguous, to, clone, cat, item",
    "gathers": "embedding, indexing, scatter",
    "random": "random numbers: dropout, rand",
    "fills": "memory filled with a constant",
    "fused": "torchweld's ops, oneDNN's fused Linears, kernels that Inductor wrote",
    "other": "work of another kind: communication, optimizers, ops of unknown libraries",
    "ops": "all work: the sum of the above",
    "metadata": "views and shapes, which launch nothing",
    "allocations": "memory taken, which launches nothing",
}
IDLE = ("metadata", "allocations")
_OF_KIND = {
    "product": "linear",
    "attention": "attention",
    "convolution": "convolutions",
    "pointwise": "pointwise",
    "reduction": "reductions",
    "normalisation": "norms",
    "copy": "copies",
    "gather": "gathers",
    "random": "random",
    "fill": "fills",
    "fused": "fused",
    "allocation": "allocations",
    "metadata": "metadata",
}
_BATCHED = frozenset({"aten::bmm", "aten::baddbmm", "aten::baddbmm_"})
_FORWARD = frozenset({"forward", "other"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """An op or a range; `parent` is the index of the one around it, which stands before it."""

    name: str
    parent: int
    is_op: bool  # not a range of the user's, of a module, of a step
    module: str = ""  # path
    phase: Phase = "forward"
    start_us: float = 0.0
    inputs: tuple[Tensor | None, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """A leaf: something that does work, or a view or an allocation."""

    name: str
    counter: str
    module: str  # path; "" if it is not known
    phase: Phase
    inputs: tuple[Tensor | None, ...] = ()
    node: int = -1  # index of the node it comes from

    @property
    def forward(self) -> bool:
        """Part of neither the backward pass nor the optimizer."""
        return self.phase in _FORWARD

    @property
    def works(self) -> bool:
        return self.counter not in IDLE


def counts_of(launches: Iterable[Launch]) -> dict[str, int]:
    """Every counter, those at zero too."""
    found = dict.fromkeys(COUNTERS, 0)
    for launch in launches:
        found[launch.counter] += 1
        found["ops"] += launch.works
    return found


def nodes_of_recording(recording: Recording) -> list[Node]:
    """The events of a recording, each with the module and the phase it belongs to."""
    found = attribute(recording)
    paths = [module.path for module in found.modules]
    return [
        Node(
            name=event.name,
            parent=event.parent,
            is_op=event.kind == OP,
            module=paths[found.module_of[i]],
            phase=found.phase_of[i],
            start_us=event.start_us,
            inputs=event.inputs,
        )
        for i, event in enumerate(recording.events)
    ]


def nodes_of_profile(profile: Profile) -> list[Node]:
    """The ops of one step of a profile; of several steps in a trace, the last whole one."""
    chosen: Sequence[int] = range(len(profile.ops))
    if (step := profile.whole_step_us) is not None:
        begin_us, end_us = step
        chosen = [i for i in chosen if begin_us <= profile.ops[i].start_us < end_us]
    number = {i: n for n, i in enumerate(chosen)}
    return [
        Node(
            name=op.name,
            parent=number.get(op.parent, -1),
            is_op=True,
            module=profile.modules[op.module].path,
            phase=op.phase,
            start_us=op.start_us,
            inputs=op.inputs,
        )
        for op in map(profile.ops.__getitem__, chosen)
    ]


def launches_of(nodes: Sequence[Node]) -> list[Launch]:
    """The leaves, in order. Raises NotMeasuredError if a compiled graph hides what it runs."""
    is_leaf = leaves(
        [node.name for node in nodes],
        [node.parent for node in nodes],
        [node.is_op for node in nodes],
    )
    seeds = _seeds(nodes)
    regions = Regions()
    found: list[Launch] = []
    for i, node in enumerate(nodes):
        if is_leaf[i]:
            found.append(
                Launch(
                    name=node.name,
                    counter=_counter(node.name),
                    module=node.module,
                    phase="backward" if i in seeds else node.phase,
                    inputs=node.inputs,
                    node=i,
                )
            )
        elif (key := key_of(node.name)) is not None and not _is_covered(i, nodes, is_leaf):
            found.extend(_hidden(key, i, nodes, regions))
    return found


def _counter(name: str) -> str:
    return "bmm" if name in _BATCHED else _OF_KIND.get(kind_of(name), "other")


def _is_covered(i: int, nodes: Sequence[Node], is_leaf: Sequence[bool]) -> bool:
    """Whether what runs here is part of something that counts, or of the compiler's work."""
    while (i := nodes[i].parent) >= 0:
        if is_leaf[i] or is_compiler_work(nodes[i].name):
            return True
    return False


def _seeds(nodes: Sequence[Node]) -> set[int]:
    """The ops that make the gradient a backward pass begins with: the last ones before it.

    `loss.backward()` fills a tensor with ones before the engine starts.
    """
    if not any(node.name == "aten::ones_like" for node in nodes):
        return set()
    found = set()
    before = -1
    # Sorted by time, since the engine may run on a thread of its own.
    for i in sorted(range(len(nodes)), key=lambda i: (nodes[i].start_us, i)):
        if not nodes[i].is_op or (before >= 0 and _is_inside(i, before, nodes)):
            continue
        starts = nodes[i].name.startswith(ENGINE)
        if starts and before >= 0 and nodes[before].name == "aten::ones_like":
            found.add(before)
        before = i
    return found


def _hidden(key: str, index: int, nodes: Sequence[Node], regions: Regions) -> list[Launch]:
    """The kernels of a compiled graph that the profiler did not see."""
    inside = list(takewhile(lambda i: _is_inside(i, index, nodes), range(index + 1, len(nodes))))
    seen = [nodes[i].name for i in inside if nodes[i].parent == index]
    region = regions.find(key, seen)
    remedy = 'count it without torch.compile, or with backend="aot_eager"'
    if isinstance(region, NotMeasured):
        raise NotMeasuredError(f"{region.reason}; {remedy}")
    if region.externs and not any(nodes[i].is_op for i in inside):
        raise NotMeasuredError(
            f"the compiled graph {key} calls {', '.join(region.externs)}, but the profiler saw "
            f"nothing of it, as when a CUDA graph replays it; {remedy}"
        )
    visible = [nodes[i].name for i in inside if is_generated(nodes[i].name)]
    around = nodes[index]
    return [
        Launch(name=kernel, counter="fused", module=around.module, phase=around.phase, node=index)
        for kernel in region.kernels
        if not any(name.endswith(kernel) for name in visible)
    ]


def _is_inside(i: int, ancestor: int, nodes: Sequence[Node]) -> bool:
    while i > ancestor:
        i = nodes[i].parent
    return i == ancestor
