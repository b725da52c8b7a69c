"""Profiles made by hand, for tests of what reads them: modules, nested ops, and their sums."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torchweld.hardware import FmaPeak, Peaks, ReadPeak
from torchweld.profiler.profile import (
    About,
    Device,
    Gap,
    Kernel,
    Module,
    Op,
    Phase,
    Profile,
    RuntimeCall,
    Tensor,
    Timing,
)

PEAKS = Peaks(
    fingerprint="made",
    method="made up",
    fma=(FmaPeak(dtype="float32", threads=1, gflops=100.0),),
    read=(ReadPeak(working_set_bytes=2**20, threads=1, gbps=20.0),),
)


@dataclass(frozen=True, kw_only=True)
class Call:
    """An op to be: its own time, and what runs inside it. `path` is its module's."""

    name: str
    path: str = ""
    us: float = 10.0
    phase: Phase = "forward"
    inside: tuple[Call, ...] = ()
    inputs: tuple[Tensor | None, ...] = ()
    written: tuple[tuple[int, int], ...] = ()
    call: int = -1
    sequence: int = -1
    thread: int = 0


def tensor(*shape: int, storage: int | None = None) -> Tensor:
    strides = [1] * len(shape)
    for i in range(len(shape) - 2, -1, -1):
        strides[i] = strides[i + 1] * shape[i + 1]
    return Tensor(shape=shape, dtype="float32", strides=tuple(strides), storage=storage)


@dataclass
class _Maker:
    index: dict[str, int]
    gap_us: float
    ops: list[Op] = field(default_factory=list)
    now_us: dict[int, float] = field(default_factory=dict)

    def add(self, given: Call, parent: int = -1) -> float:
        """Appends the op and what is inside it; gives its total µs."""
        position = len(self.ops)
        start_us = self.now_us.get(given.thread, 0.0) + self.gap_us
        self.now_us[given.thread] = start_us + max(given.us, 0.0) / 2
        self.ops.append(None)  # type: ignore[arg-type]  # children come after their parent
        total_us = given.us + sum(self.add(inner, position) for inner in given.inside)
        self.now_us[given.thread] += max(given.us, 0.0) / 2
        self.ops[position] = Op(
            name=given.name,
            module=self.index[given.path],
            parent=parent,
            phase=given.phase,
            start_us=start_us,
            raw_us=self.now_us[given.thread] - start_us,
            total_us=total_us,
            self_us=given.us,
            inputs=given.inputs,
            written=given.written,
            call=given.call,
            sequence=given.sequence,
            thread=given.thread,
        )
        return total_us


def make(
    places: Sequence[tuple[str, ...]],
    calls: Sequence[Call],
    *,
    python_us: float = 1.0,
    live: bool = True,
    **more: Any,
) -> Profile:
    """A profile of modules (path, class[, extra]), the root first, and ops in order.

    Every module that has ops spends `python_us` outside of them. `more` goes to the Profile, and
    what starts with `about_` to its About.
    """
    index = {place[0]: i for i, place in enumerate(places)}
    maker = _Maker(index=index, gap_us=0.25)
    for given in calls:
        maker.add(given)
    ops = maker.ops
    own: list[list[float]] = [[0.0, 0.0] for _ in places]
    for op in ops:
        own[op.module][op.phase in ("backward", "recompute")] += op.self_us
    used = {op.module for op in ops}
    python = [python_us if i in used else 0.0 for i in range(len(places))]
    for i, us in enumerate(python):
        own[i][0] += us
    parents = [_parent(path, index) for path in index]
    totals = [list(pair) for pair in own]
    for i in sorted(range(len(places)), key=lambda i: -len(places[i][0].split("."))):
        if parents[i] >= 0:
            for late in (0, 1):
                totals[parents[i]][late] += totals[i][late]
    counts: dict[int, set[int]] = {}
    for op in ops:
        if op.phase == "forward":
            counts.setdefault(op.module, set()).add(op.call)
    modules = tuple(
        Module(
            path=place[0],
            kind=place[1],
            extra=place[2] if len(place) > 2 else "",
            parent=parents[i],
            calls=len(counts.get(i, ())),
            forward_us=totals[i][0],
            backward_us=totals[i][1],
            self_forward_us=own[i][0],
            self_backward_us=own[i][1],
            python_us=python[i],
        )
        for i, place in enumerate(places)
    )
    step_us = sum(totals[0])
    timing = Timing(
        wall_us=step_us,
        raw_us=1.2 * step_us,
        corrected_us=step_us,
        first_us=3 * step_us,
        events=len(ops),
        op_cost_us=0.5,
        module_cost_us=1.5,
        steps=3,
    )
    about = About(
        source="live" if live else "trace",
        what=places[0][1],
        torch="9.9" if live else "",
        cpu="Example CPU" if live else "",
        threads=1 if live else 0,
        fingerprint="f" if live else "",
        training=any(op.phase == "backward" for op in ops),
        **{key[6:]: more.pop(key) for key in list(more) if key.startswith("about_")},
    )
    given_more = {"timing": timing, "peaks": PEAKS, "op_cost_us": 1.0} if live else {}
    return Profile(
        about=about,
        step_us=step_us,
        modules=modules,
        ops=tuple(ops),
        **{**given_more, **more},
    )


