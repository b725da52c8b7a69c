"""A plan that somebody has changed: what the model does not give again is never welded."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchweld.core.errors import TorchweldError
from torchweld.machine import fingerprint, kernel_build
from torchweld.plans.plan import Plan, structure_of
from torchweld.plans.plan_fitting import fit_plan
from torchweld.plans.planner import apply, plan
from torchweld.welds.swapping.original_code import OriginalCodeWarning
from torchweld.welds.swapping.swap import undo, welded_paths

DATA = Path(__file__).parents[1] / "data"
Edit = Callable[[dict[str, Any]], object]  # of the first planned block


class Gated(nn.Module):
    """Three weights of one shape, a multiplier, an argument that decides and one that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(8, 8), nn.Linear(8, 8)
        self.down = nn.Linear(8, 8)

    def forward(self, x: Tensor, ignored: Tensor, mask: Tensor | None = None) -> Tensor:
        h = F.silu(self.gate(x)) * self.up(x)
        if mask is not None:
            h = h * mask
        h = F.dropout(h, 0.5, self.training)
        return 0.5 * self.down(h)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp, self.norm = Gated(), nn.LayerNorm(8)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        found: Tensor = self.norm(x + self.mlp(x, torch.ones(1, dtype=torch.bool), mask))
        return found


X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def net() -> nn.Module:
    return Net().eval()


def edited(made: Plan, path: Path, edit: Edit) -> Plan:
    """Loaded from a file in which the first block was changed."""
    made.save(path)
    data = json.loads(path.read_text())
    edit(data["planned"][0])
    path.write_text(json.dumps(data))
    return Plan.load(path)


def block(**fields: Any) -> Edit:
    return lambda one: one["block"].update(fields)


def every_call(**fields: Any) -> Edit:
    return lambda one: [call.update(fields) for call in one["block"]["calls"]]


def rows(*counts: int) -> Edit:
    """An edit after which blocks were called with, and tuned for, other numbers of rows."""

    def edit(one: dict[str, Any]) -> None:
        call, tuning = one["block"]["calls"][0], one["tunings"][0]
        one["block"]["calls"] = [{**call, "shape": [n, 8]} for n in counts]
        one["tunings"] = [{**tuning, "rows": n} for n in counts]

    return edit


NAMES = [f"{name}.{kind}" for name in ("gate", "up", "down") for kind in ("weight", "bias")]
GATE, UP, DOWN = NAMES[:2], NAMES[2:4], NAMES[4:]

LIES: dict[str, Edit] = {
    "another activation": block(form="relu/b/separate;identity/b"),
    "an activation more": block(form="silu/b/separate;relu/b"),
    "gate and up swapped": block(tensors=[*UP, *GATE, *DOWN]),
    "up and down swapped": block(tensors=[*GATE, *DOWN, *UP]),
    "one weight for all": block(tensors=[*GATE, *GATE, *GATE]),
    "another bias": block(tensors=["gate.weight", "up.bias", *UP, *DOWN]),
    "another multiplier": block(scale=2.0),
    "no multiplier": block(scale=1.0),
    "a multiplier of zero": block(scale=0.0),
    "another sign": block(scale=-0.5),
    "less covered": block(covers=["gate", "up"]),
    "more covered": block(covers=["gate", "up", "down", "gate"]),
    "another class": block(kind="Net"),
    "a mask that is said not to matter": block(ignores=["ignored", "mask"]),
    "the mask as x": block(argument="mask"),
    "an argument that there is not": block(argument="y"),
    "an ignored one that there is not": block(ignores=["ignored", "y"]),
    "dropout that there is not": block(dropout=[0.1, 0.0]),
    "a hash": block(structure="0" * 16),
    "another path": block(path="mlp.up"),
    "the model as path": block(path=""),
}


