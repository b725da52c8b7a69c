"""torchweld: fused Linears and MLPs for PyTorch, measured and verified.

Importing it registers `torch.ops.torchweld` and imports nothing heavy but torch; public names are
loaded when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from torchweld import ops as _ops  # registers torch.ops.torchweld
from torchweld.core import earlier_names as _earlier_names

if TYPE_CHECKING:
    from torchweld.core.blocks import Layer
    from torchweld.core.errors import TorchweldError
    from torchweld.core.inputs import Inputs, record
    from torchweld.core.not_measured import NotMeasured
    from torchweld.findings import Finding, diagnose
    from torchweld.numerics.model_check import Check, verify
    from torchweld.ops.functional import linears, mlp
    from torchweld.ops.fused_mlp import FusedMLP
    from torchweld.ops.packing import packed_bytes, repack
    from torchweld.plans.plan import Plan
    from torchweld.plans.planner import apply, fuse, plan, plan_of
    from torchweld.profiles.accounting.account import Account, account
    from torchweld.profiles.accounting.profile_diff import Diff, diff
    from torchweld.profiles.expecting.expectation import ExpectationError, expect
    from torchweld.profiles.profile import Profile
    from torchweld.profiles.recording.live_profile import profile
    from torchweld.profiles.recording.loop_profile import profiling
    from torchweld.profiles.recording.trace_profile import read_trace
    from torchweld.timing import Comparison, compare
    from torchweld.welds.finding.find import find
    from torchweld.welds.swapping.original_code import OriginalCodeWarning
    from torchweld.welds.swapping.swap import check_calls, disabled, stats, undo

__version__ = "0.1.0"

_WHERE = {
    "Account": "profiles.accounting.account",
    "Check": "numerics.model_check",
    "Comparison": "timing",
    "Diff": "profiles.accounting.profile_diff",
    "ExpectationError": "profiles.expecting.expectation",
    "Finding": "findings",
    "FusedMLP": "ops.fused_mlp",
    "Inputs": "core.inputs",
    "Layer": "core.blocks",
    "NotMeasured": "core.not_measured",
    "OriginalCodeWarning": "welds.swapping.original_code",
    "Plan": "plans.plan",
    "Profile": "profiles.profile",
    "TorchweldError": "core.errors",
    "account": "profiles.accounting.account",
    "apply": "plans.planner",
    "check_calls": "welds.swapping.swap",
    "compare": "timing",
    "diagnose": "findings",
    "diff": "profiles.accounting.profile_diff",
    "disabled": "welds.swapping.swap",
    "expect": "profiles.expecting.expectation",
    "find": "welds.finding.find",
    "fuse": "plans.planner",
    "linears": "ops.functional",
    "mlp": "ops.functional",
    "packed_bytes": "ops.packing",
    "plan": "plans.planner",
    "plan_of": "plans.planner",
    "profile": "profiles.recording.live_profile",
    "profiling": "profiles.recording.loop_profile",
    "read_trace": "profiles.recording.trace_profile",
    "record": "core.inputs",
    "repack": "ops.packing",
    "stats": "welds.swapping.swap",
    "undo": "welds.swapping.swap",
    "verify": "numerics.model_check",
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
_earlier_names.install()


def __getattr__(name: str) -> Any:
    where = _WHERE.get(name)
    if where is None:
        raise AttributeError(f"module 'torchweld' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"torchweld.{where}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
