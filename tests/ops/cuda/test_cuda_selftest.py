"""The CUDA kernels by themselves on the host: sanitizers, and what barriers are for.

`csrc/cuda/cuda_selftest.cpp` compares chains with a scalar reference. It is built with fibers or
threads, with sanitizers, and once with each barrier of the kernels taken out: then it must fail.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.support.cuda_on_host import CSRC

pytestmark = pytest.mark.slow

COMMON = ["-std=c++17", "-g", "-Wall", "-Wextra", "-Werror"]
ADDRESS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
THREADS = ["-DTORCHWELD_HOST_THREADS", "-pthread"]
BARRIER = "__syncthreads();"


def build(folder: Path, sources: Path, flags: list[str]) -> Path:
    binary = folder / "cuda_selftest"
    source = sources / "cuda" / "cuda_selftest.cpp"
    subprocess.run(
        ["g++", *COMMON, *flags, f"-I{sources}", str(source), "-o", str(binary)], check=True
    )
    return binary


def run(binary: Path, *cases: str, seed: int = 1) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TORCHWELD_HOST_SEED": str(seed)}
    return subprocess.run(
        [str(binary), *cases], capture_output=True, text=True, check=False, timeout=1200,
        env=environment,
    )  # fmt: skip


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(["-O1"], id="fibers"),
        pytest.param(["-O1", *ADDRESS], id="address"),
        pytest.param(["-O1", *THREADS, "-fsanitize=thread"], id="threads"),
    ],
)
def test_kernels_agree_with_the_scalar_reference(tmp_path: Path, flags: list[str]) -> None:
    done = run(build(tmp_path, CSRC, flags))
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed, 0 failed" in done.stdout
    assert "WARNING: ThreadSanitizer" not in done.stderr


def test_other_orders_of_threads_give_the_same(tmp_path: Path) -> None:
    binary = build(tmp_path, CSRC, ["-O1"])
    for seed in range(2, 6):
        assert run(binary, seed=seed).returncode == 0


def places() -> list[tuple[str, int]]:
    """Every barrier in a kernel: its file and its number there."""
    found = []
    for path in sorted((CSRC / "cuda").glob("*.cuh")):
        count = path.read_text().count(BARRIER)
        found += [(path.name, number) for number in range(count)]
    return found


@pytest.mark.parametrize(("name", "number"), places())
def test_every_barrier_is_needed(tmp_path: Path, name: str, number: int) -> None:
    sources = tmp_path / "csrc"
    for room in ("cuda", "kernels"):
        shutil.copytree(CSRC / room, sources / room)
    path = sources / "cuda" / name
    parts = path.read_text().split(BARRIER)
    path.write_text(BARRIER.join(parts[: number + 1]) + ";" + BARRIER.join(parts[number + 1 :]))
    binary = build(tmp_path, sources, ["-O1", "-Wno-empty-body"])
    assert any(run(binary, seed=seed).returncode for seed in range(1, 4)), parts[number][-200:]


def test_no_barrier_goes_by_another_name() -> None:
    """The test above takes out all that there are."""
    for path in (CSRC / "cuda").glob("*.cu*"):
        others = re.findall(r"__sync\w+|__shfl\w+|barrier\.sync|bar\.sync", path.read_text())
        assert set(others) <= {"__syncthreads"}, path.name
