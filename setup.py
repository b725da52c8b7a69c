"""Builds `torchweld._C` against the installed torch; everything else stands in pyproject.toml.

In: `csrc/`, a C++ compiler and an importable torch. Out: the extension module and, beside it,
`_build_info.json`, which says what was built, with what and for which torch, or why nothing was.
`torchweld.machine.kernel_build` reads that file before anything tries to load the extension.

The kernels know nothing of torch and are compiled once per instruction set. Objects are kept in
`build/` by torch version and compiler; one is compiled again only when its command or a file it
read changed.

The CUDA kernels are built in if torch has CUDA and nvcc is found. Without them, or if nvcc fails,
the rest is installed, and the record has the reason.

Environment: `CXX` names the compiler, `CXXFLAGS` and `LDFLAGS` are appended, `TORCHWELD_NO_EXT=1`
leaves the compiled part out. `TORCHWELD_CUDA=0` leaves the CUDA kernels out, `TORCHWELD_CUDA=1`
fails the install if they cannot be built; `CUDA_HOME` names the toolkit, and
`TORCH_CUDA_ARCH_LIST` the architectures. `TORCHWELD_WIDE_AVX2=1` adds `avx2wide`, kernels that
compute in AVX-512's 64-byte vectors with AVX2's instructions: slow, never chosen unless
TORCHWELD_ISA names it, and a way to test that width on machines without AVX-512.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from setuptools import Extension, setup
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, PlatformError

ROOT = Path(__file__).resolve().parent
CSRC = ROOT / "csrc"
PACKAGE = ROOT / "src" / "torchweld"

# The one list of what the kernels are compiled for. A binary carries all of its machine's sets and
# picks at load, so nothing here may depend on the CPU that happens to build.
ISA_FLAGS: dict[str, dict[str, list[str]]] = {
    "x86_64": {
        "baseline": [],
        "avx2": ["-mavx2", "-mfma", "-mf16c"],
        "avx512": [
            *("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma", "-mf16c"),
            "-mprefer-vector-width=512",
        ],
    },
    "aarch64": {"neon": ["-march=armv8-a"]},
}
WIDE_AVX2 = {"avx2wide": [*ISA_FLAGS["x86_64"]["avx2"], "-DTORCHWELD_VEC_BYTES=64", "-Wno-psabi"]}
OTHER_MACHINE: dict[str, list[str]] = {"baseline": []}

KERNEL_SOURCES = ["kernels/kernel_table.cpp"]
PLAIN_SOURCES = ["kernels/isa_dispatch.cpp", "kernels/scratch.cpp", "kernels/team.cpp"]
TORCH_SOURCES = [
    "torch_glue/torch_ops.cpp",
    "torch_glue/autograd.cpp",
    "torch_glue/training_ops.cpp",
    "torch_glue/way_ops.cpp",
    "python_glue/extension_module.cpp",
]

# The way `cuda` of a GPU: kernels by nvcc, the rest by the C++ compiler.
CUDA_KERNEL_SOURCES = ["cuda/cuda_kernels.cu"]
CUDA_PLAIN_SOURCES = ["cuda/launch_log.cpp"]
CUDA_TORCH_SOURCES = ["torch_glue/cuda_ops.cpp"]
# A100, H100, B200; PTX of the newest is what later GPUs compile from. The kernels need 8.0.
CUDA_ARCHITECTURES = "8.0;9.0;10.0+PTX"
LEAST_ARCHITECTURE = 80
NVCC_FLAGS = ["-O3", "-std=c++17", "-Xcompiler", "-fPIC,-fvisibility=hidden"]

COMMON_FLAGS = ["-O3", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra"]
# Kernels never read errno or floating-point traps; without these two flags GCC keeps scalar paths.
# Products and sums contract to fused multiply-adds: GCC's default, said for clang.
KERNEL_FLAGS = ["-std=c++17", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast"]
# CPython's own idiom leaves most fields of a type to be zero.
TORCH_FLAGS = ["-std=c++20", "-DTORCH_EXTENSION_NAME=_C", "-Wno-missing-field-initializers"]
# Entries of OpenMP's runtime are called (kernels/team.cpp) but not linked: they come from the one
# that torch loaded, under whatever file name the wheel ships it, and there is never a second thread
# pool.
LINK_FLAGS = (
    ["-bundle", "-undefined", "dynamic_lookup"] if sys.platform == "darwin" else ["-shared"]
)


def isa_flags(machine: str) -> dict[str, list[str]]:
    """Instruction sets to build for a `platform.machine()`, each with its compiler flags."""
    name = {"amd64": "x86_64", "arm64": "aarch64"}.get(machine.lower(), machine.lower())
    wide = name == "x86_64" and os.environ.get("TORCHWELD_WIDE_AVX2", "0") not in {"", "0"}
    return {**ISA_FLAGS.get(name, OTHER_MACHINE), **(WIDE_AVX2 if wide else {})}


def find_compiler() -> list[str] | None:
    """The C++ compiler's command, or None when the machine has none."""
    named = os.environ.get("CXX")
    if named:
        command = shlex.split(named)
        if shutil.which(command[0]) is None:
            raise PlatformError(
                f"CXX={named!r}: no such program; name a C++ compiler, or unset CXX to use g++, "
                "clang++ or c++ from PATH"
            )
        return command
    for name in ("g++", "clang++", "c++"):
        if shutil.which(name) is not None:
            return [name]
    return None


