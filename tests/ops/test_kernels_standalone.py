"""The torch-free kernels, built on their own: widths and machines this one does not have, and ASan.

`csrc/kernels/selftest.cpp` compares them with a scalar reference; here it is compiled in each way
and run. `make test-all` installs clang, the cross compiler and the emulator.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

KERNELS = Path(__file__).parents[2] / "csrc" / "kernels"
SOURCES = ("kernel_table.cpp", "isa_dispatch.cpp", "scratch.cpp", "team.cpp", "selftest.cpp")
COMMON = [
    *("-std=c++17", "-O2", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast"),
    *("-Wall", "-Wextra", "-Werror", "-Wno-psabi"),
]
LINKED = ["-lgomp", "-lpthread"]  # torch is not there to bring them
AVX2 = ["-mavx2", "-mfma", "-mf16c", "-DTORCHWELD_ISA=avx2", "-DTORCHWELD_HAVE_avx2"]
BASELINE = ["-DTORCHWELD_ISA=baseline", "-DTORCHWELD_HAVE_baseline"]
WIDE = ["-DTORCHWELD_VEC_BYTES=64"]
ASAN = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g"]

on_x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="compiles for x86-64")


def run_selftest(
    folder: Path, compiler: str, flags: list[str], *, runner: list[str], cases: int
) -> str:
    assert shutil.which(compiler), f"{compiler} is needed; `make cross-tools` installs it"
    sources = [str(KERNELS / name) for name in SOURCES]
    binary = folder / "selftest"
    subprocess.run([compiler, *COMMON, *flags, *sources, "-o", str(binary), *LINKED], check=True)
    done = subprocess.run(
        [*runner, str(binary), str(cases)], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{cases} passed, 0 failed" in done.stdout
    return done.stdout


@pytest.mark.slow
@on_x86
@pytest.mark.parametrize(
    ("compiler", "flags", "lanes"),
    [
        pytest.param("g++", BASELINE, 4, id="baseline"),
        pytest.param("g++", AVX2, 8, id="avx2"),
        pytest.param("g++", [*AVX2, *WIDE], 16, id="avx512-width-on-avx2"),
        pytest.param("g++", [*AVX2, *ASAN], 8, id="avx2-asan"),
        pytest.param("g++", [*AVX2, *WIDE, *ASAN], 16, id="avx512-width-asan"),
        pytest.param("clang++", BASELINE, 4, id="baseline-clang"),
        pytest.param("clang++", AVX2, 8, id="avx2-clang"),
        pytest.param("clang++", [*AVX2, *WIDE], 16, id="avx512-width-on-avx2-clang"),
    ],
)
def test_kernels_agree_with_the_scalar_reference(
    tmp_path: Path, compiler: str, flags: list[str], lanes: int
) -> None:
    out = run_selftest(tmp_path, compiler, flags, runner=[], cases=2000)
    assert f"{lanes} floats a register" in out


@pytest.mark.slow
def test_neon_kernels_agree_with_the_scalar_reference_under_emulation(tmp_path: Path) -> None:
    flags = ["-static", "-march=armv8-a", "-DTORCHWELD_ISA=neon", "-DTORCHWELD_HAVE_neon"]
    assert shutil.which("qemu-aarch64"), "qemu-aarch64 is needed; `make cross-tools` installs it"
    out = run_selftest(tmp_path, "aarch64-linux-gnu-g++", flags, runner=["qemu-aarch64"], cases=400)
    assert "neon, 4 floats a register" in out


@pytest.mark.slow
@on_x86
def test_a_wrong_kernel_is_noticed(tmp_path: Path) -> None:
    """The reference can fail: with one coefficient off in the seventh digit, it does."""
    broken = tmp_path / "kernels"
    shutil.copytree(KERNELS, broken)
    source = broken / "vector_math.h"
    text = source.read_text()
    assert "0.4999999304f" in text
    source.write_text(text.replace("0.4999999304f", "0.4999499304f"))
    binary = tmp_path / "selftest"
    sources = [str(broken / name) for name in SOURCES]
    subprocess.run(["g++", *COMMON, *AVX2, *sources, "-o", str(binary), *LINKED], check=True)
    done = subprocess.run([str(binary), "2000"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "expected" in done.stdout
