"""Kernels compiled for GPUs that are not here take no more than the file under review says.

Compiling needs Triton without its interpreter, so it happens in a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import triton
from scripts import gpu_resources
from scripts.gpu_resources import Recorded, Resources

ROOT = Path(__file__).parents[3]
# What the kernels take with the Triton that torch pins; another Triton may have no such file.
FILE = gpu_resources.file_for(gpu_resources.PINNED)
# One of each kernel with products, and a pointwise one; wide tiles and low ones.
FEW = (
    "pointwise backward gated gelu bf16",
    "linear gelu bf16 64x64x64",
    "linear_backward gated silu fp16 16x64x64",
    "narrow 64-256-64 bf16 16 rows",
)
ALL = "sm_80, sm_90, sm_100, gfx942"


def compare(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "scripts.gpu_kernels", "--check", *arguments],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_kernels_take_what_is_recorded() -> None:
    """Some of them. The file has every case of the script, and no other."""
    done = compare(*(part for case in FEW for part in ("--case", case)))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(FEW)} cases for {ALL}: 0 complaints" in done.stdout


@pytest.mark.slow
def test_every_kernel_takes_what_is_recorded() -> None:
    done = compare()
    assert done.returncode == 0, done.stdout + done.stderr
    cases = len(gpu_resources.read(FILE).kernels)
    assert f"{cases} cases for {ALL}: 0 complaints" in done.stdout


def test_a_kernel_that_takes_more_fails(tmp_path: Path) -> None:
    """A file that has less, and other cases; one of them without its product instruction."""
    case, target = "linear gelu bf16 64x64x64", "sm_90"
    kept = gpu_resources.read(FILE)
    kernels = {name: dict(rows) for name, rows in kept.kernels.items()}
    kernels[case][target] = Resources(registers=40, shared=2048, spills=0)
    kernels["no such kernel"] = kernels[case]
    del kernels["dropout mask"]
    narrow = kernels["narrow 64-256-64 bf16 32 rows"]
    narrow["sm_80"] = replace(narrow["sm_80"], instructions={})
    gpu_resources.write(tmp_path / "file.json", Recorded(kept.triton, kernels))
    done = compare("--case", case, "--target", target, "--file", str(tmp_path / "file.json"))
    assert done.returncode == 1, done.stdout + done.stderr
    for said in (
        "dropout mask for sm_80 is not in the file",
        "no such kernel is in the file, but no case compiles it",
        f"{case} for {target} takes ",
        "registers, 40 are recorded; if that is meant, renew the file",
        "bytes of shared memory, 2048 are recorded",
        "narrow 64-256-64 bf16 32 rows for sm_80 does not use HMMA: it has no product instruction",
    ):
        assert said in done.stdout


def test_the_file_survives_writing(tmp_path: Path) -> None:
    gpu_resources.write(tmp_path / "again.json", gpu_resources.read(FILE))
    assert (tmp_path / "again.json").read_text() == FILE.read_text()
    compiled_by = gpu_resources.read(FILE).triton
    assert compiled_by.startswith(f"{gpu_resources.PINNED}.")
    if triton.__version__.startswith(f"{gpu_resources.PINNED}."):
        assert compiled_by == triton.__version__


def said(found: Resources, recorded: Resources | None) -> list[str]:
    return list(gpu_resources.complaints("it", found, recorded))


def unused(found: Resources, instruction: str | None) -> list[str]:
    return list(gpu_resources.unused_instruction("it", found, instruction))


def test_what_is_complained_of() -> None:
    known = Resources(registers=100, shared=4096, spills=2, instructions={"HMMA": 4})
    assert said(known, known) == []
    assert said(Resources(108, 5120, 2), known) == []  # the margins
    assert said(Resources(20, 0, 0), known) == []
    (registers,) = said(Resources(109, 4096, 2), known)
    assert "takes 109 registers, 100 are recorded" in registers
    (shared,) = said(Resources(100, 5121, 2), known)
    assert "takes 5121 bytes of shared memory" in shared
    assert said(Resources(100, 4096, 3), known) == [
        "it spills 3 times, 2 are recorded: a new spill"
    ]
    (new,) = said(known, None)
    assert "is not in the file" in new


def test_a_missing_product_instruction_is_complained_of() -> None:
    known = Resources(registers=100, shared=4096, spills=2, instructions={"HMMA": 4})
    assert unused(known, "HMMA") == unused(known, None) == []
    assert unused(known, "HGMMA") == ["it does not use HGMMA: it has HMMA"]
    none = replace(known, instructions={})
    assert unused(none, "HMMA") == ["it does not use HMMA: it has no product instruction"]


def test_the_instruction_of_a_product_follows_from_target_and_rows() -> None:
    wanted = {"sm_80": "HMMA", "sm_90": "HGMMA", "sm_100": "UTCHMMA", "gfx942": "mfma"}
    for target, instruction in wanted.items():
        assert gpu_resources.product_instruction(target, 64) == instruction
        low = instruction if target == "gfx942" else "HMMA"
        assert gpu_resources.product_instruction(target, 32) == low
