"""Which tile a product takes: measured, kept on disk, stated; and on which device and stream.

No GPU is here: what asks the device is replaced, and tensors on it are stood in for.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.support.helpers import random_tensors
from torch import Tensor

from torchweld.core.blocks import parse_spec
from torchweld.machine import gpu_identity, kernel_build
from torchweld.machine.kernel_build import BuildInfo, CudaBuild
from torchweld.ops.backends import Form, gpu_backends
from torchweld.ops.gpu import (
    gpu_launches,
    gpu_support,
    gpu_ways,
    kernel_tiles,
    tile_tuning,
    triton_launches,
)
from torchweld.ops.gpu.kernel_tiles import POINTWISE, Tile

HALF = torch.bfloat16
STATED = kernel_tiles.stated("linear", False, HALF, 100)
FIRST, SECOND = torch.device("cuda:0"), torch.device("cuda:1")


def on_gpu(device: torch.device = FIRST) -> Any:
    """What is asked of a tensor there."""
    return SimpleNamespace(is_cuda=True, device=device, dtype=HALF)


class TunedGpu:
    """A GPU whose tiles are timed by a table. `current`: the current device, as torch has it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.timed: list[Tile] = []
        self.ran: list[Tile] = []
        self.current, self.capturing = FIRST, set[torch.device]()
        monkeypatch.delenv(tile_tuning.OFF_SWITCH, raising=False)
        monkeypatch.setattr(tile_tuning, "device_seconds", self.seconds)
        monkeypatch.setattr(tile_tuning, "_file", lambda device: folder / f"{device.index}.json")
        monkeypatch.setattr(torch.cuda, "device", self.device)
        monkeypatch.setattr(
            torch.cuda, "is_current_stream_capturing", lambda: self.current in self.capturing
        )
        tile_tuning._kept.cache_clear()

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        before, self.current = self.current, device
        yield
        self.current = before

    def seconds(self, run: Callable[[], None], near: Tensor) -> float:
        run()
        self.timed.append(self.ran.pop())
        return abs(self.timed[-1].rows - 32) + 1e-6 * self.timed[-1].columns

    def product(self, rows: int = 100, device: torch.device = FIRST) -> Tile:
        tile_tuning.run_best("linear", False, on_gpu(device), rows, (64, 4), self.ran.append)
        return self.ran[-1]


@pytest.fixture
def tuned_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[TunedGpu]:
    yield TunedGpu(monkeypatch, tmp_path)
    tile_tuning._kept.cache_clear()


def test_a_new_product_is_timed_once_and_kept_on_disk(tuned_gpu: TunedGpu, tmp_path: Path) -> None:
    assert tuned_gpu.product(100).rows == 32
    assert tuple(tuned_gpu.timed) == kernel_tiles.candidates("linear", False, HALF)
    assert tuned_gpu.product(120).rows == 32  # of the same class
    assert len(tuned_gpu.timed) == 6
    tile_tuning._kept.cache_clear()  # as a new process does
    assert tuned_gpu.product(100).rows == 32
    assert len(tuned_gpu.timed) == 6
    (tmp_path / "0.json").write_text("no tiles")
    tile_tuning._kept.cache_clear()
    assert tuned_gpu.product(100).rows == 32
    assert len(tuned_gpu.timed) == 12


def test_each_device_has_its_own_tiles(tuned_gpu: TunedGpu, tmp_path: Path) -> None:
    tuned_gpu.product()
    tuned_gpu.product(device=SECOND)
    assert len(tuned_gpu.timed) == 12
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.json", "1.json"]


def test_without_timing_the_shape_decides() -> None:
    ran: list[Tile] = []
    x = torch.empty(100, 4, dtype=HALF)
    tile_tuning.run_best("linear", False, x, 100, (), ran.append)
    assert ran == [STATED]
    assert ran[0].rows == 128
    assert kernel_tiles.stated("linear", False, HALF, 1).rows == 16


