"""Profiles made by hand: modules and ops with shapes, memory and times that a test knows.

    made = Builder(gflops=100.0, gbps=10.0, op_cost_us=1.0)
    fc = made.module("fc", "Linear")
    x, w = tensor(8, 64), tensor(64, 64)
    made.op("aten::mm", us=50.0, module=fc, inputs=(x, w), makes=8 * 64 * 4)
    profile = made.build()

Every tensor has a storage of its own unless told otherwise. `ops_of(function)` gives the ops that
torch really dispatches, without times.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torchweld.hardware import FmaPeak, Peaks, ReadPeak
from torchweld.profiler.account import Split
from torchweld.profiler.profile import About, Device, Module, Op, Phase, Profile, Tensor

THREADS = 2
WORKING_SETS_BYTES = (32 * 2**10, 256 * 2**10, 2 * 2**20, 16 * 2**20, 256 * 2**20)
_storages = itertools.count(1)


def new_storage() -> int:
    return next(_storages)


def tensor(
    *shape: int,
    dtype: str = "float32",
    storage: int | None = -1,
    strides: tuple[int, ...] | None = None,
) -> Tensor:
    """A tensor in memory of its own; `storage=None` for a recording that does not tell."""
    return Tensor(
        shape=shape,
        dtype=dtype,
        strides=strides,
        storage=new_storage() if storage == -1 else storage,
    )


def make_peaks(
    gflops: float = 100.0,
    gbps: float | Sequence[float] = 10.0,
    threads: int = THREADS,
    dtypes: Sequence[str] = ("float32", "float64", "bfloat16", "float16"),
) -> Peaks:
    """`gbps` is one rate for all working sets, or one for each of `WORKING_SETS_BYTES`."""
    rates = [gbps] * len(WORKING_SETS_BYTES) if isinstance(gbps, (int, float)) else gbps
    return Peaks(
        fingerprint="made by hand",
        method="made by hand",
        fma=tuple(FmaPeak(dtype=dtype, threads=threads, gflops=gflops) for dtype in dtypes),
        read=tuple(
            ReadPeak(working_set_bytes=size, threads=threads, gbps=rate)
            for size, rate in zip(WORKING_SETS_BYTES, rates, strict=True)
        ),
    )


class Builder:
    """Ops one after another. The root is module 0."""

    def __init__(
        self,
        *,
        gflops: float = 100.0,
        gbps: float | Sequence[float] = 10.0,
        op_cost_us: float = 1.0,
        peaks: Peaks | str | None = "made",
        root: str = "Model",
    ) -> None:
        self.peaks = make_peaks(gflops, gbps) if isinstance(peaks, str) else peaks
        self.op_cost_us = op_cost_us
        self.ops: list[Op] = []
        self.paths: list[tuple[str, str]] = [("", root)]
        self.python_us: dict[int, float] = {}
        self.engine_us: dict[int, float] = {}

    def module(
        self, path: str, kind: str = "Module", *, python_us: float = 0.0, engine_us: float = 0.0
    ) -> int:
        """A module below the one that its path names; gives its number."""
        self.paths.append((path, kind))
        number = len(self.paths) - 1
        self.python_us[number] = python_us
        self.engine_us[number] = engine_us
        return number

    def op(
        self,
        name: str,
        us: float = 1.0,
        *,
        module: int = 0,
        inputs: Sequence[Tensor | None] = (),
        makes: int | tuple[int, int] | None = None,
        parent: int = -1,
        phase: Phase = "forward",
        kernels: tuple[int, ...] = (),
    ) -> int:
        """An op whose own time is `us`; `makes` is the bytes of its result, or (storage, bytes)."""
        if isinstance(makes, int):
            makes = (new_storage(), makes)
        self.ops.append(
            Op(
                name=name,
                module=module,
                parent=parent,
                phase=phase,
                start_us=float(len(self.ops)),
                raw_us=us,
                total_us=us,
                self_us=us,
                inputs=tuple(inputs),
                written=() if makes is None else (makes,),
                kernels=kernels,
            )
        )
        return len(self.ops) - 1

    def build(
        self, *, step_us: float | None = None, device: Device | None = None, training: bool = False
    ) -> Profile:
        """With totals that follow; `step_us` is the sum of all own times unless given."""
        ops = self._with_totals()
        outside = sum(self.python_us.values()) + sum(self.engine_us.values())
        return Profile(
            about=About(source="live", what="made by hand", threads=THREADS, training=training),
            step_us=sum(op.self_us for op in ops) + outside if step_us is None else step_us,
            modules=tuple(self._modules(ops)),
            ops=tuple(ops),
            device=device,
            peaks=self.peaks,
            op_cost_us=self.op_cost_us,
        )

    def _with_totals(self) -> list[Op]:
        totals = [op.self_us for op in self.ops]
        for i in range(len(self.ops) - 1, -1, -1):
            if self.ops[i].parent >= 0:
                totals[self.ops[i].parent] += totals[i]
        return [
            changed(op, total_us=total, raw_us=total)
            for op, total in zip(self.ops, totals, strict=True)
        ]

    def _modules(self, ops: Sequence[Op]) -> list[Module]:
        numbers = {path: i for i, (path, _) in enumerate(self.paths)}
        parents = [_parent(path, numbers) for path, _ in self.paths]
        own = {"forward": [0.0] * len(parents), "backward": [0.0] * len(parents)}
        for i in range(len(parents)):
            own["forward"][i] += self.python_us.get(i, 0.0)
            own["backward"][i] += self.engine_us.get(i, 0.0)
        for op in ops:
            side = "backward" if op.phase in ("backward", "recompute") else "forward"
            own[side][op.module] += op.self_us
        inside = {side: list(times) for side, times in own.items()}
        by_depth = sorted(range(len(parents)), key=lambda i: -self.paths[i][0].count(".") - bool(i))
        for i in by_depth:
            if parents[i] >= 0:
                for times in inside.values():
                    times[parents[i]] += times[i]
        return [
            Module(
                path=path,
                kind=kind,
                parent=parents[i],
                calls=1,
                forward_us=inside["forward"][i],
                backward_us=inside["backward"][i],
                self_forward_us=own["forward"][i],
                self_backward_us=own["backward"][i],
                python_us=self.python_us.get(i, 0.0),
                engine_us=self.engine_us.get(i, 0.0),
            )
            for i, (path, kind) in enumerate(self.paths)
        ]


def _parent(path: str, numbers: Mapping[str, int]) -> int:
    if not path:
        return -1
    while "." in path:
        path = path.rpartition(".")[0]
        if path in numbers:
            return numbers[path]
    return 0


def changed(op: Op, **fields: Any) -> Op:
    """As `dataclasses.replace`, several times faster."""
    values = {name: getattr(op, name) for name in Op.__slots__}
    return Op(**{**values, **fields})


PARTS = [field.name for field in dataclasses.fields(Split)]


def parts(split: Split) -> dict[str, float]:
    """Those that are not zero."""
    found = {name: getattr(split, name) for name in PARTS}
    return {name: value for name, value in found.items() if abs(value) > 1e-9}


# ---- what torch really dispatches ----


def ops_of(function: Callable[[], object]) -> list[Op]:
    """The ops below autograd that `function` dispatches, with shapes and memory, without times."""
    recorder = _Recorder()
    with recorder:
        function()
    return recorder.ops


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Op] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        # As a recording has them: all arguments of the schema in order, lists taken apart.
        named = func._schema.arguments[len(args) :]
        values = [*args, *((kwargs or {}).get(argument.name) for argument in named)]
        flat = [item for value in values for item in (value if _is_list(value) else [value])]
        given = {_storage(value) for value in tree_leaves((args, kwargs)) if _is_tensor(value)}
        fresh = {
            _storage(value): value.untyped_storage().nbytes()
            for value in tree_leaves(result)
            if _is_tensor(value) and _storage(value) not in given
        }
        self.ops.append(
            Op(
                name=func.name().partition(".")[0],
                module=0,
                parent=-1,
                phase="forward",
                start_us=float(len(self.ops)),
                raw_us=0.0,
                total_us=0.0,
                self_us=0.0,
                inputs=tuple(_tensor(value) for value in flat),
                written=tuple(fresh.items()),
            )
        )
        return result


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def _is_list(value: object) -> bool:
    return isinstance(value, (list, tuple)) and any(map(_is_tensor, value))


def _storage(value: torch.Tensor) -> int:
    return value.untyped_storage()._cdata


def _tensor(value: object) -> Tensor | None:
    if not isinstance(value, torch.Tensor):
        return None
    return Tensor(
        shape=tuple(value.shape),
        dtype=str(value.dtype).removeprefix("torch."),
        strides=value.stride(),
        storage=_storage(value),
    )
