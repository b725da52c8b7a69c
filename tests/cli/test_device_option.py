"""`--device` where there is no GPU, and what is moved where there is one."""

from __future__ import annotations

import subprocess

import pytest
import torch
from torch import nn

from torchweld.cli import device_option
from torchweld.cli.device_option import checked_device
from torchweld.cli.main import run
from torchweld.core.errors import TorchweldError
from torchweld.core.model_inputs import Inputs, as_workloads
from torchweld.machine import gpu_identity
from torchweld.machine.gpu_identity import Gpu
from torchweld.models.targets import Target, moved
from torchweld.ops.gpu import gpu_support

WHY = "torch finds no GPU; see nvidia-smi, or rocm-smi"


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_support, "absence", lambda: WHY)


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("verb", [["fuse"], ["profile"], ["bench"]])
def test_without_a_gpu_verbs_say_why_and_what_to_do(
    verb: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*verb, "--device", "cuda"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.strip().splitlines()
    assert WHY in line
    assert "docs/gpu.md" in line


def test_odd_names() -> None:
    assert checked_device(None) is None
    assert checked_device("cpu") == torch.device("cpu")
    with pytest.raises(TorchweldError, match="give cpu, cuda"):
        checked_device("gpu")


def test_a_number_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_support, "absence", lambda: "")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert checked_device("cuda") == torch.device("cuda")
    with pytest.raises(TorchweldError, match="the last is cuda:1"):
        checked_device("cuda:2")


def test_model_and_inputs_are_moved() -> None:
    x = torch.randn(2, 3, requires_grad=True)
    workloads = tuple(as_workloads(Inputs(x, {"again": x})))
    there = moved(
        Target(name="t", model=nn.Linear(3, 3), workloads=workloads), torch.device("meta")
    )
    assert {p.device.type for p in there.model.parameters()} == {"meta"}
    (workload,) = there.workloads
    first, second = workload.tensors()
    assert first is second
    assert first.requires_grad
    assert first.device.type == "meta"


def test_a_target_on_a_gpu_says_what_it_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(
        name="a GPU", capability="9.0", memory_bytes=80 << 30, runtime="CUDA 13.0", driver="5"
    )
    monkeypatch.setattr(device_option, "gpu_here", lambda device: gpu)
    monkeypatch.setattr(device_option, "moved", lambda target, device: target)
    target = Target(name="t", model=nn.Linear(3, 3), workloads=(), notes=("a note",))
    assert device_option.on_device(target, None) is target
    assert device_option.on_device(target, torch.device("cpu")) is target
    notes = device_option.on_device(target, torch.device("cuda:1")).notes
    assert notes == (
        "a note",
        "on cuda:1: a GPU, compute capability 9.0, 85.9 GB, CUDA 13.0, driver 5",
    )


def test_a_driver_that_nobody_tells_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object, **__: object) -> None:
        raise FileNotFoundError("nvidia-smi")

    monkeypatch.setattr(subprocess, "run", missing)
    assert gpu_identity.driver_version() == ""
    assert Gpu(name="a GPU").words == "a GPU"