@pytest.mark.parametrize("how", ["variable", "with", "deterministic"])
def test_tuning_can_be_switched_off(
    tuned_gpu: TunedGpu, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Then a tile that was measured before does not count either."""
    tuned_gpu.product()
    tuned_gpu.timed.clear()
    if how == "variable":
        monkeypatch.setenv("TORCHWELD_GPU_TUNING", "0")
        found = tuned_gpu.product()
    elif how == "with":
        with tile_tuning.tuning(False):
            found = tuned_gpu.product()
        assert tuned_gpu.product().rows == 32
    else:
        torch.use_deterministic_algorithms(True)
        try:
            found = tuned_gpu.product()
        finally:
            torch.use_deterministic_algorithms(False)
    assert found == STATED
    assert tuned_gpu.timed == []


def test_nothing_is_timed_while_a_graph_is_captured(tuned_gpu: TunedGpu, tmp_path: Path) -> None:
    tuned_gpu.capturing.add(FIRST)
    assert tuned_gpu.product() == STATED
    assert tuned_gpu.timed == []
    assert list(tmp_path.iterdir()) == []
    tuned_gpu.capturing.clear()
    assert tuned_gpu.product().rows == 32  # what the capture took was not kept


def test_a_capture_takes_the_tile_that_was_measured_before(tuned_gpu: TunedGpu) -> None:
    """It is compiled; another one would be compiled and loaded inside the capture."""
    tuned_gpu.product()
    tuned_gpu.capturing.add(FIRST)
    assert tuned_gpu.product().rows == 32


def test_the_stream_of_the_tensors_device_is_asked(tuned_gpu: TunedGpu) -> None:
    tuned_gpu.capturing.add(SECOND)
    assert tuned_gpu.product(device=SECOND) == STATED
    assert tuned_gpu.product(device=FIRST).rows == 32


def test_kernels_are_launched_on_the_device_of_their_tensors(tuned_gpu: TunedGpu) -> None:
    ran_on: list[torch.device] = []

    class Kernel:
        __name__ = "one"

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *given, **by: ran_on.append(tuned_gpu.current)

    gpu_launches.forget()
    for device in (SECOND, FIRST):
        triton_launches.launch(Kernel(), (1,), POINTWISE, on_gpu(device))
    assert ran_on == [SECOND, FIRST]
    assert tuned_gpu.current == FIRST
    assert gpu_launches.launched() == ["one", "one"]


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, int]]]:
    """Compute capabilities of the GPUs of a machine; the second one is the current."""
    found: list[tuple[int, int]] = []
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(gpu_support, "absence", lambda: "")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(found))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: found[index])
    for asked in (gpu_support.device_problems, gpu_support.age_problem):
        asked.cache_clear()
    yield found
    for asked in (gpu_support.device_problems, gpu_support.age_problem):
        asked.cache_clear()


def test_an_old_gpu_beside_a_new_one_is_refused_alone(gpus: list[tuple[int, int]]) -> None:
    gpus += [(7, 5), (9, 0)]
    assert gpu_support.device_problems() == ()
    old = "cuda:0 has compute capability 7.5; these kernels need 8.0"
    assert gpu_support.device_reasons(FIRST) == [old]
    assert gpu_support.device_reasons(SECOND) == []
    assert gpu_support.device_reasons(torch.device("cuda")) == []  # the current one
    assert gpu_support.device_reasons(torch.device("cpu")) == []
    block = Form(kind="chain", forms=parse_spec("gelu"), sizes=((5, 3),))
    for backend in gpu_backends.BACKENDS:
        for device, refused in ((FIRST, True), (SECOND, False)):
            reasons = backend.unsupported_reasons(block, [(2, 5)], torch.float32, device)
            assert (old in reasons) is refused


def test_only_old_gpus_are_none(gpus: list[tuple[int, int]]) -> None:
    gpus += [(7, 5), (7, 0)]
    assert gpu_support.device_problems() == (
        "cuda:0 has compute capability 7.5; these kernels need 8.0",
        "cuda:1 has compute capability 7.0; these kernels need 8.0",
    )


class Clock:
    """An event of a stream; each one that ends is half a millisecond after the last."""

    recorded: list[object]

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: object) -> None:
        self.recorded.append(stream)

    def synchronize(self) -> None: ...

    def elapsed_time(self, other: Clock) -> float:
        return 1.0 / len(self.recorded)


def test_times_are_those_of_the_tensors_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Clock, "recorded", [], raising=False)
    monkeypatch.setattr(torch.cuda, "Event", Clock)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    runs: list[int] = []
    found = tile_tuning.device_seconds(lambda: runs.append(1), on_gpu(SECOND))
    assert len(runs) == tile_tuning.WARM_UPS + tile_tuning.RUNS
    assert Clock.recorded == ["stream of cuda:1"] * 2 * tile_tuning.RUNS
    assert found == pytest.approx(1e-3 / len(Clock.recorded))


def test_a_tile_too_large_for_the_device_is_never_the_fastest() -> None:
    def fails(message: str) -> Callable[[], None]:
        def run() -> None:
            raise RuntimeError(message)

        return run

    assert tile_tuning.device_seconds(fails("out of resource: shared memory"), on_gpu()) == float(
        "inf"
    )
    with pytest.raises(RuntimeError, match="misaligned"):
        tile_tuning.device_seconds(fails("misaligned address"), on_gpu())


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("way", gpu_ways.WAYS)
def test_deterministic_algorithms_run_and_every_value_is_written(way: str) -> None:
    """torch then fills fresh memory with NaN: what a kernel left out would show."""
    spec = "silu/b/separate;gelu/b;identity/b"
    tensors = random_tensors((7, 19, 9, 5), parse_spec(spec))
    leaves = [t.requires_grad_() for t in (torch.randn(18, 7), *tensors)]
    results = []
    for on in (True, False):
        torch.use_deterministic_algorithms(on)
        try:
            with tile_tuning.forcing(Tile(rows=16, columns=16, depth=16)):
                y = torch.ops.torchweld.chain_way(leaves[0], leaves[1:], spec, way)
                results.append([y, *torch.autograd.grad(y.sum(), leaves)])
        finally:
            torch.use_deterministic_algorithms(False)
    for ours, other in zip(*results, strict=True):
        assert not ours.isnan().any()
        assert torch.equal(ours, other)


@pytest.mark.parametrize(
    ("built", "capability", "runs"),
    [
        (["sm_80", "sm_90", "sm_100", "compute_100"], (8, 0), True),
        (["sm_80", "sm_90", "sm_100", "compute_100"], (8, 9), True),  # of sm_80's generation
        (["sm_80", "sm_90", "sm_100", "compute_100"], (12, 0), True),  # from PTX
        (["sm_80", "sm_90", "sm_100"], (12, 0), False),
        (["sm_86"], (8, 0), False),
        (["sm_90a"], (9, 0), True),
        (["sm_100a", "compute_100a"], (10, 3), False),
        (["sm_100f"], (10, 3), True),
        (["compute_80"], (12, 1), True),
        (["compute_120"], (9, 0), False),
    ],
)
def test_cuda_kernels_that_were_not_built_for_a_gpu_say_so(
    monkeypatch: pytest.MonkeyPatch,
    gpus: list[tuple[int, int]],
    built: list[str],
    capability: tuple[int, int],
    runs: bool,
) -> None:
    gpus += [capability, capability]
    info = BuildInfo(torch="9.9.9", isas=(), compiler="g++ 12", source_hash="0")
    info = replace(info, cuda=CudaBuild(architectures=tuple(built), compiler="nvcc"))
    monkeypatch.setattr(kernel_build, "build_info", lambda: info)
    monkeypatch.setattr(kernel_build, "build_problem", lambda: None)
    monkeypatch.setattr(gpu_support, "has_cuda_kernels", lambda: True)
    backend = next(one for one in gpu_backends.BACKENDS if one.name == "cuda")
    version = ".".join(map(str, capability))
    said = [
        f"torchweld's CUDA kernels were built for {', '.join(built)}, and cuda:{i} has compute "
        f'capability {version}; build torchweld again with TORCH_CUDA_ARCH_LIST="{version}"'
        for i in (0, 1)
    ]
    assert backend.unavailable() == ([] if runs else said)
    gpus[0] = (8, 0)
    gpus[1] = capability
    info = replace(info, cuda=CudaBuild(architectures=("sm_80", *built), compiler="nvcc"))
    block = Form(kind="chain", forms=parse_spec("gelu"), sizes=((5, 3),))
    for device, refused in ((FIRST, False), (SECOND, not runs and capability != (8, 0))):
        reasons = backend.unsupported_reasons(block, [(2, 5)], torch.float32, device)
        assert any("were built for" in why for why in reasons) is refused


@pytest.mark.parametrize(
    ("there", "named", "interpreter", "problem"),
    [
        (("gcc",), None, "0", ""),
        (("clang",), None, "0", ""),
        ((), None, "0", "Triton needs a C compiler, and there is no gcc or clang; install one"),
        ((), None, "1", ""),
        (("gcc",), "nocc", "0", "Triton needs a C compiler, and CC='nocc' is no program"),
        (("mycc",), "mycc", "0", ""),
    ],
)
def test_triton_without_a_c_compiler_says_so(
    monkeypatch: pytest.MonkeyPatch,
    there: tuple[str, ...],
    named: str | None,
    interpreter: str,
    problem: str,
) -> None:
    """It compiles what launches a kernel when that first runs."""
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}" if name in there else None)
    monkeypatch.setattr(gpu_support, "triton_version", lambda: "3.7.1")
    monkeypatch.setenv("TRITON_INTERPRET", interpreter)
    monkeypatch.delenv("CC", raising=False)
    if named is not None:
        monkeypatch.setenv("CC", named)
    found = gpu_support.triton_problems()
    assert len(found) == bool(problem)
    assert "".join(found).startswith(problem)


class Measured:
    """What the fingerprint of tiles is made of; a test changes one at a time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, sources: Path) -> None:
        self.properties = SimpleNamespace(name="NVIDIA A100", major=8, minor=0)
        self.driver, self.triton, self.sources = 13000, "3.7.1", sources
        monkeypatch.setattr(torch.version, "hip", None)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: self.properties)
        monkeypatch.setattr(torch._C, "_cuda_getDriverVersion", lambda: self.driver, raising=False)
        monkeypatch.setattr(gpu_identity, "triton_version", lambda: self.triton)
        (sources / "triton_one.py").write_text("first")
        (sources / "kernel_tiles.py").write_text("tiles")
        monkeypatch.setattr(tile_tuning, "__file__", str(sources / "tile_tuning.py"))
        monkeypatch.setattr(kernel_tiles, "__file__", str(sources / "kernel_tiles.py"))

    def fingerprint(self) -> str:
        tile_tuning.fingerprint.cache_clear()
        return tile_tuning.fingerprint(FIRST)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Measured]:
    yield Measured(monkeypatch, tmp_path)
    tile_tuning.fingerprint.cache_clear()


