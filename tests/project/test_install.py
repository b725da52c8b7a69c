"""Installing: without a compiler, with one that fails, from an sdist, and under another torch.

Each test installs a copy of the sources with pip into a folder of its own. A source tree is needed.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path
from types import ModuleType

import pytest
import torch

from torchweld.machine import kernel_build

ROOT = Path(__file__).resolve().parents[2]
KEPT_ENVIRONMENT = ("HOME", "LANG", "LD_LIBRARY_PATH", "TMPDIR", "VIRTUAL_ENV")


def copy_sources(folder: Path) -> Path:
    """The sources as a user gets them: nothing built."""
    unwanted = shutil.ignore_patterns("*.so", "_build_info.json", "__pycache__", "*.egg-info")
    for name in ("src", "csrc"):
        shutil.copytree(ROOT / name, folder / name, ignore=unwanted)
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / name)
    return folder


def environment(path: str, **more: str) -> dict[str, str]:
    """Variables that a process needs, and no others: settings of the caller do not leak in."""
    kept = {name: os.environ[name] for name in KEPT_ENVIRONMENT if name in os.environ}
    return {**kept, "PATH": path, "PIP_NO_INDEX": "1", **more}


def install(source: Path, target: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    pip = [sys.executable, "-m", "pip", "install", "--no-build-isolation", "--no-deps"]
    return subprocess.run(
        [*pip, "--target", str(target), str(source)], env=env, capture_output=True, text=True
    )


def run_installed(target: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = environment(os.environ["PATH"], PYTHONPATH=str(target))
    return subprocess.run(
        [sys.executable, *arguments], env=env, capture_output=True, text=True, cwd=target
    )


@pytest.fixture(scope="module")
def without_compiler(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An install made where PATH has no compiler."""
    folder = tmp_path_factory.mktemp("no-compiler")
    target = folder / "target"
    done = install(copy_sources(folder / "source"), target, environment("/nonexistent"))
    assert done.returncode == 0, done.stdout + done.stderr
    return target


def test_without_a_compiler_the_install_works_and_says_so(without_compiler: Path) -> None:
    assert not list(without_compiler.glob("torchweld/_C.*.so"))
    done = run_installed(without_compiler, "-m", "torchweld", "info", "--json")
    assert done.returncode == 0, done.stderr
    info = json.loads(done.stdout)
    assert "no C++ compiler was found" in info["problem"]
    assert info["build"] is None
    backends = {backend["name"]: backend["reasons"] for backend in info["backends"]}
    assert backends["torch"] == []
    assert "no C++ compiler was found" in " ".join(backends["cpu"])


def test_an_installed_torchweld_has_what_draws_pages(without_compiler: Path) -> None:
    code = "from torchweld.pages.page_html import asset; print(len(asset('page.js')))"
    done = run_installed(without_compiler, "-c", code)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0


def test_without_a_compiler_the_module_still_computes(without_compiler: Path) -> None:
    code = (
        "import torch, torchweld as tw\n"
        f"assert tw.__file__.startswith({str(without_compiler)!r}), tw.__file__\n"
        "mlp = tw.FusedMLP((7, 13, 5), activation='gelu').eval()\n"
        "x = torch.randn(3, 7)\n"
        "with torch.inference_mode():\n"
        "    want = mlp.down(torch.nn.functional.gelu(mlp.up(x)))\n"
        "    torch.testing.assert_close(mlp(x), want)\n"
    )
    done = run_installed(without_compiler, "-c", code)
    assert done.returncode == 0, done.stderr


def test_without_a_compiler_the_module_still_trains(without_compiler: Path) -> None:
    code = (
        "import torch, torchweld as tw\n"
        "from torch.nn.functional import dropout, gelu\n"
        "x = torch.randn(3, 7, requires_grad=True)\n"
        "for recompute in (True, False, None):\n"
        "    mlp = tw.FusedMLP((7, 13, 5), dropout=0.5, recompute=recompute)\n"
        "    found = []\n"
        "    for run in (mlp, lambda x: mlp.down(dropout(gelu(mlp.up(x)), 0.5))):\n"
        "        torch.manual_seed(1)\n"
        "        y = run(x)\n"
        "        found.append([y, *torch.autograd.grad(y.sum(), [x, *mlp.parameters()])])\n"
        "    for one, other in zip(*found):\n"
        "        torch.testing.assert_close(one, other)\n"
        "with torch.no_grad():\n"
        "    torch.testing.assert_close(torch.jit.script(mlp.eval())(x), mlp(x))\n"
    )
    done = run_installed(without_compiler, "-W", "ignore", "-c", code)
    assert done.returncode == 0, done.stderr


