"""A new backend is one class and one row of `BACKENDS`: every public path finds it by what it says.

The class below is all that a backend's file needs, and `row` puts it first in the list.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.support.backend_samples import chain_of
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import torchweld as tw
from torchweld.cli.main import run
from torchweld.core.errors import TorchweldError
from torchweld.ops import backends
from torchweld.ops.backends import Abilities, BackendMode, Form, gpu_backends, reference_backend
from torchweld.ops.backends.backend import check_build, mode_of, plain_reasons
from torchweld.plans.kernel_choice import choices_for
from torchweld.welds.swapping.swap import weld
from torchweld.welds.weld_decisions import Choice, Decision

ABILITIES = Abilities(
    devices=("cpu", "xpu"),
    dtypes=("float32",),
    modes=(
        BackendMode(name="lean", planned=("inference", "training")),
        BackendMode(name="hoarding", packs=True),
    ),
    needs="an abacus",
    trains=True,
    deterministic=True,
)


class DummyRunner:
    def __init__(self, block: Form, tensors: Sequence[Tensor], mode: str, ran: list[str]) -> None:
        self._block, self._tensors, self._mode, self._ran = block, tensors, mode, ran

    @property
    def copied_bytes(self) -> int:
        return 1000 if self._mode == "hoarding" else 0

    def __call__(self, x: Tensor) -> Tensor | list[Tensor]:
        self._ran.append(self._mode)
        return reference_backend.run(self._block, x, self._tensors)


class DummyBackend:
    name = "dummy"

    def __init__(self, abilities: Abilities, missing: Sequence[str], refuses: Sequence[str]):
        self.abilities, self._missing, self._refuses = abilities, missing, refuses
        self.ran: list[str] = []  # the mode of each call

    def unavailable(self) -> list[str]:
        return list(self._missing)

    def unsupported_reasons(
        self,
        block: Form,
        shapes: Sequence[Sequence[int]],
        dtype: torch.dtype,
        device: torch.device,
        mode: str | None = None,
    ) -> list[str]:
        mode_of(self, mode)
        return [*plain_reasons(self, block, dtype, device), *self._refuses]

    def build(self, block: Form, tensors: Sequence[Tensor], mode: str | None = None) -> DummyRunner:
        return DummyRunner(block, tensors, check_build(self, block, tensors, mode), self.ran)


Row = Callable[..., DummyBackend]


@pytest.fixture
def row(monkeypatch: pytest.MonkeyPatch) -> Row:
    """Puts a dummy into the list, before all others."""

    def add(
        missing: Sequence[str] = (), refuses: Sequence[str] = (), **changes: object
    ) -> DummyBackend:
        dummy = DummyBackend(replace(ABILITIES, **changes), missing, refuses)  # type: ignore[arg-type]
        monkeypatch.setattr(backends, "BACKENDS", (dummy, *backends.BACKENDS))
        return dummy

    return add


def small_model() -> tuple[nn.Module, Tensor, Tensor]:
    """A model, an input, and what it makes of it."""
    model = nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 3)).eval()
    x = torch.randn(4, 5)
    with torch.no_grad():
        return model, x, model(x)


def decision(model: nn.Module, x: Tensor, choice: Choice, training: bool = False) -> Decision:
    (block,) = tw.find(model, x, training=training)
    return Decision(block=block, by_rows=((1, 64, choice),), training=training)


def test_names_of_backends_and_modes_are_unique() -> None:
    names = [backend.name for backend in backends.BACKENDS]
    assert len(set(names)) == len(names)
    for backend in backends.BACKENDS:
        modes = [mode.name for mode in backend.abilities.modes]
        assert len(set(modes)) == len(modes)


def test_info_lists_it_with_its_abilities(row: Row, capsys: pytest.CaptureFixture[str]) -> None:
    row()
    assert run(["info"]) == 0
    words = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("dummy"))
    shown = ["dummy", "yes", "cpu,", "xpu", "lean,", "hoarding*", "yes", "no", "an", "abacus"]
    assert words.split() == shown
    assert run(["info", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["backends"][0]
    assert (listed["name"], listed["reasons"]) == ("dummy", [])
    assert listed["abilities"]["dtypes"] == ["float32"]
    mode = {"name": "hoarding", "packs": True, "recomputes": False, "planned": []}
    assert listed["abilities"]["modes"][1] == mode


def test_info_says_why_it_cannot_be_used(row: Row, capsys: pytest.CaptureFixture[str]) -> None:
    row(missing=("there is no abacus", "nobody can count"))
    assert run(["info"]) == 0
    said = "dummy cannot be used here: there is no abacus; nobody can count"
    assert said in capsys.readouterr().out


def test_a_plan_chooses_it_and_the_welded_call_runs_it(row: Row, tmp_path: Path) -> None:
    dummy = row()
    model, x, expected = small_model()
    made = tw.plan(model, x, force=True)
    (planned,) = made.planned
    assert planned.tunings[0].chosen == Choice(backend="dummy")
    made.save(tmp_path / "plan.json")
    tw.apply(model, tw.Plan.load(tmp_path / "plan.json"))
    dummy.ran.clear()
    with torch.no_grad():
        torch.testing.assert_close(model(x), expected)
        model(x)
    assert dummy.ran == ["lean", "lean"]
    assert tw.stats(model)[""].fused
    tw.undo(model)
    with torch.no_grad():
        assert torch.equal(model(x), expected)
    assert len(dummy.ran) == 2


def test_a_plan_that_measures_times_it(row: Row) -> None:
    row()
    model, x, _ = small_model()
    made = tw.plan(model, x, budget_s=1.0, remember=False)
    trials = made.planned[0].tunings[0].trials
    assert trials[0].choice == Choice(backend="dummy")
    assert trials[0].verified


def test_no_table_of_speeds_knows_it(row: Row) -> None:
    row()
    model, x, _ = small_model()
    (planned,) = tw.plan(model, x, measure=False).planned
    found = planned.tunings[0].trials[0]
    assert (found.choice.backend, found.verdict) == ("dummy", "not known")


def test_it_trains(row: Row) -> None:
    dummy = row()
    model, x, _ = small_model()
    model.train()
    wanted = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    tw.apply(model, tw.plan(model, x, training=True, force=True))
    tw.check_calls(model, first=1)
    dummy.ran.clear()
    found = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    torch.testing.assert_close(found, wanted)
    assert len(dummy.ran) > 1  # the call, and its gradients, which were checked
    assert tw.stats(model)[""].checked == 1


def test_its_packed_mode_serves_inference_and_leaves_with_gradients(row: Row) -> None:
    dummy = row()
    model, x, expected = small_model()
    chosen = decision(model, x, Choice(backend="dummy", packed=True))
    weld(model, [replace(chosen, training=True)])
    with torch.no_grad():
        torch.testing.assert_close(model(x), expected)
    assert tw.packed_bytes(model) == 1000
    model(x).sum().backward()
    assert dummy.ran == ["hoarding", "lean"]
    assert tw.packed_bytes(model) == 0


def test_reasons_are_all_in_the_plan_and_the_next_one_serves(row: Row) -> None:
    dummy = row(missing=("there is no abacus",), refuses=("too wide", "too odd"))
    model, x, _ = small_model()
    made = tw.plan(model, x, force=True)
    first, *others = made.planned[0].tunings[0].trials
    assert (first.choice.backend, first.verdict) == ("dummy", "cannot serve")
    assert first.reason == "there is no abacus; too wide; too odd"
    assert others[-1].verified
    assert dummy.ran == []


def test_welding_by_name_is_refused_with_all_reasons(row: Row) -> None:
    row(refuses=("too wide", "too odd"), dtypes=("float64",), devices=("xpu",))
    model, x, _ = small_model()
    with pytest.raises(TorchweldError) as raised:
        weld(model, [decision(model, x, Choice(backend="dummy"))])
    assert str(raised.value).splitlines()[1:] == [
        "  the model: backend dummy: it runs on xpu; the tensors are on cpu",
        "  the model: backend dummy: torch.float32 is not one of float64; cast with .to()",
        "  the model: backend dummy: too wide",
        "  the model: backend dummy: too odd",
    ]


def test_one_without_gradients_is_refused_for_training(row: Row) -> None:
    row(trains=False)
    model, x, _ = small_model()
    with pytest.raises(TorchweldError, match="backend dummy has no gradients; give training=False"):
        weld(model, [decision(model, x, Choice(backend="dummy"), training=True)])


def test_one_that_is_not_deterministic_yields_to_torchs_switch(row: Row) -> None:
    dummy = row(deterministic=False)
    block, _ = chain_of("gelu/b", (5, 3))
    about = (block, [(4, 5)], torch.float32, torch.device("cpu"))
    assert dummy.unsupported_reasons(*about) == []
    torch.use_deterministic_algorithms(True)
    try:
        (reason,) = dummy.unsupported_reasons(*about)
    finally:
        torch.use_deterministic_algorithms(False)
    assert "use_deterministic_algorithms" in reason


def test_plans_try_what_runs_where_the_weights_are(row: Row) -> None:
    row(devices=("cuda",))

    def tried(device: str) -> list[str]:
        with FakeTensorMode():
            weights = [torch.empty(3, 5, device=device)]
        found = choices_for(training=False, with_compile=False, packing=True, weights=weights)
        return [f"{choice.backend} {choice.mode}" for choice in found]

    ways = [f"{backend.name} natural" for backend in gpu_backends.BACKENDS]
    assert tried("cuda") == ["dummy lean", *ways, "torch aten"]
    assert tried("cpu") == ["cpu packed", "cpu natural", "torch aten"]
    with FakeTensorMode():
        elsewhere = [torch.empty(3, 5, device="xpu")]
    found = choices_for(training=True, with_compile=False, packing=True, weights=elsewhere)
    # Nothing serves there, and each is to say so.
    on_gpus = [backend.name for backend in gpu_backends.BACKENDS for _ in backend.abilities.modes]
    assert [choice.backend for choice in found] == ["dummy", "cpu", "cpu", *on_gpus]


@pytest.mark.parametrize("in_graphs", [False, True])
def test_graphs_hold_the_op_if_it_says_so(row: Row, in_graphs: bool) -> None:
    dummy = row(in_graphs=in_graphs)
    model, x, expected = small_model()
    weld(model, [decision(model, x, Choice(backend="dummy"))])
    with torch.no_grad():
        exported = torch.export.export(model, (x,))
        torch.testing.assert_close(exported.module()(x), expected)
    assert ("torchweld.chain" in str(exported.graph)) is in_graphs
    assert dummy.ran == []


def test_a_plan_with_an_unknown_backend_is_refused(
    row: Row, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = backends.BACKENDS
    row()
    model, x, _ = small_model()
    tw.plan(model, x, force=True).save(tmp_path / "plan.json")
    monkeypatch.setattr(backends, "BACKENDS", before)
    said = f"unknown backend 'dummy'; there are: {', '.join(one.name for one in before)}"
    with pytest.raises(TorchweldError, match=said):
        tw.Plan.load(tmp_path / "plan.json")
    with pytest.raises(TorchweldError, match=said):
        Choice(backend="dummy")
