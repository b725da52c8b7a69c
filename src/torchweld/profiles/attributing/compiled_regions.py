"""What is inside compiled regions, read from the code that Inductor generated for them.

The profiler sees a compiled graph as one range that carries the graph's key, and inside it only the
ready-made ops that the graph calls (`aten::addmm`). The kernels that Inductor wrote for the CPU are
called without a trace. The graph keeps the Python code that was generated for it, and that code is
read here, never run: `key_of(event name)` -> key, `Regions().find(key)` -> what a run launches.

Graphs are found among all objects that are alive, because torch keeps no list of them that has
their keys: `PyCodeCache.modules` has the code alone. Inductor can show its kernels to the profiler,
but only in code that it compiles anew. Where torch.compile was never used, nothing of it is
imported; what another release of torch has moved is `NotMeasured`.
"""

from __future__ import annotations

import ast
import gc
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch

from torchweld.core.not_measured import NotMeasured

_CALL = re.compile(r"## Call CompiledFxGraph (\S+) ##$")
# How generated code makes a kernel, and how it calls what is not its own: extern_kernels.addmm,
# torch.ops.mkldnn._linear_pointwise.default, and bias_addmm, which is its way to call addmm.
_MADE = re.compile(r"^(\w+) = async_compile\.", re.MULTILINE)
_EXTERN = re.compile(r"(?:extern_kernels|aten|torch\.ops\.(\w+))\.(?:bias_)?(\w+)")
_PARTITION = re.compile(r"self\.partitions\[(\d+)\]$")


@dataclass(frozen=True, kw_only=True, slots=True)
class Region:
    """What one run of a compiled graph launches, by its generated code, in order."""

    kernels: tuple[str, ...]  # written by Inductor: "cpp_fused_gelu_0"
    externs: tuple[str, ...]  # ready-made ops, as the profiler names them: "aten::addmm"


def key_of(name: str) -> str | None:
    """The key of the compiled graph whose call an event of this name is."""
    found = _CALL.match(name)
    return found[1] if found else None


# A key is a hash of the graph and of all settings, so what was read once stays true.
_known: dict[str, Region] = {}
# Graphs that Inductor does not cache (frozen ones, for example) all have this key.
_NO_KEY = "None"


class Regions:
    """Finds what compiled graphs launch. Looks for the graphs of the process once at most."""

    @cached_property
    def _graphs(self) -> list[Any] | None:
        kind = getattr(sys.modules.get("torch._inductor.output_code"), "CompiledFxGraph", None)
        return None if kind is None else [one for one in gc.get_objects() if type(one) is kind]

    def find(self, key: str, seen: Sequence[str] = ()) -> Region | NotMeasured:
        """What one run of the graph launches.

        `seen` are the names of the ops that the profiler saw in it, in order: they tell graphs
        without a key apart.
        """
        if key in _known:
            return _known[key]
        found = self._look_up(key, seen)
        if isinstance(found, str):
            return NotMeasured(f"what the compiled graph {key} launches is not known: {found}")
        if key != _NO_KEY:
            _known[key] = found
        return found

    def _look_up(self, key: str, seen: Sequence[str]) -> Region | str:
        if self._graphs is None:
            return f"torch {torch.__version__} does not keep compiled graphs where expected"
        mine = [g for g in self._graphs if str(getattr(g, "_fx_graph_cache_key", None)) == key]
        if not mine:
            return "no graph with this key is alive"
        sources = {getattr(graph, "source_code", None) for graph in mine}
        if not all(isinstance(source, str) and source for source in sources):
            return f"torch {torch.__version__} did not keep the code generated for it"
        found = {_read(source) for source in sources}
        if len(found) > 1:
            found = _matching(found, seen)
        if len(found) == 1:
            return found.pop()
        return (
            f"{len(mine)} graphs that were compiled without a cache key look the same from outside"
        )


def _matching(found: set[Region | str], seen: Sequence[str]) -> set[Region | str]:
    """Those of several graphs that call just the ready-made ops that were seen, in that order.

    One whose code could not be followed stays in question.
    """
    called = {name for region in found if isinstance(region, Region) for name in region.externs}
    met = tuple(name for name in seen if name in called)
    return {region for region in found if isinstance(region, str) or region.externs == met}


# ---- generated code ----


class _UnclearError(Exception):
    """What the code launches cannot be told from reading it."""


@lru_cache(maxsize=512)
def _read(source: str) -> Region | str:
    """What generated code launches, or why that cannot be told."""
    try:
        tree = ast.parse(source)
        functions = {one.name: one for one in ast.walk(tree) if isinstance(one, ast.FunctionDef)}
        if "call" not in functions:
            raise _UnclearError("it has no function named call")
        launched = _launched("call", functions, set(_MADE.findall(source)), ())
    except (SyntaxError, _UnclearError) as error:
        return f"its generated code cannot be followed ({error})"
    return Region(
        kernels=tuple(name for name in launched if "::" not in name),
        externs=tuple(name for name in launched if "::" in name),
    )


def _launched(
    name: str, functions: dict[str, ast.FunctionDef], made: set[str], around: tuple[str, ...]
) -> list[str]:
    """What a function launches, from top to bottom; `around` are those that it is called in."""
    if name in around:
        raise _UnclearError(f"{name} calls itself")
    found: list[str] = []
    for node, conditional in _calls(functions[name]):
        called = ast.unparse(node.func).removesuffix(".run")
        if partition := _PARTITION.match(called):
            called = f"partition_{partition[1]}"
        inside: list[str] = []
        if called in made:
            inside = [called]
        elif extern := _EXTERN.match(called):
            inside = [f"{extern[1] or 'aten'}::{extern[2]}"]
        elif called in functions:
            inside = _launched(called, functions, made, (*around, name))
        if inside and conditional:
            raise _UnclearError("what it launches depends on a condition or a loop")
        found += inside
    return found


def _calls(function: ast.FunctionDef) -> list[tuple[ast.Call, bool]]:
    """The calls in a function in the order they end, and whether each stands under a condition."""
    found: list[tuple[ast.Call, bool]] = []

    def walk(node: ast.AST, conditional: bool) -> None:
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.FunctionDef):  # defined here, launched only if called
                walk(child, conditional or isinstance(child, (ast.If, ast.For, ast.While)))
        if isinstance(node, ast.Call):  # behind its arguments, which are evaluated first
            found.append((node, conditional))

    walk(function, False)
    return found
