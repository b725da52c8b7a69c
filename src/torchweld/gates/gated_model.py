"""What is gated, and how it is timed: a target with its inputs, loaded the same way every time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from torchweld.core.model_inputs import Workload
from torchweld.history import target_words
from torchweld.models import seeded
from torchweld.models.targets import resolve
from torchweld.numerics.repeat_check import check_repeatable


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model that does the same when it is called again; checked."""

    target: str  # as typed, as are the inputs
    inputs: tuple[str, ...]
    model: nn.Module
    workloads: tuple[Workload, ...]
    training: bool
    notes: tuple[str, ...] = ()

    @staticmethod
    def load(target: str, inputs: Sequence[str] = (), training: bool = False) -> Subject:
        """Makes the model from a fixed seed, since which way it goes can depend on its weights."""
        with seeded(0):
            found = resolve(target, inputs, training=training)
        check_repeatable(found.model, found.workloads, training)
        return Subject(
            target=target,
            inputs=tuple(inputs),
            model=found.model,
            workloads=found.workloads,
            training=training,
            notes=found.notes,
        )

    @property
    def what(self) -> str:
        """The key under which its baseline is kept."""
        return target_words(self.target, self.inputs, self.training)


@dataclass(frozen=True, kw_only=True)
class Clock:
    """How wall time is measured: seconds for a comparison, and the change that is tolerated."""

    seconds: float = 5.0
    tolerance: float = 0.05
