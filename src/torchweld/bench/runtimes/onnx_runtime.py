"""ONNX Runtime: `session.run`, with default options but the number of threads."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from torchweld.bench.runtimes.onnx_exports import OnnxReadingRuntime
from torchweld.bench.runtimes.runtime import Call, Source
from torchweld.timing import CallableSide

TURN_S = 200e-6


class OnnxRuntime(OnnxReadingRuntime):
    """ONNX Runtime. It takes the form of a graph that is the fastest here."""

    needs = ("onnxruntime", "onnx")

    def start(self) -> None:
        self.library: Any = import_module("onnxruntime")

    def load(self, source: Source) -> None:
        super().load(source)
        self.sessions: dict[bytes | str, Any] = {}  # of a block, one serves any number of rows

    def call_exported(self) -> Call:
        calls = {form: self._call(graph) for form, graph in self.graphs.items()}
        self.form = fastest(calls) if len(calls) > 1 else next(iter(calls))
        return calls[self.form]

    def _call(self, graph: bytes | str) -> Call:
        if graph not in self.sessions:
            options = self.library.SessionOptions()
            options.intra_op_num_threads = torch.get_num_threads()
            options.log_severity_level = 3
            self.sessions[graph] = self.library.InferenceSession(
                graph, options, providers=["CPUExecutionProvider"]
            )
        session = self.sessions[graph]
        feed = self.fed([one.name for one in session.get_inputs()])
        return lambda: session.run(None, feed)

    def details(self) -> dict[str, Any]:
        return {"form": self.form}


def fastest(calls: dict[str, Call], rounds: int = 7) -> str:
    """The one with the best time of several turns; a turn is a call, or `TURN_S` of them."""
    sides = {name: CallableSide(call) for name, call in calls.items()}
    once_s = {name: min(side.time(1) for _ in range(3)) for name, side in sides.items()}
    best_s = dict.fromkeys(calls, float("inf"))
    for _ in range(rounds):
        for name, side in sides.items():
            number = max(1, round(TURN_S / once_s[name]))
            best_s[name] = min(best_s[name], side.time(number) / number)
    return min(best_s, key=best_s.__getitem__)
