"""A model that others are calling can be looked at, planned for, welded and undone.

Every call gives what the original gives, to the last bit.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tests.support.helpers import last_run
from tests.support.serving_state import Stateful, snapshot
from torch import Tensor, nn

import torchweld as tw

THREADS = 8
SECONDS = 3.0


class Exact(nn.Module):
    """Blocks of small whole numbers: sums are exact in any order, so welding changes no bit.

    With dropout, batch norm, modules in a list, a hook and a module at two places.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(24, 64), nn.ReLU(), nn.Linear(64, 24), nn.Dropout(0.3))
        self.second = nn.Sequential(nn.Linear(24, 48), nn.ReLU(), nn.Linear(48, 12))
        self.again, self.norm = nn.Linear(12, 12, bias=False), nn.BatchNorm1d(12)
        self.steps = [self.first, self.second, self.again, self.again, self.norm]
        self.register_buffer("count", torch.zeros(1))
        self.norm.register_forward_hook(lambda module, args, y: y * self.norm.weight)
        for parameter in self.parameters():
            parameter.data = torch.randint(-1, 2, parameter.shape).float()

    def forward(self, x: Tensor) -> Tensor:
        for step in self.steps:
            x = step(x)
        return x


class Service:
    """Threads that call a model all the time, and look at everything that comes out."""

    def __init__(self, model: nn.Module, inputs: list[Tensor]) -> None:
        self._model, self._inputs = model, inputs
        with torch.no_grad():
            self._expected = [model(x) for x in inputs]
        self._stop = threading.Event()
        self.calls = 0
        self.wrong: list[str] = []

    def _serve(self, number: int) -> None:
        mode = torch.inference_mode if number % 2 else torch.no_grad
        while not self._stop.is_set() and len(self.wrong) < 10:
            which = (number + self.calls) % len(self._inputs)
            try:
                with mode():
                    got = self._model(self._inputs[which])
            except Exception as error:
                self.wrong.append(f"{type(error).__name__}: {error}")
                continue
            self.calls += 1
            time.sleep(0.002)  # others want the interpreter too
            if type(got) is not Tensor:
                self.wrong.append(f"a {type(got).__name__}")
            elif not torch.equal(got, self._expected[which]):
                self.wrong.append(f"other numbers for input {which}")

    @contextmanager
    def running(self) -> Iterator[None]:
        threads = [threading.Thread(target=self._serve, args=(n,)) for n in range(THREADS)]
        interval_s = sys.getswitchinterval()
        sys.setswitchinterval(1e-4)  # so that threads meet in more places
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._stop.set()
            sys.setswitchinterval(interval_s)
            for thread in threads:
                thread.join()


def test_a_model_serves_while_it_is_found_in_planned_welded_and_undone(one_thread: None) -> None:
    model = Exact().eval()
    inputs = [torch.randint(-3, 4, (rows, 24)).float() for rows in (2, 5, 8)]
    packed, lean = (
        tw.plan(model, inputs, force=True, packing=packing) for packing in (True, False)
    )
    assert len(packed.decisions) == 3
    service = Service(model, inputs)
    rounds, served = 0, 0
    with service.running():
        end_s = time.perf_counter() + SECONDS
        while time.perf_counter() < end_s or rounds == 0:
            tw.find(model, inputs)
            tw.apply(model, packed)
            with tw.disabled(model):
                tw.find(model, inputs, training=True)
            made = tw.plan(model, inputs, force=True)
            tw.apply(model, made)  # over what is welded
            served = sum(runs_fused(model, inputs) for _ in range(3))
            tw.apply(model, lean)
            tw.undo(model)
            rounds += 1
    assert not service.wrong
    assert service.calls > THREADS
    assert served == 3
    assert tw.plan_of(model) is None


def runs_fused(model: nn.Module, inputs: list[Tensor]) -> bool:
    before = last_run()["calls"]
    with torch.no_grad():
        model(inputs[0])
    return bool(last_run()["calls"] > before)


def test_finding_and_planning_change_nothing_at_all() -> None:
    model = Stateful()
    before = snapshot(model)
    x = torch.randn(4, 8)
    state = torch.get_rng_state()
    for training in (False, True):
        tw.find(model, x, training=training)
        tw.plan(model, x, training=training, force=True)
        assert snapshot(model) == before
    assert torch.equal(torch.get_rng_state(), state)


def test_a_module_among_the_arguments_is_one_of_the_copy() -> None:
    class Told(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: Tensor, which: nn.Module, more: Any = ()) -> Tensor:
            assert which is self.inner
            assert all(m is self.inner for m in more)
            y: Tensor = which(x)
            return y

    model = Told()
    found = tw.find(model, tw.Inputs(torch.randn(2, 8), model.inner, more=[model.inner]))
    assert [block.path for block in found] == ["inner"]
    assert tw.plan(
        model, tw.Inputs(torch.randn(2, 8), model.inner, more=[model.inner]), force=True
    ).decisions


def test_what_cannot_be_copied_is_refused_with_its_name() -> None:
    model: Any = nn.Sequential(nn.Linear(8, 8))
    model.stream = iter([model[0]])
    with pytest.raises(tw.TorchweldError, match=r"stream is a builtins\.list_iterator"):
        tw.find(model, torch.randn(2, 8))
