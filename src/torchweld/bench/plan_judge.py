"""The plan of a model for training, and whether the model welded by it learns the same.

A `PlanJudge` is what a worker holds before anything is timed. Planning and verifying leave their
mark on a process: on what malloc keeps, and on its peak of memory. So the sides that are timed only
get the file with the plan.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from torchweld.bench.bench_results import OutputCheck
from torchweld.bench.model_sources import ModelSource
from torchweld.bench.runtimes import model_facts
from torchweld.bench.runtimes.runtime import loaded
from torchweld.bench.runtimes.torchweld_runtimes import PlannedRuntime
from torchweld.bench.whole_model_check import output_check
from torchweld.core.model_state import put_back
from torchweld.core.muted_warnings import untold
from torchweld.numerics.model_check import compare_results, depth_of
from torchweld.numerics.model_results import results
from torchweld.numerics.model_truth import truth_of
from torchweld.numerics.repeat_check import check_repeatable


class PlanJudge:
    """Each method is a command. Outputs and gradients are judged as `tw.verify` does."""

    def __init__(self, threads: int) -> None:
        torch.set_num_threads(threads)
        self.runtime = PlannedRuntime()

    @torch.enable_grad()
    def load(self, source: ModelSource, file: str) -> dict[str, Any]:
        """Makes the plan, or takes that of the source, and writes it to a file; what was loaded.

        Raises where the model cannot be timed.
        """
        made = loaded(source).made
        check_repeatable(made.model, made.workloads, training=True)
        with untold():
            self.runtime.load(source)
        self.runtime.plan.save(Path(file))
        return {**self.runtime.about(), "sentence": self.runtime.plan.sentence()}

    @torch.enable_grad()
    def work(self, number: int) -> dict[str, Any]:
        """FLOPs and bytes of forward and backward."""
        self.runtime.original.show()
        workload = self.runtime.made.workloads[number]
        with put_back(self.runtime.model, True):
            return model_facts.training_work_of(self.runtime.model, workload)

    @torch.enable_grad()
    def judge(self, number: int) -> OutputCheck:
        """The welded model beside the original: outputs, and the gradient of every parameter."""
        model, workload = self.runtime.model, self.runtime.made.workloads[number]
        with untold(), put_back(model, True):
            self.runtime.original.show()
            expected = results(model, workload, True)
            truth = truth_of(model, workload, True)
            self.runtime.show()
            got = results(model, workload, True)
        self.runtime.original.show()
        return output_check(compare_results(got, expected, truth, depth_of(model)))
