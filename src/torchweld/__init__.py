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
    from torchweld.discovery.finding import find
    from torchweld.errors import TorchweldError
    from torchweld.expecting import ExpectationError, expect
    from torchweld.functional import linears, mlp
    from torchweld.inputs import Inputs, record
    from torchweld.measuring import Comparison, compare
    from torchweld.modules import FusedMLP
    from torchweld.not_measured import NotMeasured
    from torchweld.packing import packed_bytes, repack
    from torchweld.planning.plan import Plan
    from torchweld.planning.planner import apply, fuse, plan, plan_of
    from torchweld.profiler.account import Account, account
    from torchweld.profiler.live import profile
    from torchweld.profiler.loop import profiling
    from torchweld.profiler.profile import Profile
    from torchweld.profiler.trace import read_trace
    from torchweld.swap import check_calls, disabled, stats, undo
    from torchweld.verifying import Check, verify
    from torchweld.welding.telling import OriginalCodeWarning

__version__ = "0.1.0"

_WHERE = {
    "Account": "profiler.account",
    "Check": "verifying",
    "Comparison": "measuring",
    "Diff": "diffing",
    "ExpectationError": "expecting",
    "Finding": "diagnosis",
    "FusedMLP": "modules",
    "Inputs": "inputs",
    "Layer": "blocks",
    "NotMeasured": "not_measured",
    "OriginalCodeWarning": "welding.telling",
    "Plan": "planning.plan",
    "Profile": "profiler.profile",
    "TorchweldError": "errors",
    "account": "profiler.account",
    "apply": "planning.planner",
    "check_calls": "swap",
    "compare": "measuring",
    "diagnose": "diagnosis",
    "diff": "diffing",
    "disabled": "swap",
    "expect": "expecting",
    "find": "discovery.finding",
    "fuse": "planning.planner",
    "linears": "functional",
    "mlp": "functional",
    "packed_bytes": "packing",
    "plan": "planning.planner",
    "plan_of": "planning.planner",
    "profile": "profiler.live",
    "profiling": "profiler.loop",
    "read_trace": "profiler.trace",
    "record": "inputs",
    "repack": "packing",
    "stats": "swap",
    "undo": "swap",
    "verify": "verifying",
}
__all__ = [
    "Account",
    "Check",
    "Comparison",
    "Diff",
    "ExpectationError",
    "Finding",
    "FusedMLP",
    "Inputs",
    "Layer",
    "NotMeasured",
    "OriginalCodeWarning",
    "Plan",
    "Profile",
    "TorchweldError",
    "account",
    "apply",
    "check_calls",
    "compare",
    "diagnose",
    "diff",
    "disabled",
    "expect",
    "find",
    "fuse",
    "linears",
    "mlp",
    "packed_bytes",
    "plan",
    "plan_of",
    "profile",
    "profiling",
    "read_trace",
    "record",
    "repack",
    "stats",
    "undo",
    "verify",
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
