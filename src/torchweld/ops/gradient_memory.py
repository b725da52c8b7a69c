"""The memory that fused backward passes keep for weight gradients.

A training step frees its gradients and needs them again a moment later. malloc gives blocks of that
size back to the system, and every step pays for fresh pages. So where rows are few, weight
gradients come from a pool (csrc/torch_glue/gradient_pool.h): what `zero_grad` frees waits there for
the next step.
"""

from __future__ import annotations

from dataclasses import dataclass

from torchweld import ops
from torchweld.core.argument_checks import misfit


@dataclass(frozen=True, kw_only=True)
class GradientMemory:
    """The pool's memory, in bytes.

    in_use: gradients that exist, and autocast's copies of weights
    idle: kept for the next step
    limit: the most that is kept idle; 0: no pool
    """

    in_use: int
    idle: int
    limit: int


def gradient_memory() -> GradientMemory:
    """How much memory the pool of weight gradients holds now."""
    if ops.compiled is None:
        return GradientMemory(in_use=0, idle=0, limit=0)
    return GradientMemory(**ops.compiled.gradient_pool())


def release_gradient_memory() -> None:
    """Gives the pool's idle memory back to the system; the next step takes new pages."""
    if ops.compiled is not None:
        ops.compiled.release_gradient_pool()


def limit_gradient_memory(limit: int) -> None:
    """Keeps at most `limit` bytes idle from now on (1 GiB by default); 0 turns the pool off."""
    if not isinstance(limit, int) or isinstance(limit, bool) or limit < 0:
        raise misfit("limit_gradient_memory", "limit", limit, "a whole number of bytes, 0 or more")
    if ops.compiled is not None:
        ops.compiled.limit_gradient_pool(min(limit, (1 << 63) - 1))
