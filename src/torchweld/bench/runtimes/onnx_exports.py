"""What runtimes outside of PyTorch read: a block or a model as ONNX, and the arrays to feed.

A block is written directly, in two forms. A model is exported by torch for the shapes of a call.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from torchweld.bench.eager_block import BlockSource
from torchweld.bench.model_sources import ModelSource
from torchweld.bench.runtimes.onnx_graphs import onnx_model
from torchweld.bench.runtimes.runtime import Call, Runtime, Source
from torchweld.core.errors import TorchweldError
from torchweld.core.inputs import Inputs


@dataclass(frozen=True, kw_only=True)
class OnnxExport:
    """`forms`: the same computation, as bytes or as a file, by what it is called."""

    forms: dict[str, bytes | str]
    inputs: Inputs
    folder: Any = field(default=None, repr=False)  # kept for as long as its files are needed

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


class OnnxReadingRuntime(Runtime):
    """What those that read ONNX share: `exported` for the call that is prepared."""

    apart = True
    countable = False
    exports = ("onnxscript",)
    dtypes = ("float32",)

    def load(self, source: Source) -> None:
        super().load(source)
        self.forms: dict[str, bytes | str] = {}
        if isinstance(source, BlockSource):
            for name in ("Gemm", "MatMul"):
                self.forms[name] = onnx_model(source.mlp, name == "Gemm", source.seed)

    def prepare(self, *where: int) -> Call:
        self.workload = self.source.workload(self.made, *where)
        inputs = self.workload.inputs
        if inputs is None:
            raise TorchweldError("a callable cannot be exported to ONNX; give the inputs")
        if isinstance(self.source, ModelSource):
            exported = exported_model(self.source, self.model, inputs, *where)
        else:
            (x,) = inputs.tensors()
            flat = Inputs(x.view(prod(where), -1))
            exported = OnnxExport(forms=self.forms, inputs=flat)
        self.exported = exported  # it keeps its files
        return self.call_exported(exported)

    def call_exported(self, exported: OnnxExport) -> Call:
        raise NotImplementedError


def exported_model(
    source: ModelSource, model: nn.Module, inputs: Inputs, number: int = 0
) -> OnnxExport:
    """For these shapes; what is there already is kept."""
    temporary = None
    folder = source.onnx_folder
    if folder is None:
        temporary = tempfile.TemporaryDirectory(prefix="torchweld-onnx-")
        folder = Path(temporary.name)
    folder = folder / str(number) if number else folder
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
    return OnnxExport(forms={"": str(path)}, inputs=inputs, folder=temporary)
