"""How the time for measuring is shared out between the blocks and the whole model."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from torchweld.core.model_inputs import Workload
from torchweld.core.not_measured import NotMeasured
from torchweld.machine.device_waiting import wait_for_gpu
from torchweld.numerics.model_results import step_of
from torchweld.plans.plan import UNASKED
from torchweld.plans.plan_options import PlanOptions
from torchweld.timing.timing_verdicts import FEW_ROUNDS
from torchweld.welds.found_blocks import Blocks

# The share of the whole model, before and after welding, in the time for measuring.
WHOLE_SHARE = 0.4
# The same if the whole model can only be verified, because its steps are too long to be timed.
UNTIMED_SHARE = 0.1
# The share of groups of blocks, if there are any.
GROUPS_SHARE = 0.12


@dataclass(frozen=True, kw_only=True)
class TimeBudget:
    """The times at which measuring blocks, groups and the model ends, by `time.perf_counter`.

    untimed: for each workload, why the whole model is not timed on it; None if it is
    """

    blocks_end_s: float
    groups_end_s: float
    end_s: float
    untimed: tuple[NotMeasured | None, ...]


def share_out(
    model: nn.Module, workloads: Sequence[Workload], blocks: Blocks, options: PlanOptions
) -> TimeBudget:
    """Divides the time. If blocks are timed, runs each workload once to see if it can be timed."""
    begun_s, budget_s = time.perf_counter(), options.seconds
    each_s = budget_s * WHOLE_SHARE / len(workloads)
    untimed: tuple[NotMeasured | None, ...] = (UNASKED,) * len(workloads)
    if options.timing and blocks:
        untimed = tuple(_why_untimed(model, one, options.training, each_s) for one in workloads)
    share = WHOLE_SHARE if None in untimed else UNTIMED_SHARE
    groups_end_s = begun_s + budget_s * (1 - share)
    groups_s = budget_s * GROUPS_SHARE if any(block.group for block in blocks) else 0.0
    return TimeBudget(
        blocks_end_s=groups_end_s - groups_s,
        groups_end_s=groups_end_s,
        end_s=begun_s + budget_s,
        untimed=untimed,
    )


def _why_untimed(
    model: nn.Module, workload: Workload, training: bool, whole_s: float
) -> NotMeasured | None:
    """Why the whole model cannot be timed in `whole_s`; None if it can."""
    if any(parameter.is_meta for parameter in model.parameters()):
        return NotMeasured("the weights are on meta")
    step = step_of(model, workload, training)
    wait_for_gpu()
    begun_s = time.perf_counter()
    step()
    wait_for_gpu()
    step_s = time.perf_counter() - begun_s
    if least_budget_s(step_s) <= whole_s:
        return None
    return NotMeasured(f"a step takes {step_s:.2g} s, too long for the {whole_s:.2g} s it has")


def least_budget_s(call_s: float) -> float:
    """The least time for a verdict: the original and its control in the fewest rounds."""
    return 2 * FEW_ROUNDS * call_s
