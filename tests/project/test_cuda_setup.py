"""The install builds CUDA kernels where it can, says why not elsewhere, and never fails for them.

Compilers are stood in for: nothing here is compiled.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from setuptools.errors import CompileError

ROOT = Path(__file__).parents[2]
NVCC = """#!/bin/sh
case "$*" in
  *--version*) echo "Cuda compilation tools, release {release}, V{release}.88";;
  *--dryrun*) echo '#$ TOP={home}' >&2;;
esac
"""


@pytest.fixture
def setup(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """setup.py, with sources of CUDA kernels, and an environment that names nothing."""
    spec = importlib.util.spec_from_file_location("torchweld_setup", ROOT / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name in ("CUDA_HOME", "CUDA_PATH", "TORCH_CUDA_ARCH_LIST", "TORCHWELD_CUDA"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "csrc" / "cuda").mkdir(parents=True)
    (tmp_path / "csrc" / "cuda" / "cuda_kernels.cu").write_text("")
    monkeypatch.setattr(module, "CSRC", tmp_path / "csrc")
    return module


def torch_with(cuda: str | None) -> Any:
    return SimpleNamespace(
        __version__="9.9.9+cu130" if cuda else "9.9.9+cpu",
        __file__=str(ROOT / "torch" / "__init__.py"),
        version=SimpleNamespace(cuda=cuda),
        _C=SimpleNamespace(_GLIBCXX_USE_CXX11_ABI=True),
    )


@pytest.fixture
def toolkit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An nvcc of CUDA 13.0 on PATH, as a script that is not in its toolkit."""
    home = tmp_path / "toolkit"
    (home / "lib64").mkdir(parents=True)
    place_nvcc(tmp_path / "bin", "13.0", home)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    return home


def place_nvcc(folder: Path, release: str, home: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "nvcc").write_text(NVCC.format(release=release, home=home))
    (folder / "nvcc").chmod(0o755)


def reason(setup: ModuleType, torch: Any) -> str:
    with pytest.raises(setup.NoCudaError) as raised:
        setup.cuda_build(torch, ["g++"], [], ROOT)
    assert "\n" not in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize(
    ("asked", "names"),
    [
        ("8.0;9.0;10.0+PTX", ["sm_80", "sm_90", "sm_100", "compute_100"]),
        ("7.5 8.6", ["sm_86"]),
        ("9.0a, 12.0", ["sm_90a", "sm_120"]),
        (" 8.9+PTX ", ["sm_89", "compute_89"]),
    ],
)
def test_architectures_are_read_as_torch_writes_them(
    setup: ModuleType, asked: str, names: list[str]
) -> None:
    assert setup.cuda_architectures(asked) == names


def test_flags_name_binaries_and_ptx(setup: ModuleType) -> None:
    assert setup.architecture_flags(["sm_90a", "compute_100"]) == [
        "-gencode=arch=compute_90a,code=sm_90a",
        "-gencode=arch=compute_100,code=compute_100",
    ]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (
            "Hopper",
            "TORCH_CUDA_ARCH_LIST has 'Hopper'; expected versions, as in '8.0;9.0;10.0+PTX'",
        ),
        ("6.0;7.5", "TORCH_CUDA_ARCH_LIST='6.0;7.5' names none from 8.0 on, which they need"),
    ],
)
def test_architectures_that_cannot_be_are_told(
    setup: ModuleType, toolkit: Path, monkeypatch: pytest.MonkeyPatch, asked: str, said: str
) -> None:
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", asked)
    assert reason(setup, torch_with("13.0")) == said


