"""The ways of `gpu_ways.py` as ops: what they are given is checked, and autocast kept out."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from torchweld.ops.gpu.gpu_ways import DEFAULT_WAY, WAYS, Way, backward, kernels, saving

_libraries: list[torch.library.Library] = []  # kept alive for the process


def _without_autocast() -> AbstractContextManager[None]:
    """For what runs inside an op: autocast would cast the operands of torch's products there.

    An op's own cast comes before it (csrc/torch_glue/autograd.cpp). A backward that is called
    under autocast has none, and eager's gradients have the types of their tensors all the same.
    """
    guard: AbstractContextManager[None] = torch._C._ExcludeDispatchKeyGuard(_AUTOCAST)
    return guard


_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)
_AUTOCAST |= torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)


def _saving_op(way: Way, name: str) -> Callable[..., list[Tensor]]:
    def run(
        x: Tensor, params: list[Tensor], masks: list[Tensor], spec: str, save: bool
    ) -> list[Tensor]:
        _ops().check_saving(x, params, masks, spec, name)
        with _without_autocast():
            if x.dtype == torch.float64:
                return list(_ops().composed_saving(x, params, masks, spec, save))
            return saving(way, x, params, masks, spec, save)

    return run


def _backward_op(way: Way, name: str) -> Callable[..., list[Tensor]]:
    def run(
        grad: Tensor, x: Tensor, params: list[Tensor], saved: list[Tensor], masks: list[Tensor],
        spec: str, needed: list[bool],
    ) -> list[Tensor]:  # fmt: skip
        _ops().check_backward(grad, x, params, saved, masks, spec, needed, name)
        with _without_autocast():
            if x.dtype == torch.float64:
                return list(_ops().composed_backward(grad, x, params, saved, masks, spec, needed))
            return backward(way, grad, x, params, saved, masks, spec, needed)

    return run


def _ops() -> Any:
    """Checks of arguments, and the composition (csrc/torch_glue/way_ops.cpp)."""
    return torch.ops.torchweld


def register_ways(library: torch.library.Library, key: str) -> None:
    """The ops of all ways, for tensors of this dispatch key. They refuse float64."""
    for name, way in WAYS.items():
        library.impl(f"{name}_saving", _saving_op(way, name), key)  # type: ignore[no-untyped-call]
        library.impl(f"{name}_backward", _backward_op(way, name), key)  # type: ignore[no-untyped-call]


def register_default(library: torch.library.Library, key: str) -> None:
    """What `chain` and its training do on this dispatch key without a plan.

    float64 is the composition's: no kernel here computes in it.
    """
    way = WAYS[DEFAULT_WAY]

    def chain(x: Tensor, params: list[Tensor], spec: str) -> Tensor:
        _ops().check_chain(x, params, spec)
        with _without_autocast():
            if x.dtype == torch.float64:
                composed: Tensor = _ops().composed_chain(x, params, spec)
                return composed
            return saving(way, x, params, (), spec, False)[0]

    def dropout_mask(like: Tensor, features: int, p: float) -> Tensor:
        made: Tensor = kernels().dropout_mask(like, features, p)
        return made

    library.impl("chain", chain, key)  # type: ignore[no-untyped-call]
    library.impl("chain_saving", _saving_op(way, ""), key)  # type: ignore[no-untyped-call]
    library.impl("chain_backward", _backward_op(way, ""), key)  # type: ignore[no-untyped-call]
    library.impl("dropout_mask", dropout_mask, key)  # type: ignore[no-untyped-call]


def register() -> None:
    """For CUDA tensors (ROCm's too), if Triton can serve them. Called once, by `torchweld.ops`."""
    library = torch.library.Library("torchweld", "IMPL")  # type: ignore[no-untyped-call]
    register_ways(library, "CUDA")
    register_default(library, "CUDA")
    _libraries.append(library)
