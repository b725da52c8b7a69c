"""The torch-free kernels, built on their own: widths and machines this one does not have, and ASan.

`csrc/kernels/selftest.cpp` compares them with a scalar reference; here it is compiled in each way
and run. Derivatives of activations, which no kernel uses yet, are also compared with eager's.
`make test-all` installs clang, the cross compiler and the emulator.
"""

from __future__ import annotations

import ctypes
import math
import platform
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from tests.support.helpers import ACTIVATION_TEXTS

from torchweld.core.activations import ACTIVATIONS, parse_activation

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
@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        pytest.param("vector_math.h", "0.4999999304f", "0.4999499304f", id="a digit of exp"),
        pytest.param("activation_formulas.h", "x <= C(-3)", "x < C(-3)", id="a kink of hardswish"),
    ],
)
def test_a_wrong_kernel_is_noticed(tmp_path: Path, name: str, right: str, wrong: str) -> None:
    """The reference can fail: with one digit or one comparison wrong, it does."""
    broken = tmp_path / "kernels"
    shutil.copytree(KERNELS, broken)
    source = broken / name
    text = source.read_text()
    assert right in text
    source.write_text(text.replace(right, wrong))
    binary = tmp_path / "selftest"
    sources = [str(broken / name) for name in SOURCES]
    subprocess.run(["g++", *COMMON, *AVX2, *sources, "-o", str(binary), *LINKED], check=True)
    done = subprocess.run([str(binary), "2000"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "expected" in done.stdout


# The vector functions as a library, in the width that every machine has.
DERIVATIVES = """
#include <cstring>
#include "activations.h"

template <Act act, class C>
void derive(const C* x, C* y, int64_t count, C p0, C p1) {
  for (int64_t i = 0; i < count; i += kLanes<C>)
    store(y + i, activation_derivative<act>(load(x + i), p0, p1));
}
template <class C>
bool derive_by_name(const char* name, const C* x, C* y, int64_t count, double p0, double p1) {
#define ACTIVATION(act, ...)                                         \\
  if (!std::strcmp(name, #act)) {                                    \\
    derive<Act::act>(x, y, count, C(p0), C(p1));                     \\
    return true;                                                     \\
  }
#include "activations.inc"
#undef ACTIVATION
  return false;
}
extern "C" bool derive_float32(const char* name, const float* x, float* y, int64_t count,
                               double p0, double p1) {
  return derive_by_name(name, x, y, count, p0, p1);
}
extern "C" bool derive_float64(const char* name, const double* x, double* y, int64_t count,
                               double p0, double p1) {
  return derive_by_name(name, x, y, count, p0, p1);
}
"""
KINKS_AND_SPECIAL_VALUES = [
    *(-math.inf, -1e20, -100.0, -4.0, -3.0, -1.0, -0.0, 0.0, 1e-3, 1.0, 3.0, 4.0, 20.0, 100.0),
    *(1e20, math.inf, math.nan),
]


@pytest.fixture(scope="module")
def derivatives(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    folder = tmp_path_factory.mktemp("derivatives")
    source, library = folder / "derivatives.cpp", folder / "derivatives.so"
    source.write_text(DERIVATIVES)
    flags = [*COMMON, f"-I{KERNELS}", "-shared", "-fPIC"]
    subprocess.run(["g++", *flags, str(source), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("activation", ACTIVATION_TEXTS)
def test_derivatives_are_those_of_eager(
    derivatives: ctypes.CDLL, activation: str, dtype: torch.dtype
) -> None:
    """Kinks count too, where eager chooses a side; NaN stands exactly where eager has it."""
    name, parameters = parse_activation(activation)
    special = torch.tensor(KINKS_AND_SPECIAL_VALUES, dtype=dtype)
    # Sixteen of each: torch's vector loops and its scalar ends differ at NaN.
    x = torch.cat([special.repeat_interleave(16), torch.linspace(-12, 12, 2400, dtype=dtype)])
    x.requires_grad_()
    (expected,) = torch.autograd.grad(ACTIVATIONS[name].apply(x, *parameters).sum(), x)
    got = torch.empty_like(expected)
    p0, p1 = (*parameters, 0.0, 0.0)[:2]
    derive = getattr(derivatives, "derive_" + str(dtype).removeprefix("torch."))
    found = derive(
        *(name.encode(), ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(got.data_ptr())),
        *(ctypes.c_int64(x.numel()), ctypes.c_double(p0), ctypes.c_double(p1)),
    )
    assert found
    # Eager's 1 - tanh(u)^2 loses digits: up to 22 ulp in gelu_tanh. The selftest is stricter.
    atol = 32 * torch.finfo(dtype).eps
    torch.testing.assert_close(got, expected, rtol=0, atol=atol, equal_nan=True)
