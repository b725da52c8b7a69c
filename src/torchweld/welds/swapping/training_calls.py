"""Whether a welded module may serve calls in training mode, where blocks drop values."""

from __future__ import annotations

from torchweld.welds.guarding.welded_structure import Structure
from torchweld.welds.weld_decisions import Decision


def drops_as_known(decision: Decision, structure: Structure) -> bool:
    """Whether it is known what the block drops, and every backend of the decision can do it.

    It is known only if the block was seen in training. A probability of 1 leaves nothing to do.
    """
    block = decision.block
    if block.calls and not any(call.training for call in block.calls):
        return False
    if not any(block.dropout):  # a dropout inside that has dropped nothing may begin to
        return not any(probability > 0 for probability in structure.dropout())
    able = all(choice.abilities.drops_out for choice in decision.choices)
    return able and len(block.dropout) == block.layers and max(block.dropout) < 1.0
