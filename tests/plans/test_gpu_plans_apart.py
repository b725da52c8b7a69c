"""What was measured on one GPU is not used on another: blocks, remembered times, and plans.

No GPU is here: tensors of CUDA are fake, and what is asked of the device is replaced.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import torchweld as tw
from torchweld.machine import gpu_identity
from torchweld.plans.alike_blocks import alike_blocks
from torchweld.plans.block_calls import gpus_of, set_up_of_tensors
from torchweld.plans.measurement_cache import MeasurementCache

NAMES = {0: "NVIDIA A100", 1: "NVIDIA H100", 2: "NVIDIA A100"}
CAPABILITIES = {0: (8, 0), 1: (9, 0), 2: (8, 0)}


@pytest.fixture(autouse=True)
def three_gpus(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """cuda:0 and cuda:2 are of one kind. `driver` and `triton` can be set."""
    now = SimpleNamespace(driver=13000, triton="3.7.1")

    def properties(device: torch.device) -> SimpleNamespace:
        assert device.index is not None
        major, minor = CAPABILITIES[device.index]
        return SimpleNamespace(name=NAMES[device.index], major=major, minor=minor)

    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(torch._C, "_cuda_getDriverVersion", lambda: now.driver, raising=False)
    monkeypatch.setattr(gpu_identity, "triton_version", lambda: now.triton)
    return now


class TwoMlps(nn.Module):
    """Two equal blocks, each on a device of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.norm = nn.LayerNorm(8)
        self.b = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.norm(self.a(x)))


def placed(model: TwoMlps, a: str, b: str) -> TwoMlps:
    with FakeTensorMode(allow_non_fake_inputs=True):
        for half, device in ((model.a, a), (model.b, b)):
            for module in half.modules():
                for name, p in list(module._parameters.items()):
                    if p is not None:
                        module._parameters[name] = nn.Parameter(torch.empty(p.shape, device=device))
    return model


@pytest.mark.parametrize(
    ("a", "b", "apart"),
    [
        ("cpu", "cpu", False),
        ("cuda:0", "cuda:0", False),
        ("cuda:0", "cuda:2", False),  # one kind
        ("cuda:0", "cuda:1", True),
        ("cpu", "cuda:0", True),
    ],
)
def test_blocks_on_other_gpus_are_tried_apart(a: str, b: str, apart: bool) -> None:
    model = TwoMlps().eval()
    blocks = tw.find(model, torch.randn(3, 8))
    assert len(blocks) == 2
    found = alike_blocks(placed(model, a, b), blocks, training=False)
    assert len(found) == (2 if apart else 1)


def test_the_set_up_names_gpu_driver_and_triton(three_gpus: SimpleNamespace) -> None:
    model = placed(TwoMlps(), "cuda:0", "cuda:1")
    first = "NVIDIA A100 (8.0), driver API 13000, Triton 3.7.1"
    assert gpus_of(model) == (first, "NVIDIA H100 (9.0), driver API 13000, Triton 3.7.1")
    assert set_up_of_tensors(list(model.a.parameters())) == first
    three_gpus.triton = None
    assert gpus_of(placed(TwoMlps(), "cuda:0", "cuda:2")) == (
        "NVIDIA A100 (8.0), driver API 13000, no Triton",
    )
    assert gpus_of(TwoMlps()) == ()
    assert set_up_of_tensors([torch.empty(1), torch.empty(1, device="meta")]) == "cpu"


@pytest.mark.parametrize("changed", ["driver", "triton"])
def test_times_are_remembered_by_gpu_driver_and_triton(
    three_gpus: SimpleNamespace, changed: str
) -> None:
    def path(model: nn.Module) -> object:
        return MeasurementCache.of_this_machine(gpus_of(model))._path

    a100, h100 = placed(TwoMlps(), "cuda:0", "cuda:2"), placed(TwoMlps(), "cuda:1", "cuda:1")
    before = path(a100)
    assert len({before, path(h100), path(TwoMlps())}) == 3
    assert path(TwoMlps()) == MeasurementCache.of_this_machine()._path
    setattr(three_gpus, changed, 13010 if changed == "driver" else "3.9.0")
    assert path(a100) != before
