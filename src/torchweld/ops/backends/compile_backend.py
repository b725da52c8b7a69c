"""Backend `compile`: the block through torch.compile, for comparison and for plans that ask for it.

One compiled function serves all blocks of a form; tensors are its arguments. It compiles at the
first call of each shape, which takes seconds, so plans try it only when told to.
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchweld.core.blocks import LayerForm
from torchweld.core.errors import UnsupportedError
from torchweld.core.model_inputs import first_line
from torchweld.core.passing_exceptions import is_interrupt
from torchweld.ops.backends import reference_backend
from torchweld.ops.backends.abilities import Abilities, BackendMode
from torchweld.ops.backends.backend import (
    Backend,
    Form,
    Runner,
    check_build,
    mode_of,
    plain_reasons,
)


@functools.cache
def _compiled(kind: str, forms: tuple[LayerForm, ...]) -> Callable[..., Any]:
    function = reference_backend.chain if kind == "chain" else reference_backend.group

    def block(x: Tensor, *tensors: Tensor) -> Tensor | list[Tensor]:
        return function(x, tensors, forms)

    return torch.compile(block, fullgraph=True, dynamic=False)


class CompiledRunner:
    copied_bytes = 0

    def __init__(self, block: Form, tensors: Sequence[Tensor]) -> None:
        self._run = _compiled(block.kind, block.forms)
        self._tensors = tuple(tensors)

    def __call__(self, x: Tensor) -> Tensor | list[Tensor]:
        try:
            y: Tensor | list[Tensor] = self._run(x, *self._tensors)
        except RuntimeError as error:
            from torch._dynamo.exc import TorchDynamoException  # loaded by now

            if not isinstance(error, TorchDynamoException) or is_interrupt(error):
                raise
            raise UnsupportedError(f"torch.compile failed: {first_line(error)}") from error
        return y


class CompileBackend:
    """torch.compile, one graph per block."""

    name = "compile"
    abilities = Abilities(
        devices=None,
        modes=(BackendMode(name="inductor", planned=("inference", "training")),),
        needs="a C++ compiler",
        trains=True,
        deterministic=True,
        compiles=True,
    )

    def unavailable(self) -> list[str]:
        if any(shutil.which(name) for name in ("g++", "clang++", "c++", "cl")):
            return []
        return ["torch.compile needs a C++ compiler, but there is none on PATH"]

    def unsupported_reasons(
        self,
        block: Form,
        shapes: Sequence[Sequence[int]],
        dtype: torch.dtype,
        device: torch.device,
        mode: str | None = None,
    ) -> list[str]:
        mode_of(self, mode)
        return plain_reasons(self, block, dtype, device)

    def build(self, block: Form, tensors: Sequence[Tensor], mode: str | None = None) -> Runner:
        check_build(self, block, tensors, mode)
        return CompiledRunner(block, tensors)


BACKEND: Backend = CompileBackend()
