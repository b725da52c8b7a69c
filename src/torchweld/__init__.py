"""torchweld: fused Linears and MLPs for PyTorch, measured and verified.

Importing it registers `torch.ops.torchweld` and imports nothing heavy but torch; public names are
loaded when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from torchweld import ops as _ops  # registers torch.ops.torchweld
from torchweld.core import earlier_names as _earlier_names

__version__ = "0.1.0"

# Module -> its public names. They stand once more below; a test holds the two together.
_WHERE = {
    "core.blocks": ("Layer",),
    "core.errors": ("TorchweldError",),
    "core.model_inputs": ("Inputs", "record"),
    "core.not_measured": ("NotMeasured",),
    "findings": ("Finding", "diagnose"),
    "numerics.model_check": ("Check", "verify"),
    "ops.functional": ("linears", "mlp"),
    "ops.fused_mlp": ("FusedMLP",),
    "ops.gradient_memory": (
        "GradientMemory",
        "gradient_memory",
        "limit_gradient_memory",
        "release_gradient_memory",
    ),
    "ops.packing": ("packed_bytes", "repack"),
    "plans.plan": ("Plan",),
    "plans.planner": ("apply", "fuse", "plan", "plan_of"),
    "profiles.accounting.time_account": ("Account", "account"),
    "profiles.expecting.expectation": ("ExpectationError", "expect"),
    "profiles.profile": ("Profile",),
    "profiles.accounting.profile_diff": ("Diff", "diff"),
    "profiles.recording.live_profile": ("profile",),
    "profiles.recording.loop_profile": ("profiling",),
    "profiles.recording.trace_profile": ("read_trace",),
    "timing": ("Comparison", "compare"),
    "welds.weld_decisions": ("Choice", "Decision"),
    "welds.finding.find": ("find",),
    "welds.swapping.original_code": ("OriginalCodeWarning",),
    "welds.swapping.swap": ("check_calls", "disabled", "stats", "undo", "weld", "welded_paths"),
}
_MODULE_OF = {name: module for module, names in _WHERE.items() for name in names}

if TYPE_CHECKING:
    from torchweld.core.blocks import Layer as Layer
    from torchweld.core.errors import TorchweldError as TorchweldError
    from torchweld.core.model_inputs import Inputs as Inputs
    from torchweld.core.model_inputs import record as record
    from torchweld.core.not_measured import NotMeasured as NotMeasured
    from torchweld.findings import Finding as Finding
    from torchweld.findings import diagnose as diagnose
    from torchweld.numerics.model_check import Check as Check
    from torchweld.numerics.model_check import verify as verify
    from torchweld.ops.functional import linears as linears
    from torchweld.ops.functional import mlp as mlp
    from torchweld.ops.fused_mlp import FusedMLP as FusedMLP
    from torchweld.ops.gradient_memory import GradientMemory as GradientMemory
    from torchweld.ops.gradient_memory import gradient_memory as gradient_memory
    from torchweld.ops.gradient_memory import limit_gradient_memory as limit_gradient_memory
    from torchweld.ops.gradient_memory import release_gradient_memory as release_gradient_memory
    from torchweld.ops.packing import packed_bytes as packed_bytes
    from torchweld.ops.packing import repack as repack
    from torchweld.plans.plan import Plan as Plan
    from torchweld.plans.planner import apply as apply
    from torchweld.plans.planner import fuse as fuse
    from torchweld.plans.planner import plan as plan
    from torchweld.plans.planner import plan_of as plan_of
    from torchweld.profiles.accounting.profile_diff import Diff as Diff
    from torchweld.profiles.accounting.profile_diff import diff as diff
    from torchweld.profiles.accounting.time_account import Account as Account
    from torchweld.profiles.accounting.time_account import account as account
    from torchweld.profiles.expecting.expectation import ExpectationError as ExpectationError
    from torchweld.profiles.expecting.expectation import expect as expect
    from torchweld.profiles.profile import Profile as Profile
    from torchweld.profiles.recording.live_profile import profile as profile
    from torchweld.profiles.recording.loop_profile import profiling as profiling
    from torchweld.profiles.recording.trace_profile import read_trace as read_trace
    from torchweld.timing import Comparison as Comparison
    from torchweld.timing import compare as compare
    from torchweld.welds.finding.find import find as find
    from torchweld.welds.swapping.original_code import OriginalCodeWarning as OriginalCodeWarning
    from torchweld.welds.swapping.swap import check_calls as check_calls
    from torchweld.welds.swapping.swap import disabled as disabled
    from torchweld.welds.swapping.swap import stats as stats
    from torchweld.welds.swapping.swap import undo as undo
    from torchweld.welds.swapping.swap import weld as weld
    from torchweld.welds.swapping.swap import welded_paths as welded_paths
    from torchweld.welds.weld_decisions import Choice as Choice
    from torchweld.welds.weld_decisions import Decision as Decision
else:  # type checkers do not follow what is computed
    __all__ = sorted(_MODULE_OF)

assert _ops
_earlier_names.install()


def __getattr__(name: str) -> Any:
    where = _MODULE_OF.get(name)
    if where is None:
        raise AttributeError(f"module 'torchweld' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"torchweld.{where}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})
