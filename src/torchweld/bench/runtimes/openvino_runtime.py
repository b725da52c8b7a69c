"""OpenVINO: `compiled(x)`, compiled for the shapes of a call, latency mode, fp32 kept fp32."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from torchweld.bench.runtimes.onnx_exports import OnnxReadingRuntime
from torchweld.bench.runtimes.runtime import Call


class OpenVinoRuntime(OnnxReadingRuntime):
    """OpenVINO. It reads the first form of a graph."""

    needs = ("openvino", "onnx")

    def start(self) -> None:
        self.core: Any = import_module("openvino").Core()

    def call_exported(self) -> Call:
        model = self.core.read_model(next(iter(self.graphs.values())))
        feed = self.fed([one.get_any_name() for one in model.inputs])
        if model.is_dynamic():
            model.reshape({name: list(array.shape) for name, array in feed.items()})
        settings = {
            "INFERENCE_NUM_THREADS": torch.get_num_threads(),
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_PRECISION_HINT": "f32",
        }
        compiled = self.core.compile_model(model, "CPU", settings)
        given = next(iter(feed.values())) if len(feed) == 1 else feed
        if len(compiled.outputs) == 1:
            return lambda: compiled(given)[0]
        numbers = range(len(compiled.outputs))

        def call() -> list[Any]:
            found = compiled(given)
            return [found[i] for i in numbers]

        return call