def test_why_there_are_no_cuda_kernels(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert reason(setup, torch_with(None)) == "torch 9.9.9+cpu is built without CUDA"
    monkeypatch.setenv("PATH", str(tmp_path))
    found = reason(setup, torch_with("13.0"))
    assert found == "nvcc was not found (CUDA_HOME, or nvcc on PATH)"
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert reason(setup, torch_with("13.0")) == f"CUDA_HOME={str(tmp_path)!r} has no bin/nvcc"
    place_nvcc(tmp_path / "bin", "12.8", tmp_path)
    found = reason(setup, torch_with("13.0"))
    assert found == "nvcc is of CUDA 12.8, but torch was built for CUDA 13.0"
    monkeypatch.setenv("TORCHWELD_CUDA", "0")
    assert reason(setup, torch_with("13.0")) == "TORCHWELD_CUDA=0 was set when it was installed"


def test_the_toolkit_is_where_nvcc_says(setup: ModuleType, toolkit: Path) -> None:
    assert setup.cuda_toolkit(["nvcc"], "13.1") == (toolkit, "nvcc 13.0")


class Compilers:
    """Notes what would be compiled and linked; what `breaks` is in fails."""

    def __init__(self, setup: ModuleType, patch: pytest.MonkeyPatch, breaks: str = "") -> None:
        self.compiled: dict[str, Sequence[str]] = {}
        self.linked: list[list[str]] = []
        self.breaks = breaks
        patch.setattr(setup, "compile_object", self.compile)
        patch.setattr(setup, "run_compiler", self.link)

    def compile(self, command: Sequence[str], source: Path, target: Path, what: str) -> None:
        if self.breaks and self.breaks in what:
            raise CompileError(f"{what}: error")
        self.compiled[what] = command

    def link(self, command: list[str], what: str) -> None:
        if self.breaks == "-lcudart" and "-lcudart" in command:
            raise CompileError("cannot find -lcudart")
        self.linked.append(command)
        Path(command[command.index("-o") + 1]).write_text("")


def build(setup: ModuleType, tmp_path: Path) -> dict[str, Any]:
    made: dict[str, Any] = setup.build_extension(
        torch_with("13.0"), ["g++"], tmp_path / "objects", tmp_path / "_C.so"
    )
    assert (tmp_path / "_C.so").exists()
    return made


def test_cuda_kernels_are_compiled_linked_and_recorded(
    setup: ModuleType, toolkit: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compilers = Compilers(setup, monkeypatch)
    assert build(setup, tmp_path) == {
        "built": True,
        "architectures": ["sm_80", "sm_90", "sm_100", "compute_100"],
        "compiler": "nvcc 13.0",
    }
    nvcc = compilers.compiled["cuda/cuda_kernels.cu"]
    assert nvcc[0] == "nvcc"
    assert "-gencode=arch=compute_90,code=sm_90" in nvcc
    glue = compilers.compiled["torch_glue/cuda_ops.cpp"]
    assert str(toolkit / "include") in glue
    (linked,) = compilers.linked
    assert {"-lcudart", "-lc10_cuda", f"-L{toolkit / 'lib64'}"} <= set(linked)
    assert str(tmp_path / "objects" / "cuda_kernels.o") in linked


@pytest.mark.parametrize(
    ("breaks", "said"),
    [
        ("cuda_kernels.cu", "cuda/cuda_kernels.cu does not compile with nvcc 13.0"),
        ("cuda_ops.cpp", "torch_glue/cuda_ops.cpp does not compile with nvcc 13.0"),
        ("-lcudart", "what nvcc 13.0 compiled does not link"),
    ],
)
def test_if_they_cannot_be_built_the_rest_is(
    setup: ModuleType, toolkit: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    breaks: str, said: str,
) -> None:  # fmt: skip
    compilers = Compilers(setup, monkeypatch, breaks)
    assert build(setup, tmp_path) == {"built": False, "reason": said}
    (linked,) = compilers.linked
    assert not [part for part in linked if "cuda" in Path(part).name]
    monkeypatch.setenv("TORCHWELD_CUDA", "1")
    with pytest.raises(CompileError, match=f"TORCHWELD_CUDA is set.*{said}"):
        build(setup, tmp_path)


def test_sources_of_cuda_kernels_are_part_of_what_was_built(
    setup: ModuleType, tmp_path: Path
) -> None:
    """Else a changed kernel would not be built again, and old times would count for it."""
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(setup, "ROOT", tmp_path)
    monkeypatch.setattr(setup, "PACKAGE", tmp_path)
    try:
        (tmp_path / "schemas.inc").write_text("")
        seen = {setup.source_hash()}
        for name in ("cuda_kernels.cu", "part.cuh"):
            (tmp_path / "csrc" / "cuda" / name).write_text("a change")
            seen.add(setup.source_hash())
    finally:
        monkeypatch.undo()
    assert len(seen) == 3
    sources = next(
        line for line in (ROOT / "Makefile").read_text().splitlines() if "CPP_SOURCES :=" in line
    )
    assert "'*.cu'" in sources
    assert "'*.cuh'" in sources
