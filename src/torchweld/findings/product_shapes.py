"""The matrix products that a Linear is made of: x [M, K] times a weight, N columns out.

In: an `Op`. Out: `Factors`, or None for any other op (a batched product, an unknown layout).
"""

from __future__ import annotations

from dataclasses import dataclass

from torchweld.profiles.accounting.op_calls import OpCall, rows_of
from torchweld.profiles.profile import Op, Tensor

# Name -> which tensor argument is x, and whether the weight after it is [N, K] instead of [K, N].
_PRODUCTS = {
    "aten::mm": (0, False),
    "aten::addmm": (1, False),
    "aten::_addmm_activation": (1, False),
    "aten::linear": (0, True),
    "aten::mkldnn_linear": (0, True),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Factors:
    """`position` is that of x among the op's tensor arguments."""

    position: int
    x: Tensor
    weight: Tensor
    M: int
    K: int
    N: int

    @property
    def shape(self) -> str:
        """8 × 768 → 3072, float32."""
        return f"{self.M} × {self.K} → {self.N}, {self.x.dtype or 'unknown type'}"


def factors_of(op: Op) -> Factors | None:
    """The shape of a product by its op."""
    layout = _PRODUCTS.get(op.name)
    if layout is None:
        return None
    position, out_first = layout
    tensors = OpCall(op).inputs
    if len(tensors) < position + 2:
        return None
    x, weight = tensors[position : position + 2]
    if not x.shape or len(weight.shape) != 2:
        return None
    K, N = reversed(weight.shape) if out_first else weight.shape
    return Factors(position=position, x=x, weight=weight, M=rows_of(x), K=K, N=N)
