"""The outputs a block should have: fp64 from the weights and inputs that the runtimes get."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from torchweld.bench.bench_cases import SEED, MlpShape
from torchweld.bench.eager_block import tensors_of
from torchweld.numerics.numerical_rule import Judgement, judge
from torchweld.numerics.sum_scales import scales_of
from torchweld.ops.backends import reference_backend

# If x has more rows, this many are judged, evenly spread, with the first and the last: the
# reference in fp64 and its scales took 11 s for 4096 rows of 1024→2816→1024, on two cores.
JUDGED_ROWS = 64


@dataclass(frozen=True, kw_only=True)
class BlockTruth:
    """Outputs in fp64, and the scale of their sums, for the rows that are judged.

    `picked` are those rows' numbers; None: all.
    """

    outputs: Tensor
    scale: Tensor
    picked: Tensor | None = None

    @classmethod
    def of(
        cls, mlp: MlpShape, dtype: torch.dtype, rows: int, seed: int = SEED, most: int | None = None
    ) -> BlockTruth:
        """The truth for an input of `rows` rows, of which at most `most` are judged."""
        x = torch.from_numpy(mlp.inputs(rows, seed + 1)).to(dtype)
        picked = None
        if most is not None and rows > most:
            picked = torch.linspace(0, rows - 1, most).long()
            x = x[picked]
        tensors = [tensor.detach() for tensor in tensors_of(mlp, dtype, seed)]
        outputs = reference_backend.chain(x.double(), [t.double() for t in tensors], mlp.forms)
        (scale,) = scales_of(x, tensors, mlp.forms).outputs
        return cls(outputs=outputs, scale=scale, picked=picked)

    def judge(self, output: Tensor, eager: Tensor) -> Judgement:
        """Judges an output by the numerical rule."""
        return judge(self._judged(output), self._judged(eager), self.outputs, self.scale)

    def largest_error(self, output: Tensor) -> float:
        """The largest distance from the truth."""
        output = self._judged(output)
        if output.shape != self.outputs.shape:
            return math.inf
        return float((output.double() - self.outputs).abs().max().nan_to_num(nan=math.inf))

    def _judged(self, output: Tensor) -> Tensor:
        return output if self.picked is None else output[self.picked]