def _parent(path: str, index: dict[str, int]) -> int:
    if not path:
        return -1
    while "." in path:
        path = path.rpartition(".")[0]
        if path in index:
            return index[path]
    return 0


# ---- a model of blocks ----


def mlp_places(path: str) -> list[tuple[str, ...]]:
    return [
        (path, "Mlp"),
        (f"{path}.up", "Linear", "in_features=64, out_features=256, bias=True"),
        (f"{path}.act", "GELU", "approximate='none'"),
        (f"{path}.down", "Linear", "in_features=256, out_features=64, bias=True"),
    ]


def block_places(layers: int) -> list[tuple[str, ...]]:
    """A model of `layers` blocks with an MLP each, and a head."""
    found: list[tuple[str, ...]] = [("", "Net"), ("layers", "ModuleList")]
    for i in range(layers):
        found += [(f"layers.{i}", "Block"), (f"layers.{i}.norm", "LayerNorm", "(64,)")]
        found += mlp_places(f"layers.{i}.mlp")
    return [*found, ("head", "Linear", "in_features=64, out_features=10, bias=True")]


def block_calls(layers: int, training: bool = False) -> list[Call]:
    """One step of it: 8 rows, layer i reads what layer i - 1 wrote."""
    calls = []
    for i in range(layers):
        path, at = f"layers.{i}", 10 * i
        x = tensor(8, 64, storage=at)
        normed, hidden = tensor(8, 64, storage=at + 1), tensor(8, 256, storage=at + 2)
        active, out = tensor(8, 256, storage=at + 3), tensor(8, 64, storage=at + 4)
        calls += [
            Call(
                name="aten::native_layer_norm",
                path=f"{path}.norm",
                us=20.0,
                inputs=(x,),
                written=((at + 1, normed.nbytes),),
                call=5 * i + 1,
            ),
            linear(f"{path}.mlp.up", 120.0, normed, hidden, 100 + i, 5 * i + 2),
            Call(
                name="aten::gelu",
                path=f"{path}.mlp.act",
                us=40.0,
                inputs=(hidden,),
                written=((at + 3, active.nbytes),),
                call=5 * i + 3,
                sequence=200 + i,
            ),
            linear(f"{path}.mlp.down", 110.0, active, out, 300 + i, 5 * i + 4),
            Call(
                name="aten::add",
                path=path,
                us=15.0,
                inputs=(x, out),
                written=((at + 10, x.nbytes),),
                call=5 * i,
            ),
        ]
    last = tensor(8, 64, storage=10 * layers)
    calls.append(linear("head", 30.0, last, tensor(8, 10, storage=990), 400, 5 * layers))
    if training:
        calls += [_node("head", 400, 60.0)]
        for i in reversed(range(layers)):
            calls += [
                _node(f"layers.{i}.mlp.down", 300 + i, 220.0),
                _node(f"layers.{i}.mlp.act", 200 + i, 50.0),
                _node(f"layers.{i}.mlp.up", 100 + i, 240.0),
            ]
    return calls


