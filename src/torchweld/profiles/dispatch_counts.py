"""What a call dispatches: ops, and buffers made for their results. Counted, so the same every time.

An op is what reaches the dispatcher below autograd: `F.linear` on a 3-D x counts as view, t, addmm
and view. A buffer is counted where an op gives a tensor whose storage none of its arguments has;
scratch memory inside a kernel is not a tensor, and is not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True, kw_only=True)
class Counts:
    """What one call did: the names of its ops in order, and the buffers that they made."""

    ops: tuple[str, ...]
    buffers: int
    buffer_bytes: int


def count(function: Callable[[], object]) -> Counts:
    """Calls `function` once, and counts."""
    counter = _Counter()
    with counter:
        function()
    return Counts(
        ops=tuple(counter.ops), buffers=counter.buffers, buffer_bytes=counter.buffer_bytes
    )


def _storages(values: object) -> dict[int, Tensor]:
    found = {}
    for leaf in tree_leaves(values):
        # A tensor in oneDNN's layout has no storage to compare.
        if isinstance(leaf, Tensor) and leaf.layout == torch.strided:
            found[leaf.untyped_storage()._cdata] = leaf
    return found


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[str] = []
        self.buffers = 0
        self.buffer_bytes = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        # Autograd takes composite ops apart before they arrive here; in inference mode nobody did.
        with self:
            result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        result = func(*args, **kwargs)
        self.ops.append(str(func).removesuffix(".default"))
        given = _storages((args, kwargs))
        for storage, tensor in _storages(result).items():
            if storage not in given:
                self.buffers += 1
                self.buffer_bytes += tensor.untyped_storage().nbytes()
        return result