def test_the_compiled_part_can_be_declined(tmp_path: Path) -> None:
    source, target = copy_sources(tmp_path / "source"), tmp_path / "target"
    (source / "src" / "torchweld" / "plans" / "tables" / "made_up.json").write_text("{}")
    done = install(source, target, environment(os.environ["PATH"], TORCHWELD_NO_EXT="1"))
    assert done.returncode == 0, done.stdout + done.stderr
    # Tables are shipped.
    assert (target / "torchweld" / "plans" / "tables" / "made_up.json").is_file()
    record = json.loads((target / "torchweld" / "_build_info.json").read_text())
    assert record == {"built": False, "reason": "TORCHWELD_NO_EXT was set when it was installed"}
    assert not list(target.glob("torchweld/_C.*.so"))


def test_a_compiler_that_fails_fails_the_install_with_its_message(tmp_path: Path) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text(
        "#!/bin/sh\n"
        'if [ "$1" = --version ]; then echo "broken c++ 1.0"; exit 0; fi\n'
        "echo 'fatal: out of cheese' >&2; exit 3\n"
    )
    compiler.chmod(0o755)
    source, target = copy_sources(tmp_path / "source"), tmp_path / "target"
    done = install(source, target, environment(os.environ["PATH"], CXX=str(compiler)))
    assert done.returncode != 0
    said = done.stdout + done.stderr
    assert "failed with exit code 3" in said
    assert "fatal: out of cheese" in said
    assert "TORCHWELD_NO_EXT=1" in said
    assert not (target / "torchweld").exists()


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [("/nonexistent/c++", "no such program"), ("/bin/false", "--version` failed")],
)
def test_a_named_compiler_that_is_none_fails_the_build(
    tmp_path: Path, compiler: str, reason: str
) -> None:
    source = copy_sources(tmp_path / "source")
    done = subprocess.run(
        [sys.executable, "setup.py", "build_ext", "--inplace"],
        cwd=source,
        env=environment(os.environ["PATH"], CXX=compiler),
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    assert reason in done.stderr
    assert "Traceback" not in done.stderr


def test_without_torch_the_build_says_to_install_it_first(tmp_path: Path) -> None:
    source = copy_sources(tmp_path / "source")
    (tmp_path / "hidden" / "torch").mkdir(parents=True)
    (tmp_path / "hidden" / "torch" / "__init__.py").write_text("raise ImportError('no torch here')")
    done = subprocess.run(
        [sys.executable, "setup.py", "build_ext", "--inplace"],
        cwd=source,
        env=environment(os.environ["PATH"], PYTHONPATH=str(tmp_path / "hidden")),
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    assert "install torch first" in done.stderr
    assert "--no-build-isolation" in done.stderr
    assert "Traceback" not in done.stderr


def test_another_torch_under_a_built_extension_is_one_sentence_not_a_crash(
    without_compiler: Path, tmp_path: Path
) -> None:
    target = tmp_path / "target"
    shutil.copytree(without_compiler, target)
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    # Not even an ELF file: whoever tries to load it fails.
    (target / "torchweld" / f"_C{suffix}").write_bytes(b"built for another torch")
    record = {
        "built": True,
        "torch": "1.2.3",
        "isas": ["baseline"],
        "compiler": "g++",
        "source_hash": "0",
    }
    (target / "torchweld" / "_build_info.json").write_text(json.dumps(record))
    done = run_installed(target, "-c", "import torchweld; print(torchweld.__file__)")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(target))
    sentence = f"built for torch 1.2.3, but torch {torch.__version__} is installed; to rebuild it: "
    assert done.stderr.count(sentence) == 1
    assert "pip install --no-build-isolation" in done.stderr
    done = run_installed(target, "-W", "ignore", "-m", "torchweld", "info", "--json")
    assert done.returncode == 0, done.stderr
    assert sentence in json.loads(done.stdout)["problem"]


def load_setup() -> ModuleType:
    spec = importlib.util.spec_from_file_location("torchweld_setup", ROOT / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_no_build_depends_on_the_cpu_that_builds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHWELD_WIDE_AVX2", raising=False)
    setup = load_setup()
    for machine in ("x86_64", "AMD64", "aarch64", "arm64", "riscv64"):
        isas = setup.isa_flags(machine)
        assert isas
        assert not [flag for flags in isas.values() for flag in flags if "native" in flag]
    assert list(setup.isa_flags("AMD64")) == ["baseline", "avx2", "avx512"]
    assert list(setup.isa_flags("arm64")) == ["neon"]
    monkeypatch.setenv("TORCHWELD_WIDE_AVX2", "1")
    assert list(setup.isa_flags("AMD64")) == ["baseline", "avx2", "avx512", "avx2wide"]
    assert list(setup.isa_flags("arm64")) == ["neon"]
    assert list(setup.isa_flags("riscv64")) == ["baseline"]


def test_an_object_is_made_again_when_its_command_or_a_header_changes(tmp_path: Path) -> None:
    setup = load_setup()
    source, header, target = (tmp_path / name for name in ("a.cpp", "a b.h", "a.o"))
    source.write_text('#include "a b.h"\nint f() { return VALUE; }\n')
    header.write_text("#define VALUE 1\n")
    compiler = setup.find_compiler()
    if compiler is None:
        pytest.skip("no C++ compiler here")

    def command() -> list[str]:
        return [*compiler, "-O1", "-c", str(source), "-o", str(target)]

    setup.compile_object([*compiler, "-O1"], source, target, "a.cpp")
    assert setup.is_current(target, command())
    assert not setup.is_current(target, [*command(), "-g"])
    later = target.stat().st_mtime_ns + 10**9
    os.utime(header, ns=(later, later))
    assert not setup.is_current(target, command())


def test_kernels_of_one_instruction_set_share_no_symbol_with_another() -> None:
    """A weak symbol is merged by the linker: AVX-512 code could then run on a CPU without it."""
    build = kernel_build.build_info()
    nm = shutil.which("nm")
    if build is None or nm is None:
        pytest.skip("needs the compiled part and nm")
    folder = f"torch{build.torch}-{sys.implementation.cache_tag}-*"  # one per compiler
    objects = sorted((ROOT / "build").glob(f"{folder}/kernel_table.*.o"))
    if not objects:
        pytest.skip("the objects of this build are not in build/")
    assert {path.name.split(".")[1] for path in objects} >= set(build.isas)
    for path in objects:
        isa = path.name.split(".")[1]
        lines = subprocess.run([nm, str(path)], capture_output=True, text=True, check=True).stdout
        symbols = [line.split()[-2:] for line in lines.splitlines() if len(line.split()) >= 2]
        # This one is data: the address of the C++ runtime's exception handler, the same in each.
        weak = [name for kind, name in symbols if kind in "VvWwu" and "gxx_personality" not in name]
        assert weak == []
        exported = [name for kind, name in symbols if kind in "TDBR"]
        assert exported == [f"torchweld_kernels_{isa}"]


@pytest.mark.slow
def test_an_sdist_builds_and_runs_elsewhere(tmp_path: Path) -> None:
    source = copy_sources(tmp_path / "source")
    subprocess.run(
        [sys.executable, "setup.py", "-q", "sdist", "--dist-dir", str(tmp_path / "dist")],
        cwd=source,
        check=True,
    )
    (archive,) = (tmp_path / "dist").iterdir()
    with tarfile.open(archive) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    shipped = [*(ROOT / "csrc").rglob("*"), *(ROOT / "src/torchweld/plans/tables").glob("*.json")]
    wanted = {str(path.relative_to(ROOT)) for path in shipped if path.is_file()}
    assert wanted <= names
    assert {"setup.py", "LICENSE", "src/torchweld/schemas.inc", "src/torchweld/py.typed"} <= names
    assert not [name for name in names if name.endswith((".so", ".o", "_build_info.json"))]

    target = tmp_path / "target"
    done = install(archive, target, environment(os.environ["PATH"]))
    assert done.returncode == 0, done.stdout + done.stderr
    done = run_installed(target, "-m", "torchweld", "info", "--json")
    assert done.returncode == 0, done.stderr
    info = json.loads(done.stdout)
    assert info["problem"] is None
    assert info["build"]["torch"] == torch.__version__
    assert [isa["name"] for isa in info["isas"] if isa["in_use"]]
