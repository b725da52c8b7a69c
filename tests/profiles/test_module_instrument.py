"""Which modules become visible under which paths, and that nothing of it stays."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from torchweld.profiles.recorded_events import MODULE
from torchweld.profiles.recording.module_instrument import instrumented, places
from torchweld.profiles.recording.torch_profiler import record


class SelfReferring(nn.Module):
    """Refers to itself, as some models do with a root or a parent."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.inner.back = self

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        return y


class Halved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.act(x) / 2
        return y


def seen(model: nn.Module, *x: Tensor) -> list[str]:
    with instrumented([("", model)]):
        recording = record(lambda: model(*x))
    return [event.name for event in recording.events if event.kind == MODULE]


def test_modules_show_under_their_paths_in_the_order_of_calls() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU(), nn.Linear(2, 2)))
    assert seen(model, torch.ones(2)) == ["", "0", "1", "1.0", "1.1"]


def test_a_model_that_holds_itself_ends() -> None:
    assert seen(SelfReferring(), torch.ones(2)) == ["", "inner"]


def test_a_shared_module_shows_where_it_is_called_from() -> None:
    common = nn.Linear(2, 2)
    model = nn.Sequential(nn.Sequential(common), nn.Sequential(common))
    assert places([("", model)])[common] == ["0.0", "1.0"]
    assert seen(model, torch.ones(2)) == ["", "0", "0.0", "1", "1.0"]


def test_a_forward_that_an_instance_has_of_its_own_is_put_back() -> None:
    model = nn.Linear(2, 2)
    own = model.forward
    model.forward = own  # type: ignore[method-assign]
    seen(model, torch.ones(2))
    assert model.__dict__["forward"] is own


def test_the_signature_of_forward_can_still_be_read() -> None:
    model = nn.Linear(2, 2)
    before = inspect.signature(model.forward)
    with instrumented([("", model)]):
        assert inspect.signature(model.forward) == before


def test_scripted_modules_are_left_alone() -> None:
    model = nn.Sequential(nn.Linear(2, 2), torch.jit.script(nn.ReLU()))
    assert seen(model, torch.ones(2)) == ["", "0"]


@torch.no_grad()
def test_a_compiled_module_shows_as_one_and_is_not_compiled_anew() -> None:
    compilations = []

    def backend(graph: torch.fx.GraphModule, example: list[Tensor]) -> torch.fx.GraphModule:
        compilations.append(graph)
        return graph

    inner = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    compiled: Any = torch.compile(inner, backend=backend)
    model = nn.Sequential(nn.Linear(2, 2), compiled)
    model(torch.ones(2))
    assert len(compilations) == 1
    assert seen(model, torch.ones(2)) == ["", "0", "1"]
    in_place = nn.Sequential(nn.Linear(2, 2), Halved())
    in_place[1].compile(backend=backend)
    in_place(torch.ones(2))
    assert seen(in_place, torch.ones(2)) == ["", "0", "1"]
    assert len(compilations) == 2