def first_line(command: list[str]) -> str:
    done = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False)
    if done.returncode != 0 or not done.stdout.strip():
        raise CompileError(
            f"`{shlex.join(command)} --version` failed with exit code {done.returncode}: "
            f"{done.stderr.strip() or 'no message'}"
        )
    return done.stdout.splitlines()[0]


def source_hash() -> str:
    """One short hash of everything the compiled part is made of, flags included."""
    digest = hashlib.sha256(Path(__file__).read_bytes())
    for path in [*sorted(CSRC.rglob("*")), PACKAGE / "schemas.inc"]:
        if path.suffix in {".h", ".cpp", ".inc", ".cu", ".cuh"} and path.is_file():
            digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def is_current(target: Path, command: list[str]) -> bool:
    """Whether `target` was made by this very command from files that have not changed since."""
    record, depfile = target.with_suffix(".cmd"), target.with_suffix(".d")
    if not (target.exists() and record.exists() and depfile.exists()):
        return False
    if record.read_text() != shlex.join(command):
        return False
    listed = depfile.read_text().replace("\\\n", " ").partition(":")[2].replace("\\ ", "\0")
    inputs = [Path(name.replace("\0", " ")) for name in listed.split()]
    made = target.stat().st_mtime_ns
    return all(path.exists() and path.stat().st_mtime_ns <= made for path in inputs)


def run_compiler(command: list[str], what: str) -> None:
    print(f"torchweld: {what}", flush=True)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise CompileError(
            f"{what} failed with exit code {done.returncode}. To install without the compiled "
            f"part, set TORCHWELD_NO_EXT=1. The command was:\n{shlex.join(command)}\n"
            f"The compiler said:\n{done.stderr}"
        )
    if done.stderr:
        print(done.stderr, file=sys.stderr, flush=True)


def compile_object(command: list[str], source: Path, target: Path, what: str) -> None:
    command = [*command, "-c", str(source), "-o", str(target)]
    if is_current(target, command):
        return
    record = target.with_suffix(".cmd")
    record.unlink(missing_ok=True)
    run_compiler([*command, "-MD", "-MF", str(target.with_suffix(".d"))], f"compiling {what}")
    record.write_text(shlex.join(command))


class NoCudaError(Exception):
    """Why there are no CUDA kernels in this build, in one sentence."""


class CompiledCuda(NamedTuple):
    architectures: list[str]
    compiler: str
    objects: list[Path]
    libraries: list[str]


def cuda_architectures(asked: str) -> list[str]:
    """nvcc's names of what a TORCH_CUDA_ARCH_LIST asks for, as sm_90 or compute_90 for PTX.

    Architectures that the kernels do not run on are left out.
    """
    found: list[str] = []
    for one in re.split(r"[\s;,]+", asked.strip()):
        read = re.fullmatch(r"(\d+)\.(\d)([af]?)(\+PTX)?", one)
        if read is None:
            raise NoCudaError(
                f"TORCH_CUDA_ARCH_LIST has {one!r}; expected versions, as in {CUDA_ARCHITECTURES!r}"
            )
        major, minor, variant, ptx = read.groups()
        if int(major + minor) >= LEAST_ARCHITECTURE:
            found += [f"sm_{major}{minor}{variant}"]
            found += [f"compute_{major}{minor}{variant}"] * bool(ptx)
    if not found:
        raise NoCudaError(f"TORCH_CUDA_ARCH_LIST={asked!r} names none from 8.0 on, which they need")
    return found


def architecture_flags(names: list[str]) -> list[str]:
    return [f"-gencode=arch=compute_{name.partition('_')[2]},code={name}" for name in names]


def find_nvcc() -> list[str]:
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if home := os.environ.get(name):
            if shutil.which(f"{home}/bin/nvcc") is None:
                raise NoCudaError(f"{name}={home!r} has no bin/nvcc")
            return [f"{home}/bin/nvcc"]
    if shutil.which("nvcc") is None:
        raise NoCudaError("nvcc was not found (CUDA_HOME, or nvcc on PATH)")
    return ["nvcc"]


