"""What a step keeps for its backward pass: as torch's own hooks on saved tensors tell it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from torchweld.ops.fused_mlp import FusedMLP
from torchweld.profiles.accounting.memory_account import memory_account
from torchweld.profiles.attributing.attribution import attribute
from torchweld.profiles.profile import Memory
from torchweld.profiles.recording.module_instrument import instrumented
from torchweld.profiles.recording.torch_profiler import record


def memory_of(run: Callable[[], object], model: nn.Module) -> Memory:
    run()
    with instrumented([("", model)]):
        recording = record(run, shapes=True, memory=True)
    found = memory_account(recording, attribute(recording))
    assert found is not None
    return found


def hooked_bytes(run: Callable[[], object], there: list[Tensor]) -> int:
    """Bytes of the storages that are saved and are not those of `there`."""
    before = {tensor.untyped_storage().data_ptr() for tensor in there}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)  # alive, so never reused
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return sum(t.untyped_storage().nbytes() for at, t in kept.items() if at not in before)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.inner = nn.Linear(24, 24), nn.Sequential(nn.Linear(24, 40), nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        found = checkpoint(self.inner, torch.sigmoid(self.before(x)), use_reentrant=False)
        assert isinstance(found, Tensor)
        return found


MODELS: dict[str, Callable[[], tuple[nn.Module, tuple[int, ...]]]] = {
    "mlp": lambda: (nn.Sequential(nn.Linear(24, 56), nn.GELU(), nn.Linear(56, 8)), (13, 24)),
    "fused": lambda: (FusedMLP((24, 56, 8)), (13, 24)),
    "layer": lambda: (nn.TransformerEncoderLayer(24, 2, 56, dropout=0.1), (5, 3, 24)),
    "image": lambda: (
        nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(2)),
        (2, 2, 9, 9),
    ),
    "softmax": lambda: (nn.Sequential(nn.Linear(24, 7), nn.Softmax(-1), nn.Tanh()), (13, 24)),
    "norm": lambda: (nn.Sequential(nn.Linear(24, 30), nn.LayerNorm(30), nn.SiLU()), (13, 24)),
}


@pytest.mark.parametrize("name", MODELS)
def test_what_is_saved_is_what_the_nodes_of_the_graph_keep(name: str) -> None:
    model, shape = MODELS[name]()
    x = torch.randn(shape)

    def run() -> None:
        model.zero_grad()
        y = model(x)
        F.mse_loss(y, torch.zeros_like(y)).backward()

    there = [x, *model.parameters(), *model.buffers()]
    run()
    expected = hooked_bytes(run, there)
    assert sum(memory_of(run, model).saved_bytes.values()) == expected > 0


def test_it_is_charged_to_the_module_that_saved_it_once() -> None:
    model = nn.Sequential(nn.Linear(24, 56), nn.Sigmoid(), nn.Linear(56, 8))
    x = torch.randn(13, 24)
    found = memory_of(lambda: model(x).sum().backward(), model)
    # The sigmoid keeps its result; so does the product behind it, which is the same memory.
    assert found.saved_bytes == {"1": 13 * 56 * 4}


def test_what_merely_lives_on_is_not_saved() -> None:
    model = nn.Linear(24, 56)
    x = torch.randn(13, 24)
    kept: list[Tensor] = []

    def run() -> None:
        y = model(x)
        kept[:] = [y, y.detach().clone(), torch.randn(99, 9)]
        y.backward(torch.full_like(y, 0.5))

    assert memory_of(run, model).saved_bytes == {}


def test_every_backward_of_a_step_counts() -> None:
    model = nn.Sequential(nn.Linear(24, 56), nn.GELU())
    inputs = [torch.randn(13, 24), torch.randn(29, 24)]

    def run() -> None:
        for x in inputs:
            model(x).sum().backward()

    assert memory_of(run, model).saved_bytes == {"1": (13 + 29) * 56 * 4}


def test_of_a_checkpointed_region_its_inputs_are_saved() -> None:
    model = Checkpointed()
    x = torch.randn(13, 24)
    found = memory_of(lambda: model(x).sum().backward(), model)
    assert sum(found.saved_bytes.values()) == 13 * 24 * 4


def test_a_step_with_torch_func_is_recorded_too() -> None:
    model = nn.Linear(24, 56)
    x = torch.randn(13, 24)

    def run() -> None:
        torch.func.grad(lambda t: model(t).pow(2).sum())(x)

    assert memory_of(run, model).peak_bytes > 0
