"""torchweld: fused Linears and MLPs for PyTorch, measured and verified.

Importing it registers `torch.ops.torchweld` and imports nothing heavy but torch; public names are
loaded when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from torchweld import ops as _ops  # registers torch.ops.torchweld

if TYPE_CHECKING:
    from torchweld.blocks import Layer
    from torchweld.diagnosis import Finding, diagnose
    from torchweld.diffing import Diff, diff
    from torchweld.errors import TorchweldError
    from torchweld.expecting import ExpectationError, expect
    from torchweld.functional import linears, mlp
    from torchweld.inputs import Inputs, record
    from torchweld.measuring import Comparison, compare
    from torchweld.modules import FusedMLP
    from torchweld.packing import packed_bytes, repack
    from torchweld.profiler.account import Account, account
    from torchweld.profiler.live import profile
    from torchweld.profiler.loop import profiling
    from torchweld.profiler.profile import Profile
    from torchweld.profiler.trace import read_trace

__version__ = "0.1.0"

_WHERE = {
    "Account": "profiler.account",
    "Comparison": "measuring",
    "Diff": "diffing",
    "ExpectationError": "expecting",
    "Finding": "diagnosis",
    "FusedMLP": "modules",
    "Inputs": "inputs",
    "Layer": "blocks",
    "Profile": "profiler.profile",
    "TorchweldError": "errors",
    "account": "profiler.account",
    "compare": "measuring",
    "diagnose": "diagnosis",
    "diff": "diffing",
    "expect": "expecting",
    "linears": "functional",
    "mlp": "functional",
    "packed_bytes": "packing",
    "profile": "profiler.live",
    "profiling": "profiler.loop",
    "read_trace": "profiler.trace",
    "record": "inputs",
    "repack": "packing",
}
__all__ = [
    "Account",
    "Comparison",
    "Diff",
    "ExpectationError",
    "Finding",
    "FusedMLP",
    "Inputs",
    "Layer",
    "Profile",
    "TorchweldError",
    "account",
    "compare",
    "diagnose",
    "diff",
    "expect",
    "linears",
    "mlp",
    "packed_bytes",
    "profile",
    "profiling",
    "read_trace",
    "record",
    "repack",
]
assert _ops


def __getattr__(name: str) -> Any:
    where = _WHERE.get(name)
    if where is None:
        raise AttributeError(f"module 'torchweld' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"torchweld.{where}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
