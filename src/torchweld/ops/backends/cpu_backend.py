"""Backend `cpu`: the compiled kernels behind `torch.ops.torchweld`.

Modes `natural` and `recompute` read the original weights. For a backward, `natural` keeps x and
what the kernels need of hidden values; `recompute` keeps x alone and computes them again. Mode
`packed` keeps a copy of the weights in the kernels' own layout, and copies again when they have
changed. A call that needs more than values (a gradient, autocast, a tracer) reads the original
weights in all modes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchweld.core.errors import BuildError
from torchweld.machine import kernel_build
from torchweld.ops.backends.abilities import Abilities, BackendMode
from torchweld.ops.backends.backend import (
    Backend,
    Form,
    Runner,
    check_build,
    mode_of,
    plain_reasons,
    values_alone,
    wants_gradients,
)
from torchweld.ops.backends.weight_watch import WeightWatch, check_watchable


class NaturalRunner:
    copied_bytes = 0

    def __init__(self, block: Form, tensors: Sequence[Tensor], recompute: bool = False) -> None:
        ops = torch.ops.torchweld
        self._op = (ops.chain if block.kind == "chain" else ops.group).default
        self._tensors = list(tensors)
        self._spec = block.spec
        self._recompute = recompute
        self._drops_out = block.drops_out
        self._is_chain = block.kind == "chain"

    def __call__(self, x: Tensor) -> Tensor | list[Tensor]:
        y: Tensor | list[Tensor]
        if self._is_chain and (self._drops_out or wants_gradients(x, self._tensors)):
            op = torch.ops.torchweld.chain_training.default
            y = op(x, self._tensors, self._spec, self._recompute)
        else:
            y = self._op(x, self._tensors, self._spec)
        return y


class PackedRunner:
    def __init__(self, block: Form, tensors: Sequence[Tensor]) -> None:
        ops = torch.ops.torchweld
        self._op = (ops.chain_packed if block.kind == "chain" else ops.group_packed).default
        self._natural = NaturalRunner(block, tensors)
        self._tensors = list(tensors)
        self._spec = block.spec
        self._kept = self._pack()

    @property
    def copied_bytes(self) -> int:
        return self._kept[1].nbytes

    def _pack(self) -> tuple[WeightWatch, Tensor]:
        # Watched before copying: the next call then finds an edit that happens in between.
        watch = WeightWatch(self._tensors, contents=True)
        return watch, torch.ops.torchweld.pack.default(self._tensors, self._spec)

    def __call__(self, x: Tensor) -> Tensor | list[Tensor]:
        if not values_alone(x, self._tensors):
            return self._natural(x)
        watch, packed = self._kept
        if not watch.unchanged():
            watch, packed = self._kept = self._pack()
        y: Tensor | list[Tensor] = self._op(x, packed, self._spec)
        return y


class CpuBackend:
    """The compiled kernels."""

    name = "cpu"
    abilities = Abilities(
        devices=("cpu",),
        modes=(
            BackendMode(name="natural", planned=("inference", "training")),
            BackendMode(name="recompute", recomputes=True, planned=("training",)),
            BackendMode(name="packed", packs=True, planned=("inference",)),
        ),
        needs="torchweld's compiled kernels",
        trains=True,
        drops_out=True,
        deterministic=True,
        in_graphs=True,
        c_forward=True,
        in_speed_tables=True,
    )

    def unavailable(self) -> list[str]:
        try:
            problem = kernel_build.build_problem()
            if problem is None:
                kernel_build.isa_in_use()
        except BuildError as error:
            problem = str(error)
        return [] if problem is None else [problem]

    def unsupported_reasons(
        self,
        block: Form,
        shapes: Sequence[Sequence[int]],
        dtype: torch.dtype,
        device: torch.device,
        mode: str | None = None,
    ) -> list[str]:
        packs = mode_of(self, mode) == "packed"
        reasons = plain_reasons(self, block, dtype, device)
        if packs and block.drops_out:
            reasons.append("packed copies are for inference, where nothing is dropped")
        return reasons

    def build(self, block: Form, tensors: Sequence[Tensor], mode: str | None = None) -> Runner:
        mode = check_build(self, block, tensors, mode)
        if mode != "packed":
            return NaturalRunner(block, tensors, recompute=mode == "recompute")
        check_watchable(tensors, "mode packed of backend cpu")
        return PackedRunner(block, tensors)


BACKEND: Backend = CpuBackend()
