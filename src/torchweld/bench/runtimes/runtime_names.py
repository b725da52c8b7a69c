"""The one table of runtimes by name; which of them blocks and whole models are measured with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from torchweld.bench.runtimes.liger_runtime import LigerRuntime
from torchweld.bench.runtimes.onnx_runtime import OnnxRuntime
from torchweld.bench.runtimes.openvino_runtime import OpenVinoRuntime
from torchweld.bench.runtimes.runtime import Runtime
from torchweld.bench.runtimes.torch_runtimes import CompiledRuntime, EagerRuntime, MkldnnRuntime
from torchweld.bench.runtimes.torchweld_runtimes import (
    BackendRuntime,
    CompiledWeldedRuntime,
    FusedMlpRuntime,
    PlannedRuntime,
    WeldedBlockRuntime,
)
from torchweld.bench.speed_tables import WAYS
from torchweld.ops.backends import BACKENDS, Backend, BackendMode

Runtimes = Mapping[str, Callable[[], Runtime]]

BLOCK_PEERS = ("eager", "mkldnn", "compile", "compile-max", "onnxruntime", "openvino")
# The same if a GPU runs the blocks.
GPU_PEERS = ("eager", "compile", "compile-max", "liger")
MODEL_PEERS = ("eager", "compile", "compile-welded", "onnxruntime", "openvino")
OWN_MODEL = "torchweld"
# Modes that recompute are left out: what is kept for a backward does not change a forward.
MODES = tuple((b, mode) for b in BACKENDS for mode in b.abilities.modes if not mode.recomputes)
OWN = tuple(f"{backend.name}:{mode.name}" for backend, mode in MODES)


def _own(backend: Backend, mode: BackendMode | None) -> Callable[[], Runtime]:
    if backend.abilities.c_forward:  # as users get it: through the module
        return partial(FusedMlpRuntime, packing=mode is None or mode.packs)
    return partial(BackendRuntime, backend.name, None if mode is None else mode.name)


# Our backends have their names, with a mode after a colon if it is not the first: "torch:mkldnn".
RUNTIMES: Runtimes = {
    **{backend.name: _own(backend, None) for backend in BACKENDS},
    **{f"{backend.name}:{mode.name}": _own(backend, mode) for backend, mode in MODES},
    "eager": EagerRuntime,
    "mkldnn": MkldnnRuntime,
    "compile": CompiledRuntime,  # our backend of this name is compile:inductor
    # The weights are constants, and the fastest of several products is chosen.
    "compile-max": partial(CompiledRuntime, freezing=True, max_autotune=True),
    "compile-welded": CompiledWeldedRuntime,
    "liger": LigerRuntime,
    "onnxruntime": OnnxRuntime,
    "openvino": OpenVinoRuntime,
    OWN_MODEL: PlannedRuntime,
}

# In speed tables, a backend's name stands for the block welded to this backend.
TABLE_RUNTIMES: Runtimes = {
    "eager": EagerRuntime,
    **{name: partial(WeldedBlockRuntime, packed=way == "packed") for name, way in WAYS.items()},
}


# In training, our names say what is kept for the backward. For a whole model its plan decides.
TRAINED = {OWN_MODEL: False, f"{OWN_MODEL}:recompute": True, f"{OWN_MODEL}:auto": None}
TRAINING_RUNTIMES: Runtimes = {
    **{name: RUNTIMES[name] for name in BLOCK_PEERS},
    **{name: partial(FusedMlpRuntime, recompute=keeps) for name, keeps in TRAINED.items()},
}
TRAINING_PEERS = tuple(name for name in BLOCK_PEERS if RUNTIMES[name]().trains)


def is_apart(name: str) -> bool:
    """Whether it needs a process of its own."""
    return RUNTIMES[name]().apart
