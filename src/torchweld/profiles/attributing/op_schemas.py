"""What the installed torch says about an op by its name: its overloads and their arguments."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch


@lru_cache(maxsize=16_384)
def overloads_of(namespace: str, base: str) -> tuple[Any, ...]:
    """All variants of a registered op; none if torch does not know it."""
    # Names come from files: only what can be an op is asked for.
    if not (namespace.isidentifier() and base.isidentifier()) or namespace.startswith("__"):
        return ()
    packet: Any = getattr(getattr(torch.ops, namespace), base, None)
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        return ()
    names: list[str] = packet.overloads()  # type: ignore[no-untyped-call]
    found: list[Any] = [getattr(packet, name) for name in names]
    # Some exist for TorchScript alone, and are never dispatched.
    return tuple(over for over in found if torch._C._dispatch_has_kernel(over.name()))


def is_composition(overload: Any) -> bool:
    """Whether an op is made of other ops on every device, so that they show below it."""
    has = overload.has_kernel_for_dispatch_key
    keys = torch._C.DispatchKey
    return bool(has(keys.CompositeImplicitAutograd)) and not (has(keys.CPU) or has(keys.CUDA))


def is_out(overload: Any) -> bool:
    """Writes to arguments that are nothing but results."""
    return any(argument.is_out for argument in overload._schema.arguments)


def is_view(overload: Any) -> bool:
    """Its result is the memory of an argument, and nothing is written to it."""
    if torch.Tag.inplace_view in overload.tags:
        return True
    returns = [value.alias_info for value in overload._schema.returns]
    return bool(returns) and all(alias is not None and not alias.is_write for alias in returns)


@lru_cache(maxsize=16_384)
def out_arguments(name: str, count: int) -> int:
    """How many of the last of `count` arguments are results given as `out=`.

    A recording has the same name for both variants; the number of arguments tells them apart. If
    it does not, or if lists of tensors are among the arguments, no argument counts as a result.
    """
    namespace, _, base = name.partition("::")
    found = set()
    for overload in overloads_of(namespace, base.partition(".")[0]):
        arguments = overload._schema.arguments
        kinds = [str(argument.type) for argument in arguments]
        if any("List" in kind and "Tensor" in kind for kind in kinds):
            return 0
        if len(arguments) == count:
            found.add(sum(argument.is_out for argument in arguments))
    return found.pop() if len(found) == 1 else 0
