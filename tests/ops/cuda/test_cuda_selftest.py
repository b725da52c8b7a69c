"""The CUDA kernels by themselves on the host: sanitizers, and what barriers are for.

`csrc/cuda/cuda_selftest.cpp` compares chains with a scalar reference. It is built with fibers or
threads, and with sanitizers. Each barrier of the kernels is taken out in turn: then it must fail.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from tests.support.cuda_on_host import CSRC

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


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("plain"), CSRC, ["-O0"])


def run(binary: Path, *, seed: int = 1, without: str = "") -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ, "TORCHWELD_HOST_SEED": str(seed), "TORCHWELD_HOST_WITHOUT": without
    }  # fmt: skip
    return subprocess.run(
        [str(binary)], capture_output=True, text=True, check=False, timeout=1200,
        env=environment,
    )  # fmt: skip


def test_any_order_of_threads_gives_the_same(plain: Path) -> None:
    for seed in range(1, 6):
        done = run(plain, seed=seed)
        assert done.returncode == 0, done.stdout + done.stderr
        assert " passed, 0 failed" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(ADDRESS, id="address"),
        pytest.param([*THREADS, "-fsanitize=thread"], id="threads"),
    ],
)
def test_sanitizers_find_nothing(tmp_path: Path, flags: list[str]) -> None:
    done = run(build(tmp_path, CSRC, ["-O1", *flags]))
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed, 0 failed" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("place", ["narrow_forward.cuh", "narrow_backward.cuh"])
def test_the_thread_sanitizer_sees_a_missing_barrier(tmp_path: Path, place: str) -> None:
    """It can fail."""
    binary = build(tmp_path, CSRC, ["-O1", *THREADS, "-fsanitize=thread"])
    first = next(one for one in barriers() if one.startswith(place))
    done = run(binary, without=first)
    assert "WARNING: ThreadSanitizer: data race" in done.stderr


def barriers() -> list[str]:
    """Every barrier in a kernel, by file and line."""
    return [
        f"{path.name}:{number}"
        for path in sorted((CSRC / "cuda").glob("*.cuh"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if BARRIER in line
    ]


@pytest.mark.parametrize("place", barriers())
def test_every_barrier_is_needed(plain: Path, place: str) -> None:
    """In some order of threads, the results are wrong without it."""
    assert any(run(plain, seed=seed, without=place).returncode for seed in range(1, 6))


def test_no_barrier_goes_by_another_name() -> None:
    """The test above takes out all that there are."""
    for path in (CSRC / "cuda").glob("*.cu*"):
        others = re.findall(r"__sync\w+|__shfl\w+|barrier\.sync|bar\.sync", path.read_text())
        assert set(others) <= {"__syncthreads"}, path.name
