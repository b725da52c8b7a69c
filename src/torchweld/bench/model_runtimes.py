"""The runtimes of whole models: each makes the same model and calls it on the same inputs.

`load(source)` makes it, `prepare(number)` gets it ready for one of its workloads and returns a
callable without arguments whose result is what the model returns. A source can be pickled, and
makes the same model in any process. In one process, eager and welded are the same model: `show`
makes it the one or the other, before the clock starts.
"""

from __future__ import annotations

import functools
import hashlib
import tempfile
from collections import Counter
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from torchweld.bench.model_sources import Source
from torchweld.core.errors import TorchweldError
from torchweld.core.inputs import Inputs, Workload, tensors_in
from torchweld.core.not_measured import NotMeasured
from torchweld.core.records import to_plain
from torchweld.core.untold import untold
from torchweld.models.targets import Target
from torchweld.numerics.model_check import depth_of, results, step_of, truth_of
from torchweld.numerics.repeatable import check_repeatable
from torchweld.plans.ceiling import ceiling
from torchweld.plans.plan import UNASKED, Plan
from torchweld.plans.planner import apply, plan
from torchweld.profiles.accounting.account import account
from torchweld.profiles.recording.live_profile import profile
from torchweld.welds.swapping import swap
from torchweld.welds.swapping.faces import Face

Call = Callable[[], Any]
DIGEST_SAMPLES = 64
# For the ceiling of a model that a plan had no time to measure.
CEILING_S = 30.0


@functools.lru_cache(maxsize=1)
def _made(source: Source) -> Target:
    return source.make()


def call_of(model: Callable[..., Any], workload: Workload) -> Call:
    """The call as its users write it."""
    if type(workload.inputs) is not Inputs:
        return lambda: workload.run(model)  # type: ignore[arg-type]
    args, kwargs = workload.inputs.args, workload.inputs.kwargs
    if len(args) == 1 and not kwargs:
        x = args[0]
        return lambda: model(x)
    return lambda: model(*args, **kwargs)


