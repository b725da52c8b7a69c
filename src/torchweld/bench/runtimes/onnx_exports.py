"""What runtimes outside of PyTorch read: a block or a model as ONNX, and the arrays to feed.

A block is written directly, in two forms. A model is exported by torch for the shapes of a call.
"""

from __future__ import annotations

import tempfile
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchweld.bench.eager_block import BlockSource
from torchweld.bench.model_sources import ModelSource
from torchweld.bench.runtimes.onnx_graphs import onnx_model
from torchweld.bench.runtimes.runtime import Call, Runtime, Source
from torchweld.core.errors import TorchweldError
from torchweld.core.model_inputs import Inputs


class OnnxReadingRuntime(Runtime):
    """What ONNX Runtime and OpenVINO share. `graphs`: one computation in several forms."""

    apart = True
    countable = False
    exports = ("onnxscript",)
    dtypes = ("float32",)

    def load(self, source: Source) -> None:
        super().load(source)
        self.graphs: dict[str, bytes | str] = {}
        if isinstance(source, BlockSource):
            for name in ("Gemm", "MatMul"):
                self.graphs[name] = onnx_model(source.mlp, name == "Gemm", source.seed)

    def prepare(self, *where: int) -> Call:
        self.workload = self.source.workload(self.made, *where)
        if self.workload.inputs is None:
            raise TorchweldError("a callable cannot be exported to ONNX; give the inputs")
        self.inputs = self.workload.inputs
        if isinstance(self.source, ModelSource):
            self.graphs = {"": str(self._exported(self.source.onnx_folder, *where))}
        else:
            (x,) = self.inputs.tensors()
            self.inputs = Inputs(x.view(prod(where), -1))
        return self.call_exported()

    def call_exported(self) -> Call:
        raise NotImplementedError

    def _exported(self, folder: Path | None, number: int = 0) -> Path:
        """The model for these shapes; a file that is there already is kept."""
        if folder is None:
            self.temporary = tempfile.TemporaryDirectory(prefix="torchweld-onnx-")
            folder = Path(self.temporary.name)
        folder = folder / str(number) if number else folder
        path = folder / "model.onnx"
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            fresh = folder / "fresh.onnx"
            torch.onnx.export(
                self.model,
                self.inputs.args,
                str(fresh),
                kwargs=self.inputs.kwargs or None,
                dynamo=True,
                external_data=True,
                verbose=False,
            )
            fresh.rename(path)
        return path

    def fed(self, names: list[str]) -> dict[str, Any]:
        """Each input of a graph with its array: by name where names agree, else in order."""
        by_name = {n: t for n, t in self.inputs.kwargs.items() if isinstance(t, Tensor)}
        known = set(names) <= set(by_name)
        tensors = [by_name[n] for n in names] if known else self.inputs.tensors()
        if len(tensors) != len(names):
            raise TorchweldError(
                f"its ONNX graph has the inputs {', '.join(names)}, the call {len(tensors)} tensors"
            )
        arrays = [np.ascontiguousarray(tensor.numpy()) for tensor in tensors]
        return dict(zip(names, arrays, strict=True))