@pytest.mark.parametrize("lie", LIES)
def test_what_the_model_does_not_give_again_is_not_welded(
    net: nn.Module, tmp_path: Path, lie: str
) -> None:
    found = edited(plan(net, X, force=True), tmp_path / "plan.json", LIES[lie])
    with torch.no_grad():
        expected = net(X)
    with pytest.raises(TorchweldError, match="the plan does not fit"):
        apply(net, found)
    for way in ("skip", "verify"):
        assert welded_paths(apply(net, found, on_mismatch=way)) == []
        with torch.no_grad():
            assert torch.equal(net(X), expected)
    elsewhere = replace(found, fingerprint="0" * 12)
    assert welded_paths(apply(net, elsewhere, on_mismatch="verify")) == []


MALFORMED: dict[str, Edit] = {
    "no calls": block(calls=[]),
    "no tensors": block(tensors=[]),
    "tensors for another form": block(tensors=[*GATE, *UP]),
    "a form that is none": block(form="sofa/b"),
    "a negative dropout": block(dropout=[-1.0, 0.0]),
    "another width": every_call(shape=[4, 9]),
    "a width alone": every_call(shape=[]),
    "another type": every_call(dtype="float64"),
    "a type that is none": every_call(dtype="__class__"),
    "a shape of 34 GB": every_call(shape=[2**28, 32]),
    "rows beyond any memory": rows(2**62),
    "negative rows": rows(-4),
    "no rows": rows(0),
    "many dimensions": every_call(shape=[1] * 99 + [8]),
    "rows that were not called": lambda one: one["tunings"][0].update(rows=10**9),
    "a choice that was not verified": lambda one: one["tunings"][0]["trials"][0].update(
        verified=False
    ),
    "a choice that was not tried": lambda one: one["tunings"][0].update(
        chosen={"backend": "compile"}
    ),
}


@pytest.mark.parametrize("what", MALFORMED)
def test_a_plan_that_makes_no_sense_is_not_loaded(
    net: nn.Module, tmp_path: Path, what: str
) -> None:
    with pytest.raises(TorchweldError, match=r"plan\.json is damaged: plan\.planned\[0\]"):
        edited(plan(net, X, force=True), tmp_path / "plan.json", MALFORMED[what])


@pytest.mark.parametrize("change", [{"scale": 2.0}, {"calls": ()}, {"form": "relu/b;identity/b"}])
def test_a_plan_that_was_changed_in_memory_is_as_suspect(
    net: nn.Module, change: dict[str, Any]
) -> None:
    made = plan(net, X, force=True)
    (one,) = made.planned
    lie = replace(made, planned=(replace(one, block=replace(one.block, **change)),))
    with pytest.raises(TorchweldError, match="the plan does not fit: mlp: "):
        apply(net, lie)
    assert welded_paths(apply(net, lie, on_mismatch="skip")) == []


