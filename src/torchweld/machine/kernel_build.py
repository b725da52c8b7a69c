"""The compiled part: what it was built from, whether it may be loaded, and which kernels run.

In: the record that the build left beside the extension. `build_problem` is the one place that
decides whether the compiled part may be loaded.
"""

from __future__ import annotations

import importlib
import json
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from torchweld.core.errors import BuildError

PACKAGE = Path(__file__).parent.parent
BUILD_INFO = PACKAGE / "_build_info.json"


@dataclass(frozen=True, kw_only=True)
class CudaBuild:
    """The CUDA kernels of the compiled part. `reason`: why there are none; "" if there are."""

    architectures: tuple[str, ...] = ()
    compiler: str = ""
    reason: str = ""

    def __str__(self) -> str:
        if self.reason:
            return f"not built: {self.reason}"
        return f"built for {', '.join(self.architectures)}, by {self.compiler}"


@dataclass(frozen=True, kw_only=True)
class BuildInfo:
    """What the compiled part was built from; the build writes it."""

    torch: str
    isas: tuple[str, ...]
    compiler: str
    source_hash: str
    cuda: CudaBuild = CudaBuild(reason="the build says nothing of them")


def _build_record() -> dict[str, Any]:
    try:
        record = json.loads(BUILD_INFO.read_text())
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def build_info() -> BuildInfo | None:
    """What the compiled part was built with; None if there is none."""
    record = _build_record()
    if not record.get("built"):
        return None
    return BuildInfo(
        torch=record["torch"],
        isas=tuple(record["isas"]),
        compiler=record["compiler"],
        source_hash=record["source_hash"],
        cuda=_cuda_build(record.get("cuda")),
    )


def _cuda_build(record: Any) -> CudaBuild:
    if not isinstance(record, dict):
        return BuildInfo.cuda
    if not record.get("built"):
        return CudaBuild(reason=str(record.get("reason", "no reason was recorded")))
    architectures = tuple(map(str, record["architectures"]))
    return CudaBuild(architectures=architectures, compiler=str(record["compiler"]))


def rebuild_command() -> str:
    """The command that builds the compiled part again, for this kind of install."""
    source = PACKAGE.parent.parent
    if (source / "setup.py").exists() and (source / "csrc").is_dir():
        return f"make -C {source} setup  (or: pip install --no-build-isolation -e {source})"
    return (
        "pip install --no-build-isolation --no-cache-dir --force-reinstall --no-deps <source>, "
        "with the folder, archive or name torchweld was installed from as <source>"
    )


def build_problem() -> str | None:
    """Why the compiled part cannot be used, in one sentence with the remedy; None if it can.

    Decided from the build's record alone: an extension built for another torch may crash on load.
    """
    info = build_info()
    if info is None:
        reason = _build_record().get("reason", "it was not built")
        return f"the compiled part is missing: {reason}; to build it: {rebuild_command()}"
    if info.torch != torch.__version__:
        return (
            f"the compiled part was built for torch {info.torch}, but torch {torch.__version__} is "
            f"installed; to rebuild it: {rebuild_command()}"
        )
    return None


def compiled_part() -> ModuleType | None:
    """`torchweld._C`, or None if it cannot be used; `build_problem` says why."""
    if build_problem() is not None:
        return None
    try:
        return importlib.import_module("torchweld._C")
    except ImportError as error:
        raise BuildError(
            f"the compiled part cannot be loaded ({error}); to rebuild it: {rebuild_command()}"
        ) from error


def isa_states() -> dict[str, tuple[bool, bool]]:
    """Instruction set -> (was built, this CPU has it); empty without a compiled part."""
    compiled = compiled_part()
    return {} if compiled is None else dict(compiled.isas())


def isa_in_use() -> str | None:
    """The instruction set whose kernels run (see TORCHWELD_ISA); None without a compiled part."""
    compiled = compiled_part()
    if compiled is None:
        return None
    try:
        return str(compiled.isa())
    except (RuntimeError, ValueError) as error:  # TORCHWELD_ISA names what cannot run here
        raise BuildError(str(error)) from error