def cuda_toolkit(nvcc: list[str], torch_cuda: str) -> tuple[Path, str]:
    """The toolkit's folder, by nvcc's own word, and its version, which must be torch's CUDA."""
    said = subprocess.run([*nvcc, "--version"], capture_output=True, text=True, check=False)
    release = re.search(r"release (\d+)\.(\d+)", said.stdout)
    if release is None:
        raise NoCudaError(f"`{shlex.join(nvcc)} --version` names no release")
    version = ".".join(release.groups())
    if release[1] != torch_cuda.partition(".")[0]:
        raise NoCudaError(f"nvcc is of CUDA {version}, but torch was built for CUDA {torch_cuda}")
    dry = [*nvcc, "--dryrun", "-E", "-x", "cu", os.devnull]
    told = subprocess.run(dry, capture_output=True, text=True, check=False)
    top = re.search(r"^#\$ TOP=(.+)$", told.stderr + told.stdout, re.MULTILINE)
    home = Path(top[1]) if top else Path(str(shutil.which(nvcc[0]))).resolve().parents[1]
    return home.resolve(), f"nvcc {version}"


def cuda_build(torch: Any, base: list[str], torch_flags: list[str], folder: Path) -> CompiledCuda:
    """Compiles the CUDA kernels; NoCudaError if there can be none."""
    asked = os.environ.get("TORCHWELD_CUDA")
    if asked == "0":
        raise NoCudaError("TORCHWELD_CUDA=0 was set when it was installed")
    if torch.version.cuda is None:
        raise NoCudaError(f"torch {torch.__version__} is built without CUDA")
    if not (CSRC / CUDA_KERNEL_SOURCES[0]).exists():
        raise NoCudaError("their source is not in csrc/cuda")
    nvcc = find_nvcc()
    home, version = cuda_toolkit(nvcc, torch.version.cuda)
    names = cuda_architectures(os.environ.get("TORCH_CUDA_ARCH_LIST") or CUDA_ARCHITECTURES)
    includes = ["-isystem", str(home / "include")]
    device = [*nvcc, *NVCC_FLAGS, f"-I{CSRC}", f"-I{PACKAGE}", *architecture_flags(names)]
    plain = [*base, *KERNEL_FLAGS]
    objects = []
    for sources, command in (
        (CUDA_KERNEL_SOURCES, device),
        (CUDA_PLAIN_SOURCES, plain),
        (CUDA_TORCH_SOURCES, [*base, *torch_flags, *includes]),
    ):
        for name in sources:
            objects.append(folder / f"{Path(name).stem}.o")
            try:
                compile_object(command, CSRC / name, objects[-1], name)
            except CompileError as error:
                print(error, file=sys.stderr, flush=True)
                raise NoCudaError(f"{name} does not compile with {version}") from error
    folders = [home / "lib64", *sorted(home.glob("targets/*-linux/lib"))]
    libraries = [f"-L{one}" for one in folders if one.is_dir()]
    return CompiledCuda(names, version, objects, [*libraries, "-lcudart", "-lc10_cuda"])


