"""`torch.ops.torchweld`: the compiled ops, or the same schemas registered from Python.

Importing this module registers the ops. `compiled` is the extension, or None; then `problem` says
why in one sentence.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchweld.core.blocks import parse_spec
from torchweld.core.errors import BuildError
from torchweld.machine import kernel_build
from torchweld.ops import flops

_TRAINING_OPS = (
    *("chain_training", "dropout_mask", "chain_saving", "group_saving"),
    *("chain_backward", "group_backward"),
)
_registered: list[torch.library.Library] = []  # kept alive for the process


def _load() -> tuple[Any, str | None]:
    problem = kernel_build.build_problem()
    if problem is None:
        module = importlib.import_module("torchweld._C")
        _register_fakes()
        _register_gpu()
        return module, None
    if kernel_build.build_info() is not None:  # built, but not for this torch
        warnings.warn(f"torchweld runs without its kernels: {problem}", stacklevel=3)
    _register_from_python()
    return None, problem


def _register_fakes() -> None:
    """Registers the packed ops for tracing, where only shapes are known.

    The number of output features is stored in the packed tensor, so it is unknown before the call,
    as with `nonzero`. The other ops compute their shapes in C++.
    """

    def like(x: Tensor) -> Tensor:
        if x.dim() == 0:
            raise ValueError("torchweld: x is a scalar; expected at least one dimension")
        features = torch.library.get_ctx().new_dynamic_size(min=1)
        return x.new_empty((*x.shape[:-1], features))

    def chain_packed(x: Tensor, packed: Tensor, spec: str) -> Tensor:
        parse_spec(spec)
        return like(x)

    def group_packed(x: Tensor, packed: Tensor, spec: str) -> list[Tensor]:
        return [like(x) for _ in parse_spec(spec)]

    def group_of_packed(x: Tensor, packed: list[Tensor], spec: str) -> list[Tensor]:
        return [like(x) for _ in parse_spec(spec)]

    torch.library.register_fake("torchweld::chain_packed", chain_packed)
    torch.library.register_fake("torchweld::group_of_packed", group_of_packed)
    torch.library.register_fake("torchweld::group_packed", group_packed)


def _register_gpu() -> None:
    """The Triton kernels, for CUDA tensors. Without them the composition serves, as elsewhere."""
    from torchweld.ops.gpu import gpu_ops, gpu_support

    if gpu_support.serves_cuda():
        gpu_ops.register()


def _register_from_python() -> None:
    from torchweld.ops import composed_training
    from torchweld.ops.backends import reference_backend

    def chain(x: Tensor, params: list[Tensor], spec: str) -> Tensor:
        forms = composed_training.parse_spec_without_dropout(spec)
        return reference_backend.chain(x, params, forms)

    def group(x: Tensor, params: list[Tensor], spec: str) -> list[Tensor]:
        forms = composed_training.parse_spec_without_dropout(spec)
        return reference_backend.group(x, params, forms)

    def chain_kept(x: Tensor, params: list[Tensor], spec: str, kept: Tensor) -> Tensor:
        return chain(x, params, spec)

    def chain_way(
        x: Tensor, params: list[Tensor], spec: str, way: str, recompute: bool | None = None
    ) -> Tensor:
        return composed_training.chain_training(x, params, spec, recompute)

    def needs_kernels(*_: object) -> Tensor:
        raise BuildError(
            "packed weights and the ways of a GPU need torchweld's kernels: "
            f"{kernel_build.build_problem()}"
        )

    known: dict[str, Callable[..., Any]] = {
        "chain": chain,
        "group": group,
        "chain_kept": chain_kept,
        "chain_way": chain_way,
        **{name: getattr(composed_training, name) for name in _TRAINING_OPS},
    }
    library = torch.library.Library("torchweld", "DEF")  # type: ignore[no-untyped-call]
    lines = (kernel_build.PACKAGE / "schemas.inc").read_text().splitlines()
    for schema in lines[1:-1]:  # the first and the last line are quotes for C++
        name = schema.partition("(")[0]
        tags = [torch.Tag.pt2_compliant_tag]
        if name in ("chain_training", "chain_way", "dropout_mask"):
            tags.append(torch.Tag.nondeterministic_seeded)
        library.define(schema, tags=tuple(tags))  # type: ignore[no-untyped-call]
        body = known.get(name, needs_kernels)
        library.impl(name, body, "CompositeImplicitAutograd")  # type: ignore[no-untyped-call]
    _registered.append(library)


def _no_forward(*_: object) -> Tensor | None:
    return None


compiled, problem = _load()
# Takes a module whose children are plain Linears and x: reads the Linears and runs the op, all in
# C. Gives None if it sees something that it does not handle.
compiled_forward: Callable[..., Tensor | None] = (
    _no_forward if compiled is None else compiled.forward
)
flops.register()
