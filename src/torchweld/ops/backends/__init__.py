"""Backends: one block, several implementations, and the choice among them.

`BACKENDS` lists all of them, in order of preference. A new backend is a file beside this one and a
row in that list; everything else reads its `abilities`. `select` asks every backend for its
reasons, then decides once. With a name it takes that backend, or raises an UnsupportedError with
every reason. Without a name it takes the first that can serve, with the reasons of those before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torchweld.core.errors import BlockError, UnsupportedError
from torchweld.core.typed_names import known
from torchweld.ops.backends import (
    compile_backend,
    cpu_backend,
    gpu_backends,
    reference_backend,
    torch_backend,
)
from torchweld.ops.backends.abilities import Abilities, BackendMode
from torchweld.ops.backends.backend import Backend, Form, Runner, refusal_lines

BACKENDS: tuple[Backend, ...] = (
    cpu_backend.BACKEND,
    *gpu_backends.BACKENDS,
    torch_backend.BACKEND,
    reference_backend.BACKEND,
    compile_backend.BACKEND,
)

__all__ = [
    "BACKENDS",
    "Abilities",
    "Backend",
    "BackendMode",
    "BackendRefusal",
    "Form",
    "Runner",
    "Selection",
    "backend_named",
    "select",
]


def backend_named(name: str) -> Backend:
    """The row of this name; else a TorchweldError that lists them all."""
    rows = {backend.name: backend for backend in BACKENDS}
    return rows[known(name, rows, "backend")]


@dataclass(frozen=True, kw_only=True)
class BackendRefusal:
    """A backend that cannot serve, and all its reasons."""

    backend: str
    reasons: tuple[str, ...]
    runs_there: bool  # whether it runs on the device at all

    def __str__(self) -> str:
        return f"{self.backend}: {'; '.join(self.reasons)}"


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The backend to use, and those before it that cannot serve."""

    backend: Backend
    passed_over: tuple[BackendRefusal, ...]


def select(
    block: Form,
    shapes: Sequence[Sequence[int]],
    dtype: torch.dtype,
    device: torch.device,
    *,
    name: str | None = None,
    mode: str | None = None,
    backends: Sequence[Backend] | None = None,
) -> Selection:
    """The backend for `block` on x of these shapes; `backends` are `BACKENDS` by default.

    `mode` needs `name`, because every backend has its own modes.
    """
    backends = BACKENDS if backends is None else backends
    if mode is not None and name is None:
        raise UnsupportedError(
            f"mode {mode!r} was asked for without a backend; name the backend it belongs to: "
            + ", ".join(
                f"{b.name} ({', '.join(mode.name for mode in b.abilities.modes)})" for b in backends
            )
        )
    for shape in shapes:
        if not shape or shape[-1] != block.K:
            raise BlockError(
                f"x has shape {list(shape)}; expected {block.K} features in its last dimension"
            )
    if name is not None:
        known(name, [b.name for b in backends], "backend")
    found = {}
    for backend in backends:
        wanted = mode if backend.name == name else None
        found[backend.name] = tuple(
            backend.unsupported_reasons(block, shapes, dtype, device, wanted)
        )
    refusals = {
        b.name: BackendRefusal(
            backend=b.name,
            reasons=found[b.name],
            runs_there=b.abilities.runs_on([device.type]),
        )
        for b in backends
        if found[b.name]
    }
    usable = [b for b in backends if b.name not in refusals]
    if name is not None:
        if name in refusals:
            others = ", ".join(b.name for b in usable)
            remedy = f"these can: {others}" if others else "no other backend can either"
            lines = refusal_lines(name, mode, block, refusals[name].reasons)
            raise UnsupportedError(*lines, remedy)
        return Selection(backend=next(b for b in usable if b.name == name), passed_over=())
    if not usable:
        listed = [f"  {refusal}" for refusal in refusals.values()]
        raise UnsupportedError(f"no backend can run {block}:", *listed)
    order = [b.name for b in backends]
    before = order[: order.index(usable[0].name)]
    return Selection(backend=usable[0], passed_over=tuple(refusals[n] for n in before))