def build_extension(
    torch: Any, compiler: list[str], objects_dir: Path, module: Path
) -> dict[str, Any]:
    """Compile every object that is out of date, two or more at a time, and link `module`.

    Returns what is recorded about the CUDA kernels.
    """
    extra = shlex.split(os.environ.get("CXXFLAGS", ""))
    base = [*compiler, *COMMON_FLAGS, f"-I{CSRC}", f"-I{PACKAGE}"]
    isas = isa_flags(platform.machine())
    have = [f"-DTORCHWELD_HAVE_{isa}=1" for isa in isas]
    torch_root = Path(torch.__file__).parent
    # -isystem: warnings in torch's and Python's headers are not ours to mend.
    torch_flags = [
        *TORCH_FLAGS,
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
        *("-isystem", str(torch_root / "include")),
        *("-isystem", str(torch_root / "include" / "torch" / "csrc" / "api" / "include")),
        *("-isystem", sysconfig.get_path("include")),
    ]

    # The torch files take longest, so they start first.
    jobs: list[tuple[list[str], Path, Path, str]] = []
    for name in TORCH_SOURCES:
        target = objects_dir / f"{Path(name).stem}.o"
        jobs.append(([*base, *torch_flags, *extra], CSRC / name, target, name))
    for name in KERNEL_SOURCES:
        for isa, flags in isas.items():
            command = [*base, *KERNEL_FLAGS, *flags, f"-DTORCHWELD_ISA={isa}", *extra]
            target = objects_dir / f"{Path(name).stem}.{isa}.o"
            jobs.append((command, CSRC / name, target, f"{name} for {isa}"))
    for name in PLAIN_SOURCES:
        target = objects_dir / f"{Path(name).stem}.o"
        jobs.append(([*base, *KERNEL_FLAGS, *have, *extra], CSRC / name, target, name))

    objects_dir.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(max_workers=max(1, os.cpu_count() or 1)) as pool:
        waiting = [pool.submit(compile_object, *job) for job in jobs]
        try:
            for job in waiting:
                job.result()
        except CompileError:
            pool.shutdown(cancel_futures=True)
            raise

    module.parent.mkdir(parents=True, exist_ok=True)
    # Linked beside and renamed, so that a process that has the old module mapped keeps it whole.
    fresh = module.with_name(module.name + ".new")

    def link(objects: list[Path], libraries: list[str]) -> None:
        libraries = ["-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python", *libraries]
        command = [
            *(*compiler, *LINK_FLAGS, *map(str, objects), "-o", str(fresh)),
            *(f"-L{torch_root / 'lib'}", *libraries, *shlex.split(os.environ.get("LDFLAGS", ""))),
        ]
        run_compiler(command, f"linking {module.name}")
        fresh.replace(module)

    objects = [job[2] for job in jobs]
    try:
        cuda = cuda_build(torch, [*base, *extra], torch_flags, objects_dir)
        try:
            link([*objects, *cuda.objects], cuda.libraries)
        except CompileError as error:
            print(error, file=sys.stderr, flush=True)
            raise NoCudaError(f"what {cuda.compiler} compiled does not link") from error
    except NoCudaError as error:
        if os.environ.get("TORCHWELD_CUDA", "0") not in {"", "0"}:
            raise CompileError(
                f"TORCHWELD_CUDA is set, but the CUDA kernels cannot be built: {error}; unset it "
                "to install without them"
            ) from error
        print(f"torchweld: without CUDA kernels: {error}", flush=True)
        link(objects, [])
        return {"built": False, "reason": str(error)}
    return {"built": True, "architectures": cuda.architectures, "compiler": cuda.compiler}


class BuildTorchweld(build_ext):
    """`build_ext` for the one extension there is: builds it, or records why it was left out."""

    def module_path(self) -> Path:
        folder = PACKAGE if self.inplace else Path(self.build_lib) / "torchweld"
        return folder / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"

    def run(self) -> None:
        module = self.module_path()
        info = self.build_or_explain(module)
        module.parent.mkdir(parents=True, exist_ok=True)
        (module.parent / "_build_info.json").write_text(json.dumps(info, indent=2) + "\n")
        if not info["built"]:
            module.unlink(missing_ok=True)
            print(f"torchweld: installing without the compiled part: {info['reason']}", flush=True)

    def build_or_explain(self, module: Path) -> dict[str, Any]:
        if os.environ.get("TORCHWELD_NO_EXT", "0") not in {"", "0"}:
            return {"built": False, "reason": "TORCHWELD_NO_EXT was set when it was installed"}
        compiler = find_compiler()
        if compiler is None:
            return {
                "built": False,
                "reason": "no C++ compiler was found when it was installed "
                "(CXX, g++, clang++, c++ on PATH)",
            }
        try:
            import torch
        except ImportError as error:
            raise PlatformError(
                f"torchweld is compiled against the installed torch, and torch cannot be imported "
                f"({error}): install torch first and use `pip install --no-build-isolation`"
            ) from error
        version = first_line(compiler)
        # By compiler too, so that two of them do not undo each other's work.
        key = f"torch{torch.__version__}-{sys.implementation.cache_tag}-{Path(compiler[0]).name}"
        cuda = build_extension(torch, compiler, ROOT / "build" / key, module)
        return {
            "built": True,
            "torch": torch.__version__,
            "isas": list(isa_flags(platform.machine())),
            "compiler": version,
            "source_hash": source_hash(),
            "cuda": cuda,
        }

    def get_outputs(self) -> list[str]:
        module = self.module_path()
        return [str(p) for p in (module, module.parent / "_build_info.json") if p.exists()]

    def get_output_mapping(self) -> dict[str, str]:
        return {}


class CleanBuild(build):
    """`build` from an empty folder: a module deleted from src must not live on in the wheel."""

    def run(self) -> None:
        shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


# Run as a script by pip and by hand; imported by tests for the table of instruction sets.
if __name__ == "__main__":
    setup(
        ext_modules=[Extension("torchweld._C", sources=[])],
        cmdclass={"build": CleanBuild, "build_ext": BuildTorchweld},
    )
