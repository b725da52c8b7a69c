"""Backend `cpu`: the compiled kernels behind `torch.ops.torchweld`.

Mode `natural` reads the original weights. Mode `packed` keeps a copy in the kernels' own layout,
and copies again when the weights have changed. A call that needs more than values (a gradient,
autocast, a tracer) reads the original weights in both modes.
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
)
from torchweld.ops.backends.weight_watch import WeightWatch, check_watchable


class NaturalRunner:
    copied_bytes = 0

    def __init__(self, block: Form, tensors: Sequence[Tensor]) -> None:
        ops = torch.ops.torchweld
        self._op = (ops.chain if block.kind == "chain" else ops.group).default
        self._tensors = list(tensors)
        self._spec = block.spec

    def __call__(self, x: Tensor) -> Tensor | list[Tensor]:
        y: Tensor | list[Tensor] = self._op(x, self._tensors, self._spec)
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
            BackendMode(name="packed", packs=True, planned=("inference",)),
        ),
        needs="torchweld's compiled kernels",
        trains=True,
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
        mode_of(self, mode)
        return plain_reasons(self, dtype, device)

    def build(self, block: Form, tensors: Sequence[Tensor], mode: str | None = None) -> Runner:
        if check_build(self, block, tensors, mode) == "natural":
            return NaturalRunner(block, tensors)
        check_watchable(tensors, "mode packed of backend cpu")
        return PackedRunner(block, tensors)


BACKEND: Backend = CpuBackend()
