"""Which share of a model's FLOPs a plan welds, as torch counts them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from torchweld.core.model_inputs import Workload
from torchweld.core.not_measured import NotMeasured
from torchweld.core.passing_exceptions import is_interrupt
from torchweld.plans.block_calls import tensors_of
from torchweld.plans.plan import UNASKED
from torchweld.welds.weld_decisions import Decision


def flops_share(
    model: nn.Module, decisions: Sequence[Decision], workloads: Sequence[Workload]
) -> float | NotMeasured:
    """The share of welded blocks in the FLOPs of all workloads, forward. `model` is unwelded."""
    if not decisions or any(parameter.is_meta for parameter in model.parameters()):
        return UNASKED
    counter = FlopCounterMode(display=False)
    try:
        with torch.no_grad(), counter:
            for workload in workloads:
                workload.run(model)
    except Exception as error:  # a model whose ops torch's counter cannot follow
        if is_interrupt(error):
            raise
        return NotMeasured(f"torch could not count the model's FLOPs: {error}")
    total = counter.get_total_flops()
    welded = sum(flops_of_block(model, decision) for decision in decisions)
    if not 0 < welded <= total:
        return NotMeasured("torch counts fewer FLOPs in the model than its welded blocks have")
    return welded / total


def flops_of_block(model: nn.Module, decision: Decision) -> float:
    """The FLOPs of all calls that the decision covers."""
    block = decision.block
    weights = sum(t.numel() for t in tensors_of(model, block) if t.dim() == 2)
    covered = (call for call in block.calls if decision.covers(call.rows))
    return sum(2.0 * weights * call.rows * call.count for call in covered)
