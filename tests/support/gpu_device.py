"""The device of tests of GPU kernels: Triton's interpreter on CPU tensors, or a real GPU.

`make gpu-test` sets TORCHWELD_TEST_DEVICE=cuda: the same tests then make their tensors on the GPU,
and what they note as launched has to be in the trace that torch.profiler takes of each of them.
`python -m tests.support.gpu_device` says why there is no GPU, and exits with 2.
"""

from __future__ import annotations

import os
import sys
import tempfile
import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

DEVICE_VARIABLE = "TORCHWELD_TEST_DEVICE"
DEVICES = ("cpu", "cuda")


def chosen_device() -> str:
    """`cuda` for the real one; `cpu` for the interpreter."""
    name = os.environ.get(DEVICE_VARIABLE, "cpu")
    if name not in DEVICES:
        raise ValueError(f"{DEVICE_VARIABLE} is {name!r}; expected {' or '.join(DEVICES)}")
    return name


def on_real_gpu() -> bool:
    return chosen_device() == "cuda"


def shared_memory() -> int:
    """Bytes that a block on this GPU can have; an A100's where none is here, as on the host."""
    if not on_real_gpu():
        return 163 << 10
    from torchweld.ops.gpu import gpu_support

    return gpu_support.shared_memory()


def needs_memory(needed: int) -> None:
    """Skips a test on a GPU without so much free memory. On the CPU, pages are never touched."""
    if not on_real_gpu():
        return
    import pytest
    import torch

    free, _ = torch.cuda.mem_get_info()
    if free < needed:
        pytest.skip(f"it needs {needed >> 20} MB of the GPU's memory; {free >> 20} MB are free")


class Noted(deque[str]):
    """Names of launched kernels; `ever` keeps those that tests forget."""

    def __init__(self, most: int) -> None:
        super().__init__(maxlen=most)
        self.ever: set[str] = set()

    def append(self, name: str) -> None:
        self.ever.add(name)
        super().append(name)


def check_noted(noted: Collection[str], kernels: Collection[str]) -> None:
    """Every kernel that was noted as launched is part of the name of one that ran.

    kernels: what the trace has. A trace without kernels does not tell that nothing ran.
    """
    missing = [name for name in sorted(noted) if not any(name in ran for ran in kernels)]
    if missing and not kernels:
        raise AssertionError(
            f"{', '.join(missing)} launched, but torch.profiler recorded no kernel at all; CUPTI "
            "or ROCtracer may be missing, or another tool may hold it"
        )
    assert not missing, f"launched, but not in the trace: {missing}; it has {sorted(set(kernels))}"


def kernels_of(trace: Path) -> list[str]:
    """Names of what ran on the device."""
    from torchweld.profiles.recorded_events import KERNEL
    from torchweld.profiles.traces.trace_events import read_recording

    return [event.name for event in read_recording(trace).events if event.kind == KERNEL]


@contextmanager
def real_gpu(more: Callable[[], Collection[str]] = list, device: str = "cuda") -> Iterator[None]:
    """Inside, tensors are made on the GPU; at the end, what was launched has to be in the trace.

    more: names of kernels that were launched in another way than Triton's
    """
    import pytest
    import torch
    from torch.profiler import ProfilerActivity, profile

    from torchweld.ops.gpu import gpu_launches, tile_tuning

    noted = Noted(gpu_launches.MOST_KEPT)
    profiler = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True)
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setattr(gpu_launches, "_launched", noted)
        patch.setenv(tile_tuning.OFF_SWITCH, "0")  # tests say which tiles they mean
        with _unwarned():
            profiler.start()
        try:
            with torch.device(device):
                yield
            torch.cuda.synchronize()
        finally:
            with _unwarned():
                profiler.stop()
        names = {*noted.ever, *more()}
        if names:
            trace = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(trace))
            check_noted(names, kernels_of(trace))


@contextmanager
def _unwarned() -> Iterator[None]:
    """What the profiler says of itself would fail a test, where every warning is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def main() -> int:
    """0 if `make gpu-test` can run here."""
    from torchweld.ops.gpu import gpu_support

    problems = [*gpu_support.device_problems(), *gpu_support.triton_problems()]
    problems += gpu_support.extension_problems()
    if problems:
        print(
            f"make gpu-test needs a GPU that runs these kernels: {'; '.join(problems)}. Without "
            "one, make test runs the same tests in Triton's interpreter",
            file=sys.stderr,
        )
    elif not gpu_support.has_cuda_kernels():
        print("torchweld was built without its CUDA C++ kernels here: their tests are left out")
    return 2 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