def linear(path: str, us: float, x: Tensor, y: Tensor, sequence: int, call: int) -> Call:
    """aten::linear with the product inside it."""
    weight = tensor(x.shape[-1], y.shape[-1], storage=5000 + sequence)
    assert y.storage is not None
    product = Call(
        name="aten::addmm",
        path=path,
        us=us,
        inputs=(tensor(y.shape[-1], storage=6000 + sequence), x, weight),
        written=((y.storage, y.nbytes),),
        call=call,
        sequence=sequence,
    )
    return Call(name="aten::linear", path=path, us=3.0, inside=(product,), call=call)


def _node(path: str, sequence: int, us: float) -> Call:
    """A node of the backward graph, with the engine around it and a product inside."""
    product = Call(name="aten::mm", path=path, us=us, phase="backward")
    node = Call(
        name="AddmmBackward0",
        path=path,
        us=2.0,
        phase="backward",
        sequence=sequence,
        inside=(product,),
    )
    return Call(
        name="autograd::engine::evaluate_function: AddmmBackward0",
        path=path,
        us=4.0,
        phase="backward",
        sequence=sequence,
        inside=(node,),
    )


def blocks(layers: int = 4, training: bool = False, **more: Any) -> Profile:
    return make(block_places(layers), block_calls(layers, training), **more)


def fused_blocks(layers: int = 4, **more: Any) -> Profile:
    """The same model with its MLPs fused: one op each, their children gone."""
    gone = (".up", ".act", ".down")
    places = [
        (path, "FusedMLP" if path.endswith("mlp") else kind, *rest)
        for path, kind, *rest in block_places(layers)
        if not path.endswith(gone)
    ]
    calls = []
    for given in block_calls(layers):
        if given.path.endswith(".up"):
            path, i = given.path.removesuffix(".up"), int(given.path.split(".")[1])
            x = tensor(8, 64, storage=10 * i + 1)
            calls.append(
                Call(
                    name="torchweld::mlp",
                    path=path,
                    us=90.0,
                    inputs=(x,),
                    written=((10 * i + 4, x.nbytes),),
                )
            )
        elif not given.path.endswith(gone):
            calls.append(given)
    return make(places, calls, **more)


def on_device(profile: Profile, kernel_us: float = 5.0) -> Profile:
    """With a device on which every op without ops inside launched one kernel, 1 µs apart."""
    outer = {op.parent for op in profile.ops}
    leaves = [i for i in range(len(profile.ops)) if i not in outer]
    kernels = tuple(
        Kernel(
            name="triton_poi_fused_gelu_mul_0" if "gelu" in profile.ops[i].name else "gemm_128x64",
            category="triton" if "gelu" in profile.ops[i].name else "gemm",
            start_us=100.0 + n * (kernel_us + 1.0),
            duration_us=kernel_us,
            device=0,
            stream=7,
            launch=n,
            op=i,
            inside=("gelu", "mul") if "gelu" in profile.ops[i].name else (),
        )
        for n, i in enumerate(leaves)
    )
    count = len(kernels)
    busy_us = count * kernel_us
    by_category: dict[str, tuple[int, float]] = {}
    for kernel in kernels:
        number, us = by_category.get(kernel.category, (0, 0.0))
        by_category[kernel.category] = number + 1, us + kernel.duration_us
    device = Device(
        name="Example GPU",
        span_us=busy_us + count - 1,
        idle_us=count - 1.0,
        compute_us=busy_us,
        non_compute_us=0.0,
        launches=count,
        launch_us=2.0 * count,
        launched_us=busy_us,
        occupancy_queries=3,
        occupancy_query_us=1.5,
        by_category=by_category,
        by_stream={"device 0 stream 7": (count, busy_us)},
        kernels=kernels,
        calls=tuple(
            RuntimeCall(
                name="cudaLaunchKernel",
                start_us=profile.ops[i].start_us,
                duration_us=min(2.0, profile.ops[i].raw_us),
                thread=profile.ops[i].thread,
            )
            for i in leaves
        ),
        gaps=tuple(
            Gap(
                start_us=kernel.start_us - 1.0,
                duration_us=1.0,
                cause="host wait",
                before=kernel.name,
                op=kernel.op,
            )
            for kernel in kernels[1:]
        ),
    )
    ops = list(profile.ops)
    for n, i in enumerate(leaves):
        ops[i] = replace(ops[i], kernels=(n,))
    return replace(profile, ops=tuple(ops), device=device)
