"""Makes the calls of a model's modules visible to the profiler, and undoes that exactly.

Inside `instrumented(roots)`, every module's `forward` is shadowed by an instance attribute that
opens a profiler range named after the module's place ("layers.3.mlp"). Hooks are not used: a hook
switches off the fast paths of `nn.TransformerEncoderLayer` and of fused modules, and global hooks
make Dynamo compile everything anew. What is inside a compiled region is left alone, and so are the
children of a module that runs as one op (`runs_whole`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from torchweld.profiles.recorded_events import MARK
from torchweld.profiles.recording.torch_profiler import range_named

_ABSENT = object()

Roots = Sequence[tuple[str, nn.Module]]


def is_compiled(module: nn.Module) -> bool:
    """Whether calls of this module enter code made by torch.compile."""
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


def places(roots: Roots) -> dict[nn.Module, list[str]]:
    """Every module that can be seen -> the paths it stands at, in the order of named_modules."""
    found: dict[nn.Module, list[str]] = {}

    def walk(module: nn.Module, path: str, around: tuple[nn.Module, ...]) -> None:
        paths = found.setdefault(module, [])
        if path in paths or module in around:
            return
        paths.append(path)
        if is_compiled(module) or getattr(module, "runs_whole", False):
            return
        for name, child in _children(module):
            walk(child, f"{path}.{name}" if path else name, (*around, module))

    for name, root in roots:
        walk(root, name, ())
    return found


def _children(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Like `named_children`, but a child under two names is given twice."""
    for name, child in module._modules.items():
        if child is not None:
            yield name, child


def _nearest(paths: Sequence[str], around: str) -> str:
    """The one of several places that is meant when the call comes from inside `around`."""

    def common(path: str) -> int:
        count = 0
        for a, b in zip(path.split("."), around.split("."), strict=False):
            if a != b:
                break
            count += 1
        return count

    return max(paths, key=common)


Forward = Callable[..., Any]


@contextmanager
def shadowed(roots: Roots, wrap: Callable[[list[str], Forward], Forward | None]) -> Iterator[None]:
    """Inside, the modules of `roots` run what `wrap(paths, forward)` gives, if anything."""
    undo: list[tuple[nn.Module, str, Any]] = []
    try:
        for module, paths in places(roots).items():
            if isinstance(module, torch.jit.ScriptModule):
                continue
            # Code of torch.compile is entered through another attribute.
            compiled = module.__dict__.get("_compiled_call_impl") is not None
            entry = "_compiled_call_impl" if compiled else "forward"
            wrapped = wrap(paths, getattr(module, entry))
            if wrapped is not None:
                undo.append((module, entry, module.__dict__.get(entry, _ABSENT)))
                module.__dict__[entry] = wrapped
        yield
    finally:
        for module, entry, before in undo:
            if before is _ABSENT:
                module.__dict__.pop(entry, None)
            else:
                module.__dict__[entry] = before


@contextmanager
def instrumented(roots: Roots) -> Iterator[None]:
    """Inside, calls of the modules of `roots` (name, module) show as ranges `MARK` + path."""
    active: list[str] = []

    def wrap(paths: list[str], forward: Forward) -> Forward:
        single = paths[0] if len(paths) == 1 else None

        @functools.wraps(forward)
        def seen(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return forward(*args, **kwargs)
            path = single if single is not None else _nearest(paths, active[-1] if active else "")
            active.append(path)
            try:
                with range_named(MARK + path):
                    return forward(*args, **kwargs)
            finally:
                active.pop()

        return seen

    with shadowed(roots, wrap):
        yield
