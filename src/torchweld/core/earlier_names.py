"""Modules and classes under the names they had in earlier releases.

Users' programs import them, and pickles of welded models and plans name them. An import statement
gets a DeprecationWarning with the new name; loading a pickle gives no warning.
"""

from __future__ import annotations

import dis
import importlib
import importlib.abc
import importlib.machinery
import sys
import types
import warnings
from collections.abc import Sequence
from typing import Any

# Earlier name -> name now, below `torchweld`: names that docs had, that pickles contain, or that
# users' tests are likely to import. To be removed in 0.3.
MODULES = {
    "activations": "core.activations",
    "benching": "bench",
    "benching.cases": "bench.bench_cases",
    "benching.results": "bench.bench_results",
    "blocks": "core.blocks",
    "counting": "profiles.dispatch_counts",
    "decisions": "welds.weld_decisions",
    "diagnosis": "findings",
    "diffing": "profiles.accounting.profile_diff",
    "discovery": "welds.finding",
    "discovery.finding": "welds.finding.find",
    "discovery.found": "welds.found_blocks",
    "discovery.rereading": "welds.finding.block_rereading",
    "errors": "core.errors",
    "expecting": "profiles.expecting.expectation",
    "fingerprints": "machine.fingerprint",
    "functional": "ops.functional",
    "gating": "gates",
    "hardware": "machine.hardware",
    "inputs": "core.model_inputs",
    "kernels": "ops.backends",
    "kernels.base": "ops.backends.backend",
    "known_speeds": "plans.known_speeds",
    "load": "machine.machine_load",
    "measuring": "timing",
    "measuring.comparison": "timing.comparison",
    "modules": "ops.fused_mlp",
    "not_measured": "core.not_measured",
    "packing": "ops.packing",
    "planning": "plans",
    "planning.plan": "plans.plan",
    "planning.planner": "plans.planner",
    "profiler": "profiles",
    "profiler.account": "profiles.accounting.time_account",
    "profiler.profile": "profiles.profile",
    "profiler.splits": "profiles.accounting.time_splits",
    "records": "core.records",
    "speeds": "core.measured_speed",
    "swap": "welds.swapping.swap",
    "targets": "models.targets",
    "verification": "numerics.numerical_rule",
    "verifying": "numerics.model_check",
    "welded": "welds.swapping.welded_class",
    "welding": "welds.swapping",
    "welding.joint": "welds.swapping.joint",
    "welding.structure": "welds.guarding.welded_structure",
    "welding.telling": "welds.swapping.original_code",
}

# Modules that were split: where the rest of their contents is now.
SPLIT = {
    "hardware": (
        *("machine.cpu_identity", "machine.kernel_build", "machine.measured_peaks"),
        *("machine.fingerprint", "core.files"),
    ),
    "records": ("core.record_fields",),
    "swap": ("welds.swapping.decision_fitting",),
    "targets": ("models.typed_inputs",),
    "verification": ("numerics.sum_scales",),
    "verifying": ("numerics.model_results", "numerics.model_truth"),
    "welding.telling": ("core.muted_warnings",),
}

# For each earlier module, its names that were changed.
RENAMED = {
    "hardware": {"fingerprint": "key_here"},
    "kernels": {"Block": "Form", "Choice": "Selection", "Refusal": "BackendRefusal"},
    "kernels.base": {"Block": "Form"},
    "benching.cases": {"Linear": "LinearShape", "Mlp": "MlpShape"},
    "benching.results": {"Check": "OutputCheck"},
    "profiler.profile": {"Check": "TimeCheck"},
    "targets": {"Loaded": "LoadedTarget"},
    "verifying": {"Compared": "TensorCheck", "Truth": "ModelTruth"},
    "welding.structure": {"Part": "WeldedPart"},
}


class _EarlierModule(types.ModuleType):
    """A module under its earlier name; it takes all attributes from the module of today."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # with today's __path__, files would be imported a second time
            raise AttributeError(name)
        earlier = self.__name__.removeprefix("torchweld.")
        name = RENAMED.get(earlier, {}).get(name, name)
        places = [MODULES[earlier], *SPLIT.get(earlier, ())]
        modules = [importlib.import_module(f"torchweld.{place}") for place in places]
        return getattr(next((one for one in modules if hasattr(one, name)), modules[0]), name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules of `MODULES` if nothing else does."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        package, _, earlier = fullname.partition(".")
        if package != "torchweld" or earlier not in MODULES:
            return None
        is_package = any(other.startswith(f"{earlier}.") for other in MODULES)
        return importlib.machinery.ModuleSpec(fullname, self, is_package=is_package)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _EarlierModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        if _by_import_statement():
            today = MODULES[module.__name__.removeprefix("torchweld.")]
            warnings.warn(
                f"{module.__name__} is torchweld.{today} now; the earlier name will go in 0.3",
                DeprecationWarning,
                stacklevel=2,  # frames of importlib do not count
            )


def _by_import_statement() -> bool:
    """Whether an import statement led here, and not a pickle that names the module."""
    frame = sys._getframe(2)
    while frame.f_back is not None and "importlib" in frame.f_code.co_filename:
        frame = frame.f_back
    return dis.opname[frame.f_code.co_code[frame.f_lasti]] == "IMPORT_NAME"


def install() -> None:
    """Called once, when torchweld is imported."""
    sys.meta_path.append(_Finder())
