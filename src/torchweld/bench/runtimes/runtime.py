"""What every runtime does: takes a source, gets ready for one of its inputs, gives a call to time.

A source makes a module and what it is called with: a block (`BlockSource`) or a whole model
(`ModelSource`). It can be pickled, and makes the same in any process. In one process all runtimes
of a source share its module: `show` makes it this runtime's, before the clock starts.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from torchweld.bench.bench_cases import MlpShape
from torchweld.bench.eager_block import BlockSource
from torchweld.bench.model_sources import ModelSource
from torchweld.bench.runtimes import model_facts
from torchweld.bench.step_calls import StepCall, block_step, judged_of, model_step
from torchweld.bench.step_costs import faults_and_peak
from torchweld.bench.training_step import TrainingStep
from torchweld.core.model_inputs import Inputs, Workload
from torchweld.core.not_measured import NotMeasured
from torchweld.core.saved_tensors import saved_bytes
from torchweld.models.targets import Target
from torchweld.welds.swapping.module_faces import Face

Call = Callable[[], Any]
Source = BlockSource | ModelSource
DOES_NOT_TRAIN = "it does not train"


@dataclass(frozen=True, kw_only=True)
class LoadedSource:
    """What a source made, and how its modules looked before anybody welded them."""

    made: Target
    original: Face


# One at a time: all sides load the same source before any loads the next.
@functools.lru_cache(maxsize=1)
def loaded(source: Source) -> LoadedSource:
    made = source.make()
    return LoadedSource(made=made, original=Face(list(made.model.modules())))


class Runtime:
    """The module as it is, called as its users call it. Subclasses override what they do otherwise.

    apart:     it needs a process of its own
    countable: its ops reach the dispatcher one by one, and it runs on an x without rows
    needs:     packages that have to be installed; `exports`: those for whole models besides
    distributions: what they are installed as, where that has another name
    devices:   device types that it runs on; None: any
    dtypes:    in which it is measured; empty: in all
    trains:    it can be measured in training
    """

    apart = False
    countable = True
    needs: tuple[str, ...] = ()
    exports: tuple[str, ...] = ()
    distributions: tuple[str, ...] = ()
    devices: tuple[str, ...] | None = ("cpu",)
    dtypes: tuple[str, ...] = ()
    trains = False
    step: TrainingStep | None = None

    # ---- why it cannot ----

    def absent(self, whole_model: bool) -> str:
        """Why it cannot run on this machine, and the remedy; "" if it can."""
        packages = (*self.needs, *(self.exports if whole_model else ()))
        missing = " and ".join(name for name in packages if importlib.util.find_spec(name) is None)
        if not missing:
            return ""
        if self.distributions:
            return f"{missing} not installed: pip install {' '.join(self.distributions)}"
        return f'{missing} not installed: pip install "torchweld[bench]", or {missing}'

    def not_on(self, device: str) -> str:
        """Why it does not run on this type of device; "" if it does."""
        if self.devices is None or device in self.devices:
            return ""
        return f"it runs on {', '.join(self.devices)}, and this bench on {device}"

    def why_not_block(self, mlp: MlpShape) -> str:
        """Why it cannot run such a block; "" if it can."""
        return ""

    def expected_kernels(self, mlp: MlpShape) -> dict[str, int] | None:
        """How many kernels of each kind a call should launch on a GPU; None: not known."""
        return None

    def why_not(self, dtype: str, training: bool = False) -> str:
        """Why it is not measured in a dtype, or in training; "" if it is."""
        if training and not self.trains:
            return DOES_NOT_TRAIN
        if not self.dtypes or dtype in self.dtypes:
            return ""
        return f"it is measured in {', '.join(self.dtypes)} only"

    def versions(self) -> list[str]:
        """Versions of the packages that it needs."""
        return [f"{n} {metadata.version(n)}" for n in self.distributions or self.needs]

    # ---- what it does ----

    def start(self) -> None:
        """Imports what it needs; raises if that fails."""

    def load(self, source: Source) -> None:
        self.source = source
        found = loaded(source)
        self.made, self.model = found.made, found.made.model
        self.original = self.face = found.original
        self.function: Callable[..., Any] = self.model

    def show(self) -> None:
        """Makes the shared module this runtime's."""
        self.face.show()

    def train(self, step: TrainingStep | None) -> None:
        """Makes each call a training step, from the next `prepare` on; None: without gradients."""
        self.step = step

    def prepare(self, *where: int) -> Call:
        """Gets ready for x of a shape, or for the workload with a number."""
        self.workload = self.source.workload(self.made, *where)
        return self.bind(self.workload)

    def bind(self, workload: Workload) -> Call:
        if self.step is None:
            return call_of(self.function, workload)
        self.step_call = self._step_call(workload, self.step)
        return self.step_call.call

    def _step_call(self, workload: Workload, step: TrainingStep) -> StepCall:
        if isinstance(self.source, BlockSource):
            (x,) = workload.tensors()
            gradient = self.source.gradient(*x.shape[:-1])
            return block_step(self.function, x, self.source.tensors, gradient, step)
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        return model_step(call_of(self.function, workload), parameters, step)

    def judged(self, call: Call) -> Any:
        """What is verified: the output of a call; of a block in training its gradients too.

        Those of a whole model are as large as the model; they are verified before it is timed.
        """
        if self.step is None:
            return call()
        if isinstance(self.source, ModelSource):
            return [call()]
        return judged_of(self.step_call, self.step.accumulate)

    def training_cost(self) -> dict[str, Any]:
        """What the step that was prepared costs in memory."""
        made = self.step_call
        parameters = [*self.model.parameters(), *made.leaves[1:]]
        faults, peak = faults_and_peak(made.call)
        return {
            "saved_bytes": saved_bytes(made.forward, parameters),
            "faults": faults,
            "peak_bytes": peak,
        }

    def idle(self) -> Call | None:
        """The call with nothing to compute: Python, dispatch and allocation; of blocks alone."""
        if isinstance(self.source, ModelSource):
            return None
        return self.bind(self.source.workload(self.made, 0))

    # ---- what it says ----

    def details(self) -> dict[str, Any]:
        """What was chosen or run, asked after a call."""
        return {}

    def about(self) -> dict[str, Any]:
        """What was loaded; `weights` is a digest."""
        return {
            "workloads": [workload.name for workload in self.made.workloads],
            "notes": list(self.made.notes),
            "weights": model_facts.digest(self.model),
        }

    def profiled_host(self) -> tuple[float, float] | NotMeasured:
        """Host time of a whole model in µs, and its share of the step."""
        return model_facts.profiled_host(self.model, self.workload)

    def cuda_us(self) -> float | None:
        """One call on a CUDA device; None where it is not asked."""
        return None


def call_of(function: Callable[..., Any], workload: Workload) -> Call:
    """The call as its users write it."""
    if type(workload.inputs) is not Inputs:
        return lambda: workload.run(function)  # type: ignore[arg-type]
    args, kwargs = workload.inputs.args, workload.inputs.kwargs
    if len(args) == 1 and not kwargs:
        x = args[0]
        return lambda: function(x)
    return lambda: function(*args, **kwargs)
