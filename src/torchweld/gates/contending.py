"""What runs in the process of one contender: a target loaded, welded by a plan, called.

`RUNTIMES` is what a worker of `torchweld.bench` looks its runtime up in.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchweld.core.untold import untold
from torchweld.gates.subject import Subject
from torchweld.numerics.model_check import step_of
from torchweld.plans.plan import Plan
from torchweld.plans.plan_fitting import fit_plan
from torchweld.welds.swapping.swap import weld

# What a call gives to the worker, whose business the model's own output is not.
NOTHING = torch.zeros(1)


class Contending:
    """One target, as `torchweld gate` welds it."""

    def load(
        self, folder: str, target: str, inputs: Sequence[str], training: bool, plan: str
    ) -> None:
        os.chdir(folder)
        sys.path.insert(0, folder)  # for good: a model may import when it is first called
        self.subject = Subject.load(target, inputs, training)
        found = fit_plan(self.subject.model, Plan.from_json(plan))
        with untold():
            weld(self.subject.model, found.decisions)

    def prepare(self, number: int) -> Callable[[], Any]:
        """The call of one workload."""
        subject = self.subject
        run = step_of(subject.model, subject.workloads[number], subject.training)

        def call() -> Any:
            with torch.set_grad_enabled(subject.training):
                run()
            return NOTHING

        return call

    def details(self) -> dict[str, Any]:
        return {}


RUNTIMES = {"this": Contending, "other": Contending}
