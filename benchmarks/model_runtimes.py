"""The runtimes for whole models: each builds the same model from the same seed.

`load(target, dtype)` builds it, `prepare(batch, tokens)` gets it ready for a shape and returns a
callable without arguments whose result is the output. All run without a cache of keys and values.
"""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from torchweld.inputs import Inputs, as_workloads
from torchweld.verifying import truth_of

Call = Callable[[], Any]
TUNING_S = 30.0


class OneOutput(nn.Module):
    """The model as a function of its tokens or its input, with one output."""

    def __init__(self, model: nn.Module, tokens: bool) -> None:
        super().__init__()
        self.model, self.tokens = model, tokens

    def forward(self, x: Tensor) -> Tensor:
        if not self.tokens:
            y: Tensor = self.model(x)
            return y
        options = {} if "Bert" in type(self.model).__name__ else {"use_cache": False}
        found: Tensor = self.model(x, return_dict=False, **options)[0]
        return found


def build(target: str, dtype: str) -> OneOutput:
    from torchweld.models import MODELS, hf

    if target.startswith("hf:"):
        model = hf.build(target.removeprefix("hf:")).model
    else:
        model = MODELS[target].build()[0]
    return OneOutput(model.to(getattr(torch, dtype)), target.startswith("hf:")).eval()


def input_of(model: OneOutput, batch: int, tokens: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    if model.tokens:
        return torch.randint(0, 1000, (batch, tokens), generator=generator)
    return torch.randn(batch, tokens, generator=generator)


class Eager:
    def load(self, target: str, dtype: str) -> None:
        self.model = build(target, dtype)

    def prepare(self, batch: int, tokens: int) -> Call:
        self.x = input_of(self.model, batch, tokens)
        return lambda: self.model(self.x)

    def details(self) -> dict[str, Any]:
        """The output without rounding, to judge everybody's by."""
        truth = truth_of(self.model, as_workloads(Inputs(self.x))[0], False)
        exact = truth.exact
        return {"exact": None if exact is None else exact["output 0"].numpy()}


class Torchweld(Eager):
    """`tw.plan` and `tw.apply`, with the minute or less that a plan takes."""

    def prepare(self, batch: int, tokens: int) -> Call:
        import torchweld as tw

        call = super().prepare(batch, tokens)
        tw.undo(self.model)
        self.plan = tw.plan(self.model, self.x, budget_s=TUNING_S, remember=False)
        tw.apply(self.model, self.plan)
        return call

    def details(self) -> dict[str, Any]:
        from torchweld import swap

        whole = self.plan.whole[0] if self.plan.whole else None
        originals = [p for p, s in swap.stats(self.model).items() if s.originals]
        return {
            "sentence": str(self.plan).splitlines()[-1],
            "ceiling": whole.ceiling if whole else 0.0,
            "predicted": whole.predicted if whole else 0.0,
            "promised": whole.promised if whole else 0.0,
            "error": whole.error_ratio if whole else 0.0,
            "copied_bytes": self.plan.copied_bytes,
            "welded": len(self.plan.decisions),
            "ran_the_original": originals,
        }


class Compiled(Eager):
    def prepare(self, batch: int, tokens: int) -> Call:
        torch._dynamo.reset()
        self.x = input_of(self.model, batch, tokens)
        function = torch.compile(self.model, dynamic=False)
        return lambda: function(self.x)

    def details(self) -> dict[str, Any]:
        return {}


def onnx_file(model: OneOutput, x: Tensor, target: str) -> Path:
    """The model as ONNX for this shape; kept, since exporting takes a minute."""
    name = f"{target.replace(':', '_')}-{'x'.join(map(str, x.shape))}"
    folder = Path(tempfile.gettempdir()) / f"torchweld-onnx-{os.getuid()}" / name
    path = folder / "model.onnx"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        fresh = folder / "fresh.onnx"
        torch.onnx.export(model, (x,), str(fresh), dynamo=True, external_data=True, verbose=False)
        fresh.rename(path)
    return path


class OnnxRuntime(Eager):
    def load(self, target: str, dtype: str) -> None:
        super().load(target, dtype)
        self.target = target

    def prepare(self, batch: int, tokens: int) -> Call:
        import onnxruntime

        x = input_of(self.model, batch, tokens)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.log_severity_level = 3
        session = onnxruntime.InferenceSession(
            str(onnx_file(self.model, x, self.target)),
            options,
            providers=["CPUExecutionProvider"],
        )
        feed = {session.get_inputs()[0].name: x.numpy()}
        return lambda: session.run(None, feed)[0]

    def details(self) -> dict[str, Any]:
        return {}


class OpenVino(OnnxRuntime):
    def prepare(self, batch: int, tokens: int) -> Call:
        import openvino

        x = input_of(self.model, batch, tokens)
        core = openvino.Core()
        settings = {
            "INFERENCE_NUM_THREADS": torch.get_num_threads(),
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_PRECISION_HINT": "f32",
        }
        path = onnx_file(self.model, x, self.target)
        compiled = core.compile_model(core.read_model(str(path)), "CPU", settings)
        given = np.ascontiguousarray(x.numpy())
        return lambda: compiled(given)[0]


RUNTIMES: dict[str, Callable[[], Eager]] = {
    "eager": Eager,
    "compile": Compiled,
    "onnxruntime": OnnxRuntime,
    "openvino": OpenVino,
    "torchweld": Torchweld,
}
