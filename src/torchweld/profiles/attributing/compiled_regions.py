"""What is inside compiled regions, and what torch.compile did meanwhile.

The profiler sees a compiled graph as one range that carries the graph's key, and inside it only the
ready-made ops that the graph calls (`aten::addmm`). The kernels that Inductor wrote for the CPU are
called without a trace. They are known all the same: the graph keeps the Python code that was
generated for it, and that code is read here, never run.

- `key_of(event name)` -> key; `Regions().find(key)` -> what a run of it launches
- `watch_compilation()` -> frames compiled and recompiled, graph breaks

All this rests on internals of torch. What another release has moved gives None and a notice. Where
torch.compile was never used, nothing of it is imported.
"""

from __future__ import annotations

import ast
import gc
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch

from torchweld.profiles.events import Recording
from torchweld.profiles.profile import Compilation

_CALL = re.compile(r"## Call CompiledFxGraph (\S+) ##$")
_REGION = "Torch-Compiled Region"
# The search for compiled code whose guards hold.
LOOKUP = "TorchDynamo Cache Lookup"
# How generated code calls what is not its own: torch.ops.mkldnn._linear_pointwise.default, ...
_EXTERN = re.compile(r"(?:extern_kernels|aten|torch\.ops\.(\w+))\.(\w+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Region:
    """What one run of a compiled graph launches, by its generated code, in order."""

    kernels: tuple[str, ...]  # written by Inductor: "cpp_fused_gelu_0"
    externs: tuple[str, ...]  # ready-made ops, as the profiler names them: "aten::addmm"


def key_of(name: str) -> str | None:
    """The key of the compiled graph whose call an event of this name is."""
    found = _CALL.match(name)
    return found[1] if found else None


# ---- what a graph launches ----

# A key is a hash of the graph and of all settings, so what was read once stays true.
_known: dict[str, Region] = {}
# Graphs that Inductor does not cache (frozen ones, for example) all have this key.
_NO_KEY = "None"


class Regions:
    """Finds what compiled graphs launch. Looks for the graphs of the process once at most."""

    def __init__(self) -> None:
        self.notices: list[str] = []
        self._graphs: list[Any] | None = None

    def find(self, key: str, seen: Sequence[str] = ()) -> Region | None:
        """What one run of the graph launches; None if unknown, and then a notice says why.

        `seen` are the names of the ops that the profiler saw in it, in order: they tell graphs
        without a key apart.
        """
        if key in _known:
            return _known[key]
        found = self._look_up(key, seen)
        if isinstance(found, str):
            self.notices.append(f"what the compiled graph {key} launches is not known: {found}")
            return None
        if key != _NO_KEY:
            _known[key] = found
        return found

    def _look_up(self, key: str, seen: Sequence[str]) -> Region | str:
        module = sys.modules.get("torch._inductor.output_code")
        kind = getattr(module, "CompiledFxGraph", None)
        if kind is None:
            return f"torch {torch.__version__} does not keep compiled graphs where expected"
        if self._graphs is None:
            self._graphs = [graph for graph in gc.get_objects() if type(graph) is kind]
        mine = [
            graph
            for graph in self._graphs
            if str(getattr(graph, "_fx_graph_cache_key", None)) == key
        ]
        if not mine:
            return "no graph with this key is alive"
        sources = [getattr(graph, "source_code", None) for graph in mine]
        if not all(isinstance(source, str) and source for source in sources):
            return f"torch {torch.__version__} did not keep the code generated for it"
        found = [_read(source) for source in dict.fromkeys(map(str, sources))]
        if len(set(found)) > 1:
            found = _matching(found, seen)
        if len(set(found)) == 1:
            return found[0]
        return (
            f"{len(mine)} graphs that were compiled without a cache key look the same from outside"
        )


def _matching(found: Sequence[Region | str], seen: Sequence[str]) -> list[Region | str]:
    """Those of several graphs that call just the ready-made ops that were seen, in that order.

    One whose code could not be followed stays in question.
    """
    called = {name for region in found if isinstance(region, Region) for name in region.externs}
    met = tuple(name for name in seen if name in called)
    return [region for region in found if isinstance(region, str) or region.externs == met]


@lru_cache(maxsize=512)
def _read(source: str) -> Region | str:
    """What generated code launches, or why that cannot be told."""
    try:
        return _CodeReader(ast.parse(source)).region()
    except (SyntaxError, _UnclearError) as error:
        return f"its generated code cannot be followed ({error})"


class _UnclearError(Exception):
    pass


class _CodeReader(ast.NodeVisitor):
    """Follows the entry function `call` of generated code from top to bottom."""

    def __init__(self, tree: ast.Module) -> None:
        self.kernels: list[str] = []
        self.externs: list[str] = []
        self.made: set[str] = set()  # names of kernels defined in the file
        self.functions: dict[str, ast.FunctionDef] = {}
        self.inside: list[str] = []
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                self.functions[node.name] = node
            elif isinstance(node, ast.Assign) and _dotted(node.value).startswith("async_compile."):
                self.made.update(t.id for t in node.targets if isinstance(t, ast.Name))

    def region(self) -> Region:
        if "call" not in self.functions:
            raise _UnclearError("it has no function named call")
        self._enter("call")
        return Region(kernels=tuple(self.kernels), externs=tuple(self.externs))

    def _enter(self, name: str) -> None:
        if name in self.inside:
            raise _UnclearError(f"{name} calls itself")
        self.inside.append(name)
        for statement in self.functions[name].body:
            self.visit(statement)
        self.inside.pop()

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)  # arguments are evaluated first
        name = _dotted(node)
        if name.removesuffix(".run") in self.made:
            self.kernels.append(name.removesuffix(".run"))
        elif extern := _EXTERN.match(name):
            name = extern[2].removeprefix("bias_")  # bias_addmm is Inductor's way to call addmm
            self.externs.append(f"{extern[1] or 'aten'}::{name}")
        elif (inner := _partition(node) or name) in self.functions:
            self._enter(inner)

    def _branch(self, node: ast.AST) -> None:
        before = len(self.kernels) + len(self.externs)
        self.generic_visit(node)
        if len(self.kernels) + len(self.externs) != before:
            raise _UnclearError("what it launches depends on a condition or a loop")

    def visit_If(self, node: ast.If) -> None:
        self._branch(node)

    def visit_For(self, node: ast.For) -> None:
        self._branch(node)

    def visit_While(self, node: ast.While) -> None:
        self._branch(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        """Defined here, launched only if called."""


def _dotted(node: ast.AST) -> str:
    """`a.b.c` of the call `a.b.c(...)`; empty for what has no such name."""
    if not isinstance(node, ast.Call):
        return ""
    parts: list[str] = []
    place: ast.AST = node.func
    while isinstance(place, ast.Attribute):
        parts.append(place.attr)
        place = place.value
    return ".".join([place.id, *reversed(parts)]) if isinstance(place, ast.Name) else ""


def _partition(node: ast.Call) -> str | None:
    """`self.partitions[2](...)` calls the function `partition_2`."""
    place = node.func
    if isinstance(place, ast.Subscript) and ast.unparse(place.value) == "self.partitions":
        return f"partition_{ast.unparse(place.slice)}"
    return None


# ---- what the compiler did ----


@dataclass(kw_only=True)
class CompilationWatch:
    """What torch.compile did inside `watch_compilation`, in all threads; filled when it ends."""

    compiled: int = 0  # frames, recompiled ones included
    recompiled: int = 0
    graph_breaks: int = 0
    reasons: tuple[str, ...] = ()  # of recompilations, first line each
    notices: list[str] = field(default_factory=list)

    def result(self, recording: Recording) -> Compilation | None:
        """With what a recording of one step shows; None if nothing compiled was met at all."""
        regions = [e for e in recording.events if e.name.startswith(_REGION)]
        lookups = [e.duration_us for e in recording.events if e.name.startswith(LOOKUP)]
        if not (regions or lookups or self.compiled or self.graph_breaks):
            return None
        return Compilation(
            regions=len(regions),
            compiled=self.compiled,
            recompiled=self.recompiled,
            graph_breaks=self.graph_breaks,
            guard_us=sum(lookups),
            reasons=self.reasons,
        )


@contextmanager
def watch_compilation() -> Iterator[CompilationWatch]:
    """Counts what torch.compile does inside, from the figures that it keeps itself."""
    watch = CompilationWatch()
    before, breaks_before = _metrics(), _graph_breaks()
    try:
        yield watch
    finally:
        _settle(watch, before, breaks_before)


def _settle(
    watch: CompilationWatch, before: list[Any] | None, breaks_before: dict[str, int] | None
) -> None:
    after, breaks = _metrics(), _graph_breaks()
    if after is None or breaks is None or before is None or breaks_before is None:
        watch.notices.append(
            f"torch {torch.__version__} does not tell what it compiles; compiled frames, "
            "recompilations and graph breaks were not counted"
        )
        return
    # Objects, not a length: torch forgets the oldest entries.
    old = {id(entry) for entry in before}
    fresh = [entry for entry in after if id(entry) not in old]
    if after and len(fresh) == len(after) and before:
        watch.notices.append(
            f"torch remembers its last {len(after)} compilations only; there may have been more"
        )
    frames = [entry for entry in fresh if _made_code(entry)]
    again = [entry for entry in frames if _is_recompilation(entry)]
    watch.compiled = len(frames)
    watch.recompiled = len(again)
    reasons = (getattr(entry, "recompile_reason", None) for entry in again)
    # torch aligns the source line behind a reason with blanks.
    watch.reasons = tuple(" ".join(str(r).strip().splitlines()[0].split()) for r in reasons if r)
    for reason, count in breaks.items():
        # torch._dynamo.utils.counters may have been cleared meanwhile.
        known = breaks_before.get(reason, 0)
        watch.graph_breaks += count - known if count >= known else count


def _made_code(entry: Any) -> bool:
    """Whether a frame was compiled: not one that was given up, nor the backward of one."""
    if getattr(entry, "is_forward", None) is False or getattr(entry, "is_runtime", False):
        return False
    return getattr(entry, "has_guarded_code", None) is not False and not entry.fail_type


def _is_recompilation(entry: Any) -> bool:
    """By torch's own word, or by the frame's number: "3/1" is the second code of frame 3."""
    if getattr(entry, "recompile_reason", None):
        return True
    number = str(getattr(entry, "compile_id", "")).rpartition("/")[2]
    return number.isdigit() and int(number) > 0


def _metrics() -> list[Any] | None:
    """Torch's notes of what it compiled, oldest first; None if it has none."""
    utils = sys.modules.get("torch._dynamo.utils")
    if utils is None:
        return []
    get = getattr(utils, "get_compilation_metrics", None)
    if get is None:
        return None
    found = list(get())
    return found if all(hasattr(entry, "fail_type") for entry in found) else None


def _graph_breaks() -> dict[str, int] | None:
    utils = sys.modules.get("torch._dynamo.utils")
    if utils is None:
        return {}
    counters = getattr(utils, "counters", None)
    return None if counters is None else dict(counters.get("graph_break", {}))