def test_what_cannot_be_welded_is_left_out_on_request(
    net: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = plan(net, X, force=True)
    assert fit_plan(net, made).refused == ()
    monkeypatch.setattr(Gated, "__deepcopy__", lambda self, memo: self, raising=False)
    fit = fit_plan(net, made)
    assert fit.decisions == ()
    assert [(one.path, one.kind) for one in fit.refused] == [("mlp", "Gated")]
    assert "Gated has a __deepcopy__ of its own" in fit.refused[0].reason
    with pytest.raises(TorchweldError, match="mlp: Gated has a __deepcopy__ of its own"):
        apply(net, made)
    for way in ("skip", "verify"):
        assert welded_paths(apply(net, made, on_mismatch=way)) == []


def test_a_block_that_the_model_no_longer_has_is_refused_with_the_op_and_the_line(
    net: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = plan(net, X, force=True)

    def forward(self: Gated, x: Tensor, ignored: Tensor, mask: Tensor | None = None) -> Tensor:
        h: Tensor = self.down(F.layer_norm(F.silu(self.gate(x)) * self.up(x), (8,)))
        return h

    monkeypatch.setattr(Gated, "forward", forward)
    (refused,) = fit_plan(net, made).refused
    assert refused.path == "mlp"
    assert refused.op == "aten.layer_norm"
    assert "test_edited_plans.py" in refused.where


def test_dropout_cannot_be_edited_away(net: nn.Module, tmp_path: Path) -> None:
    made = plan(net.train(), X, training=True, force=True)
    assert made.planned[0].block.dropout == (0.5, 0.0)
    found = edited(made, tmp_path / "plan.json", lambda one: one["block"].pop("dropout"))
    with pytest.raises(TorchweldError, match=r"its dropout is 0\.5, 0\.0 in the model, and n"):
        apply(net, found)
    assert welded_paths(apply(net, found, on_mismatch="verify")) == []


def test_calls_in_training_that_a_plan_claims_are_read_too(net: nn.Module, tmp_path: Path) -> None:
    found = edited(plan(net, X, force=True), tmp_path / "plan.json", every_call(training=True))
    with pytest.raises(TorchweldError, match="its dropout is"):
        apply(net, replace(found, training=True))


def test_rows_that_are_too_many_to_be_had_take_no_memory(net: nn.Module, tmp_path: Path) -> None:
    found = edited(plan(net, X, force=True), tmp_path / "plan.json", rows(1, 2**27))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for way in ("raise", "verify", "skip"):
        apply(net, found, on_mismatch=way)
        apply(net, replace(found, fingerprint="0" * 12), on_mismatch="verify")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # kB
    with torch.no_grad():
        got = net(X)
        torch.testing.assert_close(got, undo(net)(X))


class ByRows(nn.Module):
    """Does something else with more rows than are ever read."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.b(F.relu(self.a(x)) if x.shape[0] > 1 << 20 else F.gelu(self.a(x)))
        return found


def test_a_branch_that_only_many_rows_take_is_seen(tmp_path: Path) -> None:
    net = ByRows()
    found = edited(plan(net, X, force=True), tmp_path / "plan.json", rows(1, 2**21))
    many = torch.randn((1 << 20) + 1, 8)
    with torch.no_grad():
        expected = net(many)
        apply(net, found, on_mismatch="skip")
        with pytest.warns(OriginalCodeWarning, match="unlike those planned with"):
            found_many = net(many)
        torch.testing.assert_close(found_many, expected)


def test_a_block_twice_is_refused(net: nn.Module, tmp_path: Path) -> None:
    made = plan(net, X, force=True)
    made.save(tmp_path / "plan.json")
    data = json.loads((tmp_path / "plan.json").read_text())
    data["planned"] *= 2
    (tmp_path / "plan.json").write_text(json.dumps(data))
    with pytest.raises(TorchweldError, match="plans the block 'mlp' twice"):
        Plan.load(tmp_path / "plan.json")


def test_what_is_no_plan_is_not_applied(net: nn.Module) -> None:
    with pytest.raises(TorchweldError, match="Plan"):
        apply(net, "plan.json")  # type: ignore[arg-type]


# ---- the version before ----


class OldMlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(8, 16, bias=False), nn.Linear(8, 16, bias=False)
        self.down = nn.Linear(16, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.down(F.silu(self.gate(x)) * self.up(x)) * 0.5
        return found


OldMlp.__name__ = "Mlp"


class OldNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp, self.norm, self.head = OldMlp(), nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.norm(x + self.mlp(x)))
        return found


def test_a_plan_of_the_version_before_is_loaded_and_applied() -> None:
    net = OldNet().eval()
    found = Plan.load(DATA / "plan_0_1.json")
    assert found.structure == structure_of(net)
    with torch.no_grad():
        expected = net(X)
        # Saved on another machine.
        found = replace(found, fingerprint=fingerprint.key_here(), torch=torch.__version__)
        if kernel_build.compiled_part() is not None:
            assert welded_paths(apply(net, found)) == ["mlp", "head"]
        torch.testing.assert_close(net(X), expected)
