"""`make gpu-test`: the tests of GPU kernels on a real GPU, as far as that shows without one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.support.gpu_device import (
    DEVICE_VARIABLE,
    Noted,
    check_noted,
    chosen_device,
    kernels_of,
    main,
    on_real_gpu,
    real_gpu,
)

from torchweld.ops.gpu import gpu_launches, gpu_support

ROOT = Path(__file__).parents[2]
FUSED = ROOT / "tests" / "traces" / "a100_triton_fused.json.gz"
WHY = "torch finds no GPU; see nvidia-smi, or rocm-smi"


def test_without_a_gpu_it_says_why_and_gives_two(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_support, "device_problems", lambda: (WHY,))
    assert main() == 2
    said = capsys.readouterr().err
    assert WHY in said
    assert "make test" in said
    for problems in ("device_problems", "triton_problems", "extension_problems"):
        monkeypatch.setattr(gpu_support, problems, list)
    monkeypatch.setattr(gpu_support, "has_cuda_kernels", lambda: False)
    assert main() == 0
    assert "CUDA C++ kernels" in capsys.readouterr().out


def test_the_check_is_a_program_of_its_own() -> None:
    if not gpu_support.absence():
        pytest.skip("there is a GPU here")
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.gpu_device"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert "needs a GPU" in done.stderr


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_asks_for_the_gpu_before_the_tests() -> None:
    # A make of its own, even if make runs the tests: a make inside make says where it is.
    alone = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(
        ["make", "-n", "gpu-test"], cwd=ROOT, capture_output=True, text=True, check=True, env=alone
    )
    asked, tests = done.stdout.strip().splitlines()[-2:]
    assert asked.endswith("-m tests.support.gpu_device")
    assert tests.startswith(f"{DEVICE_VARIABLE}=cuda ")
    assert tests.endswith("tests/ops/gpu tests/ops/cuda")


def test_where_tests_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DEVICE_VARIABLE, raising=False)
    assert not on_real_gpu()
    monkeypatch.setenv(DEVICE_VARIABLE, "cuda")
    assert on_real_gpu()
    monkeypatch.setenv(DEVICE_VARIABLE, "gpu")
    with pytest.raises(ValueError, match="expected cpu or cuda"):
        chosen_device()


def test_what_was_launched_has_to_be_in_the_trace() -> None:
    ran = kernels_of(FUSED)  # of a real A100
    assert ran == ["triton_poi_fused_add_cos_sin_0"]
    check_noted({"triton_poi_fused_add"}, ran)
    check_noted((), ())
    with pytest.raises(AssertionError, match=r"not in the trace: \['torchweld_linear'\]"):
        check_noted({"torchweld_linear"}, ran)
    with pytest.raises(AssertionError, match="no kernel at all"):
        check_noted({"torchweld_linear"}, ())


def test_names_that_a_test_forgets_are_still_checked() -> None:
    noted = Noted(2)
    noted.append("torchweld_linear")
    noted.clear()
    assert list(noted) == []
    assert noted.ever == {"torchweld_linear"}


@pytest.fixture
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


@pytest.mark.usefixtures("no_waiting")
def test_tensors_are_made_on_the_device_and_launches_are_noted() -> None:
    """`meta` stands for a GPU, which is not here."""
    with real_gpu(device="meta"):
        assert torch.ones(2).device.type == "meta"
        assert gpu_launches.launched() == []
    assert torch.ones(2).device.type == "cpu"


@pytest.mark.usefixtures("no_waiting")
def test_a_kernel_that_no_trace_has_fails_its_test() -> None:
    if not gpu_support.absence():
        pytest.skip("there is a GPU here, whose kernels the trace may have")
    gpu_launches.forget()  # what earlier tests launched

    def unseen(noted: str, *more: str) -> None:
        with real_gpu(lambda: more, device="cpu"):
            torch.ones(2).exp()
            gpu_launches.note(noted)
            gpu_launches.forget()

    with pytest.raises(AssertionError, match=r"torchweld_linear launched, .* no kernel at all"):
        unseen("torchweld_linear")
    with pytest.raises(AssertionError, match=r"cuda_narrow, torchweld_linear launched"):
        unseen("torchweld_linear", "torchweld_cuda_narrow")
    assert gpu_launches.launched() == []
