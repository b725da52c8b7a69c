"""The CUDA kernels compiled for real GPUs by nvcc, and what each takes of one.

    python -m tests.support.cuda_compiling      # writes tests/ops/cuda/cuda_resources.json

The file is under review: a change in it is a change of the kernels.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.support.cuda_on_host import CSRC, CUDA, ROOT, setup_script

FILE = ROOT / "tests" / "ops" / "cuda" / "cuda_resources.json"
TARGETS = ("sm_80", "sm_90", "sm_100")
FLAGS = ["-std=c++17", "-O3", "-Werror", "all-warnings", f"-I{CSRC}"]


@dataclass(frozen=True)
class KernelUse:
    """What a compiled kernel takes of its target. `stack` and `spills` in bytes per thread.

    Shared memory of the narrow kernels depends on the chain; `shared` is what is fixed.
    """

    registers: int
    shared: int
    stack: int
    spills: int


def compiler() -> str | None:
    return shutil.which("nvcc")


def compiled(target: str) -> str:
    """What ptxas says of every kernel. Objects are kept until a file or the command changes."""
    setup = setup_script()
    nvcc = compiler()
    assert nvcc is not None
    folder = ROOT / "build" / "cuda-compiled"
    folder.mkdir(parents=True, exist_ok=True)
    made = folder / f"cuda_kernels.{target}.o"
    said = made.with_suffix(".txt")
    command = [nvcc, *FLAGS, f"-arch={target}", "-Xptxas", "-v"]
    command += ["-c", str(CUDA / "cuda_kernels.cu"), "-o", str(made)]
    if not (said.exists() and setup.is_current(made, command)):
        done = subprocess.run(
            [*command, "-MD", "-MF", str(made.with_suffix(".d"))],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        said.write_text(done.stdout + done.stderr)
        made.with_suffix(".cmd").write_text(setup.shlex.join(command))
    return said.read_text()


def kernel_name(mangled: str) -> str:
    """Its name and element type: `torchweld_cuda_narrow fp32`."""
    name = re.search(r"torchweld_cuda_(?:[a-z]+_)*[a-z]+(?=I)", mangled)
    assert name is not None, mangled
    argument = mangled[name.end() + 1 :]
    if argument.startswith("f"):
        return f"{name.group()} fp32"
    kind = re.search(r"fp16_t|bf16_t", argument)
    assert kind is not None, mangled
    return f"{name.group()} {kind.group().removesuffix('_t')}"


def uses(said: str) -> dict[str, KernelUse]:
    """What each kernel takes, from the lines of ptxas."""
    found: dict[str, KernelUse] = {}
    name, stack, spills = "", 0, 0
    for line in said.splitlines():
        if entry := re.search(r"Compiling entry function '(\w+)'", line):
            name, stack, spills = kernel_name(entry.group(1)), 0, 0
        elif frame := re.search(
            r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line
        ):
            stack, spills = int(frame.group(1)), int(frame.group(2)) + int(frame.group(3))
        elif used := re.search(r"Used (\d+) registers", line):
            shared = re.search(r"(\d+) bytes smem", line)
            assert name not in found, name
            found[name] = KernelUse(
                int(used.group(1)), int(shared.group(1)) if shared else 0, stack, spills
            )
    return found


def instructions(target: str) -> dict[str, int]:
    """How often the compiled file has each product instruction of tensor cores."""
    triton = importlib.util.find_spec("triton")
    assert triton is not None, "Triton brings cuobjdump along; an nvcc may come without"
    assert triton.origin is not None
    tool = Path(triton.origin).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    made = ROOT / "build" / "cuda-compiled" / f"cuda_kernels.{target}.o"
    said = subprocess.run(
        [str(tool), "-sass", str(made)], capture_output=True, text=True, check=True
    ).stdout
    return {name: len(re.findall(rf"\b{name}\b", said)) for name in ("HMMA", "LDSM")}


def version() -> str:
    nvcc = compiler()
    assert nvcc is not None
    said = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"release ([\d.]+)", said)
    assert found is not None, said
    return found.group(1)


def recorded() -> dict[str, dict[str, dict[str, int]]]:
    kernels: dict[str, dict[str, dict[str, int]]] = json.loads(FILE.read_text())["kernels"]
    return kernels


def recorded_version() -> str:
    known: str = json.loads(FILE.read_text())["nvcc"]
    return known


def main() -> None:
    kernels: dict[str, dict[str, dict[str, int]]] = {}
    for target in TARGETS:
        for name, use in uses(compiled(target)).items():
            kernels.setdefault(name, {})[target] = asdict(use)
    plain = {"nvcc": version(), "kernels": dict(sorted(kernels.items()))}
    Path(FILE).write_text(json.dumps(plain, indent=1) + "\n")


if __name__ == "__main__":
    main()
