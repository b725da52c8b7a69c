"""Calls of welded modules that read the same input, made as one: the members of a group.

Each member is welded where it stands. The first that is called with an x runs the group's op for
all of them, and the others take what it has computed for them, if they are called with an x of the
same bytes: see csrc/python_glue/group_gathering.h. That happens on the quick way alone. Here a
member that has served a call of some shape by itself is told to gather calls of that shape from now
on. A group that is not called together any more gives up, and its members run one by one.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn

from torchweld import ops
from torchweld.welds.swapping.original_code import WeldedModel
from torchweld.welds.swapping.tensor_binding import PACKED, Bound, Stand
from torchweld.welds.weld_decisions import Decision, choice_at


class Membership:
    """One welded module's membership in the group that its decision names."""

    def __init__(self, decision: Decision, model: WeldedModel) -> None:
        self._decision, self._model = decision, model
        self._number: int | None = None

    @property
    def _gathering(self) -> Any:
        return self._model.gatherings.get(self._decision.block.group)

    def member(self, module: nn.Module, bound: Bound, rows: int, single: Stand | None) -> Any:
        """The gathering of calls with this many rows; None if the module is to run by itself.

        `single` is for calls that cannot be gathered; if None, the caller has to run those calls.
        """
        choice = choice_at(self._decision.in_group, rows)
        packed = bound.stands.get(PACKED)
        if choice is None or packed is None or not bound.direct:
            return None
        gatherings = self._model.gatherings
        gathering = gatherings.setdefault(self._decision.block.group, ops.compiled.Gathering())
        if gathering.stopped:
            return None
        stand = packed.__dict__
        linears = [linear._parameters for linear in stand["_modules"].values()]
        self._number = gathering.join(weakref.ref(module), linears, stand["_spec"], stand["_pack"])
        return ops.compiled.GroupMember(gathering, self._number, single)

    @property
    def calls(self) -> int:
        """How many calls of the module were gathered."""
        gathering = self._gathering
        if gathering is None or self._number is None:
            return 0
        return int(gathering.calls(self._number))

    @property
    def stopped(self) -> bool:
        """Whether the group has given up."""
        gathering = self._gathering
        return gathering is not None and bool(gathering.stopped)