def digest(model: nn.Module) -> str:
    """The same for models with the same weights, by a sample of each."""
    found = hashlib.sha256()
    for name, parameter in model.named_parameters():
        flat = parameter.detach().flatten()
        sample = flat[:: max(1, flat.numel() // DIGEST_SAMPLES)].double().numpy()
        found.update(name.encode() + sample.tobytes())
    return found.hexdigest()


class EagerModel:
    countable = True

    def load(self, source: Source) -> None:
        self.source = source
        self.made = _made(source)
        self.model, self.workloads = self.made.model, self.made.workloads
        self.face = Face(list(self.model.modules()))

    def prepare(self, number: int = 0) -> Call:
        self.workload = self.workloads[number]
        return call_of(self.model, self.workload)

    def show(self) -> None:
        self.face.show()

    def details(self) -> dict[str, Any]:
        return {}

    def about(self) -> dict[str, Any]:
        return {
            "workloads": [workload.name for workload in self.workloads],
            "notes": list(self.made.notes),
            "weights": digest(self.model),
        }

    def check(self) -> None:
        check_repeatable(self.model, self.workloads, training=False)

    def host(self) -> tuple[float, float] | NotMeasured:
        """By a profile: ops that are started, and Python, dispatcher and views between them.

        In µs, and as a share of the profiled step.
        """
        given = self.workload.inputs if self.workload.inputs is not None else self.workload.run
        step = account(profile(self.model, [given])).step
        if isinstance(step, NotMeasured):
            return step
        host_us = step.launch_us + step.host_us
        return host_us, host_us / step.total_us if step.total_us > 0 else 1.0

    def work(self) -> dict[str, Any]:
        """FLOPs of a call, by torch's own count, and bytes of weights, inputs and outputs."""
        self.show()
        with FlopCounterMode(display=False) as counter:
            output = self.workload.run(self.model)
        weights = {id(p): p.nbytes for p in self.model.parameters()}
        ends = [*self.workload.tensors(), *tensors_in(output)]
        dtypes = Counter(str(p.dtype).removeprefix("torch.") for p in self.model.parameters())
        return {
            "flops": counter.get_total_flops(),
            "weight_bytes": sum(weights.values()),
            "moved_bytes": sum(weights.values()) + sum(t.nbytes for t in ends),
            "dtype": dtypes.most_common(1)[0][0] if dtypes else "float32",
        }

    def truth(self) -> dict[str, Any]:
        """What `Truth` has, as arrays: the outputs without rounding, and with other rounding."""
        found = truth_of(self.model, self.workload, False)
        eager = results(self.model, self.workload, False)
        return {
            "dtypes": {n: str(t.dtype).removeprefix("torch.") for n, t in eager.items()},
            "exact": None if found.exact is None else _arrays(found.exact),
            "jittered": [_arrays(one) for one in found.jittered],
            "why_not_exact": found.why_not_exact,
            "depth": depth_of(self.model),
        }


def _arrays(results: dict[str, Tensor]) -> dict[str, Any]:
    wide = (torch.float32, torch.float64)
    return {n: (t if t.dtype in wide else t.float()).numpy() for n, t in results.items()}


class TorchweldModel(EagerModel):
    """`tw.plan` and `tw.apply`, or a plan from a file; making one takes a minute or less."""

    def load(self, source: Source) -> None:
        super().load(source)
        self.original = self.face
        if source.plan is not None:
            self.plan = Plan.load(source.plan)
        else:
            self.plan = plan(
                self.model,
                list(self.workloads),
                budget_s=source.tuning_s,
                remember=source.remember,
            )
        with untold():  # `details` has the blocks that run their original code
            apply(self.model, self.plan)
        self.face = Face(list(self.model.modules()))
        self.original.show()

    def details(self) -> dict[str, Any]:
        whole = self.plan.whole[0] if self.plan.whole else None
        limit = whole.ceiling if whole else UNASKED
        if whole and isinstance(limit, NotMeasured):  # its steps are too long for a plan
            self.original.show()
            run = step_of(self.model, self.workloads[0], training=False)
            limit = ceiling(self.model, self.plan.decisions, run, CEILING_S).limit
        self.show()
        stats = swap.stats(self.model)
        return {
            "kernel": f"{len(self.plan.decisions)} welded",
            "sentence": self.plan.sentence(),
            "ceiling": to_plain(limit),
            "predicted": to_plain(whole.predicted if whole else UNASKED),
            "promised": to_plain(whole.promised if whole else UNASKED),
            "error": to_plain(whole.error_ratio if whole else UNASKED),
            "copied_bytes": self.plan.copied_bytes,
            "welded": len(self.plan.decisions),
            "ran_the_original": [path for path, one in stats.items() if one.originals],
        }


class ForeignModel(EagerModel):
    """What runs outside of PyTorch's dispatcher: neither counted nor profiled."""

    countable = False


class CompiledModel(ForeignModel):
    def prepare(self, number: int = 0) -> Call:
        torch._dynamo.reset()
        self.workload = self.workloads[number]
        return call_of(torch.compile(self.model, dynamic=False), self.workload)


class CompiledWelded(TorchweldModel):
    """`torch.compile(tw.fuse(model, inputs))`: the welded op in a compiled graph."""

    countable = False

    def prepare(self, number: int = 0) -> Call:
        torch._dynamo.reset()
        self.show()
        self.workload = self.workloads[number]
        return call_of(torch.compile(self.model, dynamic=False), self.workload)


# ---- through ONNX ----


def onnx_file(model: nn.Module, inputs: Inputs, folder: Path) -> Path:
    """The model as ONNX for these shapes; what is there already is kept."""
    path = folder / "model.onnx"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        fresh = folder / "fresh.onnx"
        torch.onnx.export(
            model,
            inputs.args,
            str(fresh),
            kwargs=inputs.kwargs or None,
            dynamo=True,
            external_data=True,
            verbose=False,
        )
        fresh.rename(path)
    return path


def fed(names: list[str], inputs: Inputs) -> dict[str, Any]:
    """Each input of a graph with its array: by name where names agree, else in order."""
    by_name = {n: t for n, t in inputs.kwargs.items() if isinstance(t, Tensor)}
    tensors = [by_name[n] for n in names] if set(names) <= set(by_name) else inputs.tensors()
    if len(tensors) != len(names):
        raise TorchweldError(
            f"its ONNX graph has the inputs {', '.join(names)}, the call {len(tensors)} tensors"
        )
    arrays = [np.ascontiguousarray(tensor.numpy()) for tensor in tensors]
    return dict(zip(names, arrays, strict=True))


class OnnxRuntimeModel(ForeignModel):
    def __init__(self) -> None:
        self.runtime: Any = import_module("onnxruntime")

    def _exported(self, number: int) -> tuple[Path, Inputs]:
        self.workload = self.workloads[number]
        inputs = self.workload.inputs
        if inputs is None:
            raise TorchweldError("a callable cannot be exported to ONNX; give the inputs")
        folder = self.source.kept_folder
        if folder is None:
            self.temporary = tempfile.TemporaryDirectory(prefix="torchweld-onnx-")
            folder = Path(self.temporary.name)
        return onnx_file(self.model, inputs, folder / str(number) if number else folder), inputs

    def prepare(self, number: int = 0) -> Call:
        path, inputs = self._exported(number)
        options = self.runtime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.log_severity_level = 3
        session = self.runtime.InferenceSession(
            str(path), options, providers=["CPUExecutionProvider"]
        )
        feed = fed([one.name for one in session.get_inputs()], inputs)
        return lambda: session.run(None, feed)


class OpenVinoModel(OnnxRuntimeModel):
    def __init__(self) -> None:
        self.core: Any = import_module("openvino").Core()

    def prepare(self, number: int = 0) -> Call:
        path, inputs = self._exported(number)
        settings = {
            "INFERENCE_NUM_THREADS": torch.get_num_threads(),
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_PRECISION_HINT": "f32",
        }
        compiled = self.core.compile_model(self.core.read_model(str(path)), "CPU", settings)
        feed = fed([one.get_any_name() for one in compiled.inputs], inputs)
        given = next(iter(feed.values())) if len(feed) == 1 else feed
        if len(compiled.outputs) == 1:
            return lambda: compiled(given)[0]
        numbers = range(len(compiled.outputs))

        def call() -> list[Any]:
            found = compiled(given)
            return [found[i] for i in numbers]

        return call


RUNTIMES: dict[str, Callable[[], EagerModel]] = {
    "eager": EagerModel,
    "compile": CompiledModel,
    "compile-welded": CompiledWelded,
    "onnxruntime": OnnxRuntimeModel,
    "openvino": OpenVinoModel,
    "torchweld": TorchweldModel,
}
