"""Whole profiles made by hand: a model of blocks, fused or not, on a CPU or on a device.

`make` builds one from module places and trees of `Call`s; `blocks` and `fused_blocks` are one step
of the same model before and after fusion. The sums are those of `made_profiles.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tests.support.made_profiles import (
    Builder,
    changed,
    kernel,
    make_device,
    make_peaks,
    make_timing,
    tensor,
)
from tests.support.measured import measured

from torchweld.profiles.profile import Gap, Phase, Profile, RuntimeCall, Tensor


@dataclass(frozen=True, kw_only=True)
class Call:
    """An op to be: its own time, and what runs inside it. `path` is its module's."""

    name: str
    path: str = ""
    us: float = 10.0
    phase: Phase = "forward"
    inside: tuple[Call, ...] = ()
    inputs: tuple[Tensor | None, ...] = ()
    makes: tuple[int, int] | None = None
    call: int = -1
    sequence: int = -1
    thread: int = 0


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
    peaks = make_peaks(100.0, 20.0, threads=1) if live else None
    made = Builder(peaks=peaks, op_cost_us=1.0 if live else 0.0, root=places[0][1], gap_us=0.25)
    numbers = {"": 0}
    for path, kind, *extra in places[1:]:
        numbers[path] = made.module(path, kind, extra="".join(extra))

    def add(given: Call, parent: int = -1) -> None:
        number = made.op(
            given.name,
            given.us,
            module=numbers[given.path],
            inputs=given.inputs,
            makes=given.makes,
            parent=parent,
            phase=given.phase,
            call=given.call,
            sequence=given.sequence,
            thread=given.thread,
        )
        for inner in given.inside:
            add(inner, number)

    for given in calls:
        add(given)
    for i, place in enumerate(made.places):
        mine = [op for op in made.ops if op.module == i]
        place.python_us = python_us if mine else 0.0
        place.calls = len({op.call for op in mine if op.phase == "forward"})
    profile = made.build(training=any(op.phase == "backward" for op in made.ops))
    facts: dict[str, Any] = (
        {"torch": "9.9", "cpu": "Example CPU", "fingerprint": "f"} if live else {}
    )
    about = replace(
        profile.about,
        source="live" if live else "trace",
        what=places[0][1],
        threads=1 if live else 0,
        **facts,
        **{key[6:]: more.pop(key) for key in list(more) if key.startswith("about_")},
    )
    step_us = measured(profile.step_us)
    timing = make_timing(step_us, raw_us=1.2 * step_us, first_us=3 * step_us)
    return replace(profile, about=about, **{"timing": timing if live else None, **more})


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
                makes=(at + 1, normed.nbytes),
                call=5 * i + 1,
            ),
            linear(f"{path}.mlp.up", 120.0, normed, hidden, 100 + i, 5 * i + 2),
            Call(
                name="aten::gelu",
                path=f"{path}.mlp.act",
                us=40.0,
                inputs=(hidden,),
                makes=(at + 3, active.nbytes),
                call=5 * i + 3,
                sequence=200 + i,
            ),
            linear(f"{path}.mlp.down", 110.0, active, out, 300 + i, 5 * i + 4),
            Call(
                name="aten::add",
                path=path,
                us=15.0,
                inputs=(x, out),
                makes=(at + 10, x.nbytes),
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
        makes=(y.storage, y.nbytes),
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
                    makes=(10 * i + 4, x.nbytes),
                )
            )
        elif not given.path.endswith(gone):
            calls.append(given)
    return make(places, calls, **more)


def on_device(profile: Profile, kernel_us: float = 5.0) -> Profile:
    """A profile with a device. Each op without ops inside launched one kernel, 1 µs apart."""
    outer = {op.parent for op in profile.ops}
    leaves = [i for i in range(len(profile.ops)) if i not in outer]
    kernels = []
    for n, i in enumerate(leaves):
        fused = "gelu" in profile.ops[i].name
        kernels.append(
            kernel(
                "triton_poi_fused_gelu_mul_0" if fused else "gemm_128x64",
                100.0 + n * (kernel_us + 1.0),
                kernel_us,
                op=i,
                launch=n,
                category="triton" if fused else "gemm",
                inside=("gelu", "mul") if fused else (),
            )
        )
    gaps = [
        Gap(
            start_us=each.start_us - 1.0,
            duration_us=1.0,
            cause="host wait",
            before=each.name,
            op=each.op,
        )
        for each in kernels[1:]
    ]
    calls = tuple(
        RuntimeCall(
            name="cudaLaunchKernel",
            start_us=profile.ops[i].start_us,
            duration_us=min(2.0, profile.ops[i].raw_us),
            thread=profile.ops[i].thread,
        )
        for i in leaves
    )
    device = make_device(
        kernels,
        gaps,
        calls=calls,
        launch_us=2.0 * len(kernels),
        occupancy_queries=3,
        occupancy_query_us=1.5,
    )
    ops = list(profile.ops)
    for n, i in enumerate(leaves):
        ops[i] = changed(ops[i], kernels=(n,))
    return replace(profile, ops=tuple(ops), device=device)
