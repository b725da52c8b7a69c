"""Compiles the Triton kernels for GPUs that are not here, and says what each takes of them.

    python -m scripts.gpu_kernels              # writes tests/ops/gpu/triton_resources.json
    python -m scripts.gpu_kernels --check      # compares with it, and writes nothing
    python -m scripts.gpu_kernels --check --target sm_90 --case "linear gelu bf16 64x64x64"

Each kernel is compiled with each of its tiles for each target with one activation, with each
activation once, and in each form that its switches and strides give it, with one tile. A row has
registers, shared memory, spills, and the product instructions that were really used. The file is
under review: a change in it is a change of the kernels. Another Triton than the pinned one has a
file of its own.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)
# What was compiled once is found again, and nothing is left in the user's home.
if "TRITON_CACHE_DIR" not in os.environ:
    os.environ["TRITON_CACHE_DIR"] = str(Path(__file__).parents[1] / "build" / "triton-cache")

import triton
from scripts import gpu_resources
from scripts.gpu_kernel_cases import KernelCase, all_cases
from scripts.gpu_resources import Recorded, Resources, Table
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import compiler as nvidia
from triton.compiler import ASTSource

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
COUNTED = ("HMMA", "HGMMA", "UTCHMMA", "LDL", "STL")
BINARIES = Path(nvidia.__file__).parent / "bin"


# ---- compiling ----


def _nested_ones(case: KernelCase) -> dict[tuple[int, ...], int]:
    """Strides inside the tuple of the narrow kernel that are 1."""
    if "strides" not in case.types:
        return {}
    at = case.kernel.arg_names.index("strides")
    return {
        (at, layer, i): 1
        for layer, kinds in enumerate(case.types["strides"])
        for i, kind in enumerate(kinds)
        if kind == "constexpr"
    }


def compiled(case: KernelCase, target: GPUTarget) -> Any:
    """The kernel, compiled for a GPU that need not be there."""
    arguments = case.kernel.arg_names
    signature = {name: case.types.get(name, "constexpr") for name in arguments}
    constants: dict[tuple[int, ...], Any] = {
        (arguments.index(name),): value for name, value in case.constants.items()
    }
    constants |= _nested_ones(case)
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(arguments)
        if case.aligned and isinstance(case.types.get(name), str) and case.types[name] != "fp32"
    }
    source = ASTSource(case.kernel, signature, constants, aligned)
    return triton.compile(source, target=target, options=case.tile.launch)


def _tool(name: str, *arguments: str) -> str:
    command = [str(BINARIES / name), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def resources(case: KernelCase, target: GPUTarget) -> Resources:
    made = compiled(case, target)
    shared = made.metadata.shared
    if target.backend == "hip":
        text = made.asm["amdgcn"]
        found = {name: int(value) for name, value in re.findall(r"\.(\w+_count):\s*(\d+)", text)}
        spills = found.get("vgpr_spill_count", 0) + found.get("sgpr_spill_count", 0)
        # Those of fp32 multiply no 16-bit values.
        counted = {
            "mfma": len(re.findall(r"v_mfma_f32_\w*f16", text)),
            "mfma_f32": len(re.findall(r"v_mfma_f32_\w*(?<!b)f32", text)),
        }
        return Resources(found["vgpr_count"], shared, spills, _there(counted))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        usage = _tool("cuobjdump", "-res-usage", file.name)
        sass = _tool("nvdisasm", "-c", file.name)
    registers = int(re.findall(r"REG:(\d+)", usage)[0])
    counted = {name: len(re.findall(rf"\b{name}\b", sass)) for name in COUNTED}
    spills = counted.pop("LDL") + counted.pop("STL")
    return Resources(registers, shared, spills, _there(counted))


def _there(counted: dict[str, int]) -> dict[str, int]:
    return {name: count for name, count in counted.items() if count}


def measured(
    cases: Sequence[KernelCase], targets: Sequence[str], say: Callable[[str], None]
) -> Table:
    found: dict[str, dict[str, Resources]] = {}
    for case in cases:
        for target in targets:
            found.setdefault(case.name, {})[target] = resources(case, TARGETS[target])
        say(f"{case.name}: {found[case.name]}")
    return found


def check(
    cases: Sequence[KernelCase], targets: Sequence[str], file: Path, say: Callable[[str], None]
) -> list[str]:
    """Compiles, and tells what is wrong; of what is not compiled now, what the file says.

    Without a file for this Triton, only that it compiles, and with which product instructions.
    """
    every, found = all_cases(), list[str]()
    recorded = gpu_resources.read(file).kernels if file.exists() else None
    if recorded is None:
        say(f"Triton {triton.__version__} has no file: what kernels take is not compared")
    else:
        found += gpu_resources.drift(list(every), list(TARGETS), recorded)
        for name, rows in recorded.items():
            for target, one in rows.items() if name in every else ():
                found += _unused(every[name], target, one)
    for case in cases:
        for target, one in measured([case], targets, say)[case.name].items():
            found += _unused(case, target, one)
            if recorded is not None:
                known = recorded.get(case.name, {}).get(target)
                found += gpu_resources.complaints(f"{case.name} for {target}", one, known)
    return list(dict.fromkeys(found))


def _unused(case: KernelCase, target: str, found: Resources) -> Iterator[str]:
    needed = gpu_resources.product_instruction(target, case.tile.rows) if case.products else None
    yield from gpu_resources.unused_instruction(f"{case.name} for {target}", found, needed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    cases, version = all_cases(), triton.__version__
    parser.add_argument("--check", action="store_true", help="compare with the file, write nothing")
    parser.add_argument("--target", action="append", choices=TARGETS, help="these targets alone")
    parser.add_argument("--case", action="append", metavar="NAME", help="these cases alone")
    parser.add_argument("--file", type=Path, default=gpu_resources.file_for(version))
    given = parser.parse_args()
    unknown = [name for name in given.case or () if name not in cases]
    if unknown:
        parser.error(f"no such case: {', '.join(unknown)}; there are: {', '.join(cases)}")
    targets = given.target or list(TARGETS)
    chosen = [cases[name] for name in given.case or cases]
    if given.check:
        found = check(chosen, targets, given.file, print)
        print(*found, sep="\n")
        print(f"{len(chosen)} cases for {', '.join(targets)}: {len(found)} complaints")
        return 1 if found else 0
    table = measured(chosen, targets, print)
    if not (given.target or given.case):
        gpu_resources.write(given.file, Recorded(version, table))
    return 0


if __name__ == "__main__":
    sys.exit(main())
