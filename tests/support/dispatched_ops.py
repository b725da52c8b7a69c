"""The ops that torch really dispatches, with shapes and memory, without times."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torchweld.profiles.profile import Op, Tensor


def ops_of(function: Callable[[], object]) -> list[Op]:
    """The ops below autograd that `function` dispatches."""
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