CHANGES: dict[str, Callable[[Measured], object]] = {
    "name": lambda m: setattr(m.properties, "name", "NVIDIA H100"),
    "capability": lambda m: setattr(m.properties, "minor", 6),
    "AMD's architecture": lambda m: setattr(m.properties, "gcnArchName", "gfx942"),
    "driver": lambda m: setattr(m, "driver", 13010),
    "triton": lambda m: setattr(m, "triton", "3.9.0"),
    "no triton": lambda m: setattr(m, "triton", None),
    "a kernel": lambda m: (m.sources / "triton_one.py").write_text("other"),
    "another kernel": lambda m: (m.sources / "triton_two.py").write_text("new"),
    "the candidates": lambda m: (m.sources / "kernel_tiles.py").write_text("other"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_tiles_are_kept_by_all_that_their_speed_depends_on(
    measured: Measured, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    before = measured.fingerprint()
    assert measured.fingerprint() == before
    assert len(before) == 12
    CHANGES[change](measured)
    assert measured.fingerprint() != before


def test_another_torch_has_other_tiles(measured: Measured, monkeypatch: pytest.MonkeyPatch) -> None:
    before = measured.fingerprint()
    monkeypatch.setattr(torch, "__version__", "9.9.9")
    assert measured.fingerprint() != before


def test_the_driver_of_rocm_is_part_of_torch(
    measured: Measured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There the question about CUDA's driver has no meaning."""
    assert gpu_identity.set_up_of(FIRST) == "NVIDIA A100 (8.0), driver API 13000, Triton 3.7.1"
    monkeypatch.setattr(torch.version, "hip", "7.1")
    measured.properties = SimpleNamespace(name="AMD Instinct MI300X", gcnArchName="gfx942")
    assert gpu_identity.set_up_of(FIRST) == "AMD Instinct MI300X (gfx942), Triton 3.7.1"
    monkeypatch.delattr(torch._C, "_cuda_getDriverVersion")
    monkeypatch.setattr(torch.version, "hip", None)
    assert gpu_identity.set_up_of(FIRST) == "AMD Instinct MI300X (gfx942), Triton 3.7.1"


def test_the_file_of_tiles_is_named_by_the_fingerprint(measured: Measured) -> None:
    assert tile_tuning._file(FIRST).name == f"tiles-{measured.fingerprint()}.json"
