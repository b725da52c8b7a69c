"""The safety net: a call of a welded block compared with the original, by the numerical rule.

`Checking` says which calls are compared: the first few of a block, or a sample. `disagreement` is
the comparison. It compares twice, since the reference in fp64 is computed from the block's form:
the original has to be within the rule of that form, or it computes something else, and the welded
result has to be within the rule of the original.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from torchweld.core.blocks import LayerForm
from torchweld.numerics.dropped_values import by_masks, drawn_masks
from torchweld.numerics.numerical_rule import check_block, judge
from torchweld.numerics.sum_scales import scales_of
from torchweld.ops.backends import Runner, reference_backend


class Checking:
    """Which calls of one block to compare; `done` counts those that were."""

    def __init__(self, *, first: int = 0, sample: float = 0.0) -> None:
        self.first, self.sample = first, sample
        self.done = 0
        self._random = random.Random(0)  # the same calls in every run
        self._lock = threading.Lock()

    def wanted(self) -> bool:
        """Whether to compare this call."""
        with self._lock:
            wanted = self.done < self.first or self._random.random() < self.sample
            self.done += wanted
        return wanted

    @property
    def over(self) -> bool:
        return self.sample == 0.0 and self.done >= self.first


@torch.no_grad()
def disagreement(
    welded: Tensor,
    original: Tensor,
    x: Tensor,
    tensors: Sequence[Tensor],
    forms: Sequence[LayerForm],
    *,
    scale: float = 1.0,
    gradients_of: Callable[[Sequence[Tensor]], Runner] | None = None,
    drawn: Tensor | None = None,
) -> str | None:
    """What is wrong with `welded`, in one sentence, or None.

    `gradients_of`: builds the block on given tensors, to judge its gradients too.
    `drawn`: where forms have dropout, the random state that both have drawn from.
    """
    masks = [] if drawn is None else drawn_masks(x, tensors, forms, drawn)

    def reference(x: Tensor, tensors: Sequence[Tensor]) -> Tensor:
        by = reference_backend.Primitives(drop=by_masks(masks))
        return reference_backend.chain(x, tensors, forms, by) * scale

    plain = reference(x, tensors)
    exact = reference(x.double(), [t.double() for t in tensors])
    size = scales_of(x, tensors, forms, masks=masks).outputs[0] * abs(scale)
    meant = judge(original, plain, exact, size)
    if not meant.within:
        return f"the module computes something else than its block ({meant.reason})"
    found = judge(welded, original, exact, size)
    if not found.within:
        return found.reason
    if gradients_of is None:
        return None
    return _wrong_gradient(gradients_of, x, tensors, forms, original.shape)


def _wrong_gradient(
    build: Callable[[Sequence[Tensor]], Runner],
    x: Tensor,
    tensors: Sequence[Tensor],
    forms: Sequence[LayerForm],
    shape: torch.Size,
) -> str | None:
    draw = torch.Generator("cpu").manual_seed(0)
    grad = torch.randn(shape, generator=draw, dtype=torch.float64, device="cpu").to(x)

    def run(x: Tensor, tensors: Sequence[Tensor]) -> Tensor:
        y = build(tensors)(x)
        assert isinstance(y, Tensor)
        return y

    for name, judged in check_block(run, x, tensors, forms, grads=[grad]).items():
        if not judged.within:
            return f"{name}: {judged.reason}"
    return None
