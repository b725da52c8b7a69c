"""The built-in models, made small enough that a test can profile several."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from torchweld.core.model_inputs import Inputs
from torchweld.models import MODELS

# Fields of their configurations; a policy is small as it is.
_TEXT = {"layers": 3, "width": 48, "heads": 4, "vocab": 128, "tokens": 8}
SMALLER: Mapping[str, Mapping[str, Any]] = {
    "gpt": _TEXT,
    "llama": {**_TEXT, "hidden": 96, "kv_heads": 2},
    "bert": {**_TEXT, "hidden": 96},
    "vit": {"layers": 3, "width": 48, "heads": 3, "size": 48},
    "mixer": {"layers": 3, "width": 48, "size": 48, "token_hidden": 24, "channel_hidden": 96},
    "dlrm": {"tables": 6, "batch": 16},
    "policy": {},
}


def small_model(name: str) -> tuple[nn.Module, Inputs]:
    builtin = MODELS[name]
    return builtin.build(config=replace(builtin.config, **SMALLER[name]))
