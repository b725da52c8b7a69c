"""Public functions given what they do not take: one clear error of ours, and nothing accepted."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchweld as tw


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 6)).eval()


X = torch.randn(4, 6)
SCRIPTED = torch.jit.script(mlp())
TRACED = torch.jit.trace(mlp(), X)

# One argument of every kind that a mistyped call has. Those that fit are left out by name below.
WRONG: dict[str, Any] = {
    "an int": 3,
    "zero": 0,
    "a float": -1.5,
    "nan": math.nan,
    "inf": math.inf,
    "a bool": True,
    "None": None,
    "a text": "text",
    "a number as text": "5",
    "bytes": b"x",
    "a list": [1, "a"],
    "a tuple": (),
    "a dict": {"a": 1},
    "an object": object(),
    "a class": nn.Linear,
    "a function": F.gelu,
    "a module": nn.GELU(),
    "a scripted model": SCRIPTED,
    "a traced model": TRACED,
    "a tensor": torch.zeros(2),
}
MODELS = {"a module", "a scripted model", "a traced model"}
NUMBERS = {"an int", "zero", "a float"}
CALLABLE = {"a class", "a function", *MODELS}


def entered(block: AbstractContextManager[Any]) -> None:
    with block:
        pass


def layers() -> list[tw.Layer]:
    return [tw.Layer(torch.randn(6, 6))]


def compared(**settings: Any) -> object:
    return tw.compare(lambda: None, lambda: None, **settings)


# Name of the public function and of the argument -> a call with it, and what is right there.
Calls = dict[str, tuple[Callable[[Any], object], set[str]]]
CALLS: Calls = {
    "find model": (lambda v: tw.find(v, X), {"a module"}),
    "find inputs": (lambda v: tw.find(mlp(), v), set()),
    "find training": (lambda v: tw.find(mlp(), X, training=v), {"a bool"}),
    "plan model": (lambda v: tw.plan(v, X, force=True), {"a module"}),
    "plan inputs": (lambda v: tw.plan(mlp(), v, force=True), set()),
    "plan force": (lambda v: tw.plan(mlp(), X, force=v), {"a bool", "a class"}),
    "plan quick": (lambda v: tw.plan(mlp(), X, force=True, quick=v), {"a bool"}),
    "plan packing": (lambda v: tw.plan(mlp(), X, force=True, packing=v), {"a bool"}),
    "plan budget_s": (lambda v: tw.plan(mlp(), X, force=True, budget_s=v), {"an int", "None"}),
    "plan profile": (lambda v: tw.plan(mlp(), X, force=True, profile=v), {"None"}),
    "plan progress": (lambda v: tw.plan(mlp(), X, force=True, progress=v), {"None", *CALLABLE}),
    "fuse model": (lambda v: tw.fuse(v, X), {"a module"}),
    "fuse budget_s": (lambda v: tw.fuse(mlp(), X, budget_s=v), {"an int", "None"}),
    "apply model": (lambda v: tw.apply(v, PLAN), set()),
    "apply plan": (lambda v: tw.apply(mlp(), v), set()),
    "apply on_mismatch": (lambda v: tw.apply(mlp(), PLAN, v), set()),
    "Choice backend": (lambda v: tw.Choice(backend=v), set()),
    "Choice packed": (lambda v: tw.Choice(backend="cpu", packed=v), {"a bool"}),
    "Decision block": (lambda v: tw.Decision(block=v, by_rows=()), set()),
    "Decision by_rows": (lambda v: tw.Decision(block=BLOCK, by_rows=v), {"a tuple"}),
    "Decision training": (
        lambda v: tw.Decision(block=BLOCK, by_rows=(), training=v),
        {"a bool"},
    ),
    "weld model": (lambda v: tw.weld(v, []), {"a module"}),
    "weld decisions": (lambda v: tw.weld(mlp(), v), {"a tuple"}),
    "welded_paths model": (lambda v: tw.welded_paths(v), {"a module"}),
    "undo model": (lambda v: tw.undo(v), {"a module"}),
    "undo paths": (lambda v: tw.undo(mlp(), v), {"None", "a tuple"}),
    "plan_of model": (lambda v: tw.plan_of(v), {"a module"}),
    "verify reference": (lambda v: tw.verify(v, mlp(), X), MODELS),
    "verify candidate": (lambda v: tw.verify(mlp(), v, X), MODELS),
    "verify training": (lambda v: tw.verify(mlp(), mlp(), X, training=v), {"a bool"}),
    "stats model": (lambda v: tw.stats(v), {"a module"}),
    "disabled model": (lambda v: entered(tw.disabled(v)), {"a module"}),
    "check_calls model": (lambda v: tw.check_calls(v, first=1), {"a module"}),
    "check_calls first": (lambda v: tw.check_calls(mlp(), first=v), {"an int", "zero"}),
    "check_calls sample": (lambda v: tw.check_calls(mlp(), sample=v), set()),
    "repack model": (lambda v: tw.repack(v), MODELS),
    "packed_bytes model": (lambda v: tw.packed_bytes(v), MODELS),
    "limit_gradient_memory limit": (
        lambda v: tw.limit_gradient_memory(v),
        {"an int", "zero"},
    ),
    "record model": (lambda v: entered(tw.record(v)), {"a module"}),
    "record limit": (lambda v: entered(tw.record(mlp(), limit=v)), {"an int"}),
    "profile model": (lambda v: tw.profile(v, X), MODELS | CALLABLE),
    "profile steps": (lambda v: tw.profile(mlp(), X, steps=v), {"an int"}),
    "profile loss": (lambda v: tw.profile(mlp(), X, training=True, loss=v), {"None", *CALLABLE}),
    "profile optimizer": (lambda v: tw.profile(mlp(), X, training=True, optimizer=v), {"None"}),
    "profiling model": (lambda v: tw.profiling(v), MODELS),
    "profiling wait": (lambda v: tw.profiling(mlp(), wait=v), {"an int"}),
    "profiling active": (lambda v: tw.profiling(mlp(), active=v), {"an int"}),
    "account profile": (lambda v: tw.account(v), set()),
    "diagnose profile": (lambda v: tw.diagnose(v), set()),
    "diff a": (lambda v: tw.diff(v, v), set()),
    "expect model": (lambda v: tw.expect(model=v), {"None", *MODELS}),
    "expect modules": (lambda v: tw.expect(model=mlp(), modules=v), {"None"}),
    "expect guess": (lambda v: tw.expect(linear=v), {"an int", "zero", "a number as text"}),
    "read_trace path": (lambda v: tw.read_trace(v), set()),
    "compare baseline": (lambda v: tw.compare(v, lambda: None), CALLABLE),
    "compare budget_s": (lambda v: compared(budget_s=v), {"an int"}),
    "compare threshold": (lambda v: compared(threshold=v), {"an int"}),
    "compare names": (lambda v: compared(names=v), {"None"}),
    "compare threads": (lambda v: compared(threads=v), {"an int", "None"}),
    "compare cold": (lambda v: compared(cold=v), {"a bool"}),
    "FusedMLP sizes": (lambda v: tw.FusedMLP(v), set()),
    "FusedMLP activation": (lambda v: tw.FusedMLP((6, 6), v), set()),
    "FusedMLP output": (lambda v: tw.FusedMLP((6, 6), output_activation=v), set()),
    "FusedMLP gated": (lambda v: tw.FusedMLP((6, 6, 6), gated=v), {"a bool"}),
    "FusedMLP dropout": (lambda v: tw.FusedMLP((6, 6), dropout=v), {"zero"}),
    "FusedMLP dtype": (lambda v: tw.FusedMLP((6, 6), dtype=v), {"None"}),
    "FusedMLP device": (lambda v: tw.FusedMLP((6, 6), device=v), {"None", "an int", "zero"}),
    "FusedMLP linears": (lambda v: tw.FusedMLP.from_linears(v), set()),
    "Layer weight": (lambda v: tw.Layer(v), {"a tensor"}),
    "Layer bias": (lambda v: tw.Layer(torch.randn(6, 6), v), {"None", "a tensor"}),
    "Layer activation": (lambda v: tw.Layer(torch.randn(6, 6), None, v), set()),
    "Layer gated": (lambda v: tw.Layer(torch.randn(6, 6), gated=v), {"None"}),
    "Layer transposed": (lambda v: tw.Layer(torch.randn(6, 6), transposed=v), {"a bool"}),
    "mlp x": (lambda v: tw.mlp(v, layers()), {"a tensor"}),
    "mlp layers": (lambda v: tw.mlp(X, v), set()),
    "linears x": (lambda v: tw.linears(v, layers()), {"a tensor"}),
    "linears layers": (lambda v: tw.linears(X, v), set()),
    "Plan path": (lambda v: tw.Plan.load(v), set()),
    "Profile path": (lambda v: tw.Profile.load(v), set()),
    "Diff path": (lambda v: tw.Diff.load(v), set()),
    "Diff text": (lambda v: tw.Diff.from_json(v), set()),
}
PLAN: tw.Plan = tw.plan(mlp(), X, force=True)
BLOCK: tw.Block = PLAN.planned[0].block
# Results and errors, which users do not make; and what takes anything, to hand it on.
TAKE_ANYTHING = {"Account", "Check", "Comparison", "ExpectationError", "Finding", "TorchweldError"}
TAKE_ANYTHING |= {"Inputs", "NotMeasured", "OriginalCodeWarning"}
TAKE_ANYTHING |= {"GradientMemory", "gradient_memory", "release_gradient_memory"}  # take nothing


def test_every_public_name_is_tried() -> None:
    tried = {name.partition(" ")[0] for name in CALLS}
    assert tried | TAKE_ANYTHING == set(tw.__all__)


def what_is_raised(call: Callable[[Any], object], value: Any) -> Exception | None:
    try:
        call(value)
    except Exception as error:
        return error
    return None


@pytest.mark.parametrize("name", CALLS)
def test_what_does_not_fit_is_refused_in_one_clear_sentence(name: str) -> None:
    call, right = CALLS[name]
    for kind, value in WRONG.items():
        if kind in right or ("inputs" in name and kind in ("a tensor", "a function", "a dict")):
            continue
        raised = what_is_raised(call, value)
        assert isinstance(raised, tw.TorchweldError), f"{name}, {kind}: {raised!r}"
        assert len(str(raised)) > 20, f"{kind}: {raised}"
        assert "\n" not in str(raised), f"{kind}: {raised}"


@pytest.mark.parametrize("value", [nn.GELU(), F.gelu, nn.GELU])
def test_an_activation_is_a_name_and_the_message_has_them_all(value: Any) -> None:
    with pytest.raises(tw.TorchweldError, match=r"(?i)gelu.*'leaky_relu:0.2'.*silu.*softplus"):
        tw.FusedMLP((6, 12, 6), activation=value)


def test_of_a_scripted_model_the_remedy_is_said() -> None:
    for call in (tw.find, tw.plan, tw.fuse):
        with pytest.raises(tw.TorchweldError, match=r"torch\.jit\.script.*the model that it was"):
            call(SCRIPTED, X)


@pytest.mark.parametrize("budget_s", [-1, 0, math.nan, math.inf, "5", True, torch.ones(1)])
def test_a_budget_is_a_number_above_zero(budget_s: Any) -> None:
    with pytest.raises(tw.TorchweldError, match=r"budget_s is .*; expected a number above 0"):
        tw.fuse(mlp(), X, budget_s=budget_s)


def test_what_is_refused_leaves_no_file(tmp_path: Path) -> None:
    for path in (3, None, b"plan.json", ["plan.json"]):
        with pytest.raises(tw.TorchweldError, match=r"path is .*; expected the path of a file"):
            PLAN.save(path)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


# ---- settings of a FusedMLP that is made ----


def by_hand(model: tw.FusedMLP, x: Tensor, act: Callable[[Tensor], Tensor]) -> Tensor:
    y: Tensor = model.down(act(model.up(x)))
    return y


@pytest.mark.parametrize("training", [False, True])
def test_another_activation_holds_from_the_next_call_on(training: bool) -> None:
    model = tw.FusedMLP((6, 12, 6), "gelu").train(training)
    with torch.set_grad_enabled(training):
        torch.testing.assert_close(model(X), by_hand(model, X, F.gelu))
        model.activation = "relu"
        torch.testing.assert_close(model(X), by_hand(model, X, F.relu))
        model.activation = "leaky_relu:0.3"
        torch.testing.assert_close(model(X), by_hand(model, X, lambda z: F.leaky_relu(z, 0.3)))
        model.output_activation = "tanh"
        torch.testing.assert_close(
            model(X), by_hand(model, X, lambda z: F.leaky_relu(z, 0.3)).tanh()
        )
    assert "leaky_relu:0.3" in repr(model)
    scripted = torch.jit.script(model)
    torch.testing.assert_close(scripted(X), model(X))


def test_another_dropout_holds_from_the_next_call_on() -> None:
    model = tw.FusedMLP((6, 64, 6)).train()
    assert torch.equal(model(X), model(X))
    model.dropout = 0.5
    assert not torch.equal(model(X), model(X))
    model.dropout = 0
    assert torch.equal(model(X), model(X))


def test_packing_can_be_switched() -> None:
    model = tw.FusedMLP((6, 12, 6)).eval()
    with torch.no_grad():
        y = model(X)
        assert model.packed_bytes > 0
        model.packing = False
        assert model.packed_bytes == 0
        torch.testing.assert_close(model(X), y)
        assert model.packed_bytes == 0
        model.packing = True
        assert torch.equal(model(X), y)
        assert model.packed_bytes > 0


def test_what_the_children_are_cannot_be_set() -> None:
    model = tw.FusedMLP((6, 12, 6))
    model.gated = False  # as it is
    with pytest.raises(tw.TorchweldError, match="make a new one"):
        model.gated = True
    assert not model.gated


@pytest.mark.parametrize(
    ("name", "value"), [("activation", nn.GELU()), ("dropout", 1.0), ("packing", "yes")]
)
def test_a_setting_that_does_not_fit_changes_nothing(name: str, value: Any) -> None:
    model = tw.FusedMLP((6, 12, 6)).eval()
    y, before = model(X), getattr(model, name)
    with pytest.raises(tw.TorchweldError):
        setattr(model, name, value)
    assert getattr(model, name) == before
    assert torch.equal(model(X), y)
