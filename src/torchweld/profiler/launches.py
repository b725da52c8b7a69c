"""What a piece of code launches: the ops that do work, each counted once, under a few plain names.

In: the ops of a recording or a profile, as a tree. Out: one `Launch` for each leaf. The leaf rule:

- What runs inside an op that does work belongs to it: `aten::addmm` copies its bias inside, and is
  one `linear` and no copy; `aten::clone` copies by `aten::copy_`, and is one copy.
- An op that only passes on (`aten::linear`, `aten::contiguous`, backward nodes, ranges) counts
  nothing itself; what it calls does. So does a view or an allocation that turns out to do work.
- A fused op, an attention op or a product that runs products inside was not one kernel after all:
  those count, and it does not. So it is with an op of unknown kind that runs known ones.
- A compiled graph launches the ops seen inside it, and the kernels that its code calls.
- Work of the compiler itself is no part of the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from torchweld.errors import NotMeasuredError
from torchweld.profiler.attribution import ENGINE, attribute
from torchweld.profiler.compiled import Regions, is_compiler_work, is_kernel, key_of
from torchweld.profiler.events import OP, Recording
from torchweld.profiler.kinds import kind_of
from torchweld.profiler.profile import Phase, Profile, Tensor

# Name -> what it counts, the order in which they are shown. `ops` is the sum of all but the last
# two, which launch nothing.
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
_PASSES_ON = frozenset({"composite", "autograd", "dynamo"})
_PRODUCTS = frozenset({"product", "convolution", "attention"})
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
    module: str  # path; "" where it is not known
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
    """The ops of a profile."""
    return [
        Node(
            name=op.name,
            parent=op.parent,
            is_op=True,
            module=profile.modules[op.module].path,
            phase=op.phase,
            start_us=op.start_us,
            inputs=op.inputs,
        )
        for op in profile.ops
    ]


def launches_of(nodes: Sequence[Node]) -> list[Launch]:
    """The leaves, in order. Raises NotMeasuredError where a compiled graph hides what it runs."""
    kinds = [_kind(node) for node in nodes]
    holds_work, holds_products = _holdings(nodes, kinds)
    seeds = _seeds(nodes)
    regions = Regions()
    closed = [False] * len(nodes)  # what is inside belongs to something around it
    found: list[Launch] = []
    for i, node in enumerate(nodes):
        if node.parent >= 0 and closed[node.parent]:
            closed[i] = True
            continue
        if is_compiler_work(node.name):
            closed[i] = True
            continue
        if (key := key_of(node.name)) is not None:
            found.extend(_hidden(key, i, nodes, regions))
            continue
        kind = kinds[i]
        if kind is None or kind in _PASSES_ON:
            continue
        if kind in ("metadata", "allocation", "unknown") and holds_work[i]:
            continue
        if kind in ("fused", "attention", "product") and holds_products[i]:
            continue
        closed[i] = True
        found.append(
            Launch(
                name=node.name,
                counter="bmm" if node.name in _BATCHED else _OF_KIND.get(kind, "other"),
                module=node.module,
                phase="backward" if i in seeds else node.phase,
                inputs=node.inputs,
                node=i,
            )
        )
    return found


def _kind(node: Node) -> str | None:
    """Of an op; None for a range, which a name without a library is too ("AddmmBackward0")."""
    if not node.is_op:
        return None
    if is_kernel(node.name):
        return "fused"
    kind = kind_of(node.name)
    return None if kind == "unknown" and "::" not in node.name else kind


def _holdings(nodes: Sequence[Node], kinds: Sequence[str | None]) -> tuple[list[bool], list[bool]]:
    """For each node: whether any work, and whether any product, runs inside it."""
    work, products = [False] * len(nodes), [False] * len(nodes)
    idle = {None, "metadata", "allocation", *_PASSES_ON}
    for i in range(len(nodes) - 1, -1, -1):
        parent = nodes[i].parent
        if parent < 0 or is_compiler_work(nodes[i].name):
            continue
        work[parent] |= work[i] or kinds[i] not in idle
        products[parent] |= products[i] or kinds[i] in _PRODUCTS
    return work, products


def _seeds(nodes: Sequence[Node]) -> set[int]:
    """The ops that make the gradient a backward pass begins with: the last ones before it.

    `loss.backward()` fills a tensor with ones before the engine starts.
    """
    if not any(node.name == "aten::ones_like" for node in nodes):
        return set()
    found = set()
    before = -1
    # By time: the engine may run on a thread of its own.
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
    if region is None:
        raise NotMeasuredError(f"{regions.notices[-1]}; {remedy}")
    if region.externs and not any(nodes[i].is_op for i in inside):
        raise NotMeasuredError(
            f"the compiled graph {key} calls {', '.join(region.externs)}, but the profiler saw "
            f"nothing of it, as when a CUDA graph replays it; {remedy}"
        )
    visible = [nodes[i].name for i in inside if is_kernel(nodes[i].name)]
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
