"""Sources of whole models: small records that make the same model in any process."""

from __future__ import annotations

import os
import random
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from torchweld.core.model_inputs import Inputs, Workload, as_workloads
from torchweld.models import MODELS
from torchweld.models.targets import Target, resolve


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """A whole model; `make` gives the same one in any process.

    plan:     a file with the plan to apply; None: one is made
    tuning_s: how long that may take, about; None: a plan's default
    remember: times of earlier plans may be used for it
    training: the model is made, planned and welded for training
    """

    plan: str | None = None
    tuning_s: float | None = None
    remember: bool = True
    training: bool = False

    def make(self) -> Target:
        raise NotImplementedError

    def workload(self, made: Target, number: int = 0) -> Workload:
        return made.workloads[number]

    @property
    def onnx_folder(self) -> Path | None:
        """The folder that keeps the exported model for later use; None: it is not kept."""
        return None


@dataclass(frozen=True, kw_only=True)
class TargetSource(ModelSource):
    """A TARGET and its `--input`s. Random numbers are seeded before its code runs."""

    target: str | None
    inputs: tuple[str, ...] = ()
    seed: int = 0
    kept_folder: Path | None = None

    def make(self) -> Target:
        random.seed(self.seed)
        np.random.seed(self.seed)
        torch.manual_seed(self.seed)
        return resolve(self.target, self.inputs, training=self.training, seed=self.seed)

    @property
    def onnx_folder(self) -> Path | None:
        return self.kept_folder


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


@dataclass(frozen=True, kw_only=True)
class SizedSource(ModelSource):
    """A built-in model, or one of transformers without a cache, on `batch` × `tokens` tokens."""

    target: str
    dtype: str
    batch: int
    tokens: int
    tuning_s: float | None = 60.0  # by default a plan has 48
    remember: bool = False

    @property
    def onnx_folder(self) -> Path:
        """Exporting takes a minute, and the model never changes."""
        name = f"{self.target.replace(':', '_')}-{self.batch}x{self.tokens}"
        return Path(tempfile.gettempdir()) / f"torchweld-onnx-{os.getuid()}" / name

    def make(self) -> Target:
        generator = torch.Generator().manual_seed(0)
        shape = (self.batch, self.tokens)
        if self.target.startswith("hf:"):
            from torchweld.models import transformers_models

            model = transformers_models.build(self.target.removeprefix("hf:")).model
            x = torch.randint(0, 1000, shape, generator=generator)
        else:
            model = MODELS[self.target].build()[0]
            x = torch.randn(shape, generator=generator)
        made = OneOutput(model.to(getattr(torch, self.dtype)), self.target.startswith("hf:"))
        workloads = tuple(as_workloads(Inputs(x)))
        return Target(name=self.target, model=made.eval(), workloads=workloads)
