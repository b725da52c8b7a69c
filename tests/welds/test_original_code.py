"""Tests that a welded model which runs its original code warns once, with a remedy."""

from __future__ import annotations

import copy
import io
import pickle
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.support.helpers import ISAS, at_once, kernel_runs
from tests.support.swap_blocks import (
    GATED,
    MLP,
    PACKED,
    Gated,
    K,
    Mlp,
    N,
    X,
    decide,
    model_of,
)
from torch import Tensor, nn

import torchweld as tw
from torchweld.core.errors import TorchweldError
from torchweld.core.muted_warnings import untold
from torchweld.welds.swapping import original_code
from torchweld.welds.swapping.swap import disabled, reweld, stats, undo, weld
from torchweld.welds.weld_decisions import Decision

pytestmark = [
    pytest.mark.skipif(not ISAS, reason="no compiled kernels on this machine"),
    pytest.mark.usefixtures("one_thread"),
]


@contextmanager
def told() -> Iterator[list[str]]:
    """Gives the warnings inside, whatever filters are set."""
    said: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield said
    said += [str(w.message) for w in caught if w.category is tw.OriginalCodeWarning]
    assert len(said) == len(caught)


class Net(nn.Module):
    """A model with three blocks of one kind."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Mlp() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        ys = [block(x) for block in self.blocks]
        return torch.stack(ys).sum(0)


def net(rows: tuple[int, int] = (1, 64), *, training: bool = False) -> nn.Module:
    model = Net().eval()
    paths = [f"blocks.{i}" for i in range(3)]
    return weld(model, [decide(MLP, path=p, rows=rows, training=training) for p in paths])


# ---- one warning, with the remedy ----


def test_gradients_are_told_once_for_all_blocks() -> None:
    model = net()
    with told() as said:
        for _ in range(3):
            model(X)
    assert said == [
        "torchweld: Net is welded for inference, but runs its original code, because gradients are "
        "on. Call the model under torch.inference_mode() or torch.no_grad(), or weld it with "
        "training=True. tw.stats(model) counts such calls."
    ]
    assert [one.originals for one in tw.stats(model).values()] == 3 * [{"gradients": 3}]


def test_training_mode_is_told_with_everything_that_is_to_be_done() -> None:
    with told() as said:
        net().train()(X)
    (text,) = said
    assert "training mode and gradients are on" in text
    assert "model.eval()" in text
    assert "torch.inference_mode()" in text
    with torch.no_grad(), told() as said:
        net().train()(X)
    (text,) = said
    assert "because it is in training mode. Call model.eval() first" in text


def test_what_is_left_to_be_done_is_told_too() -> None:
    model = net()
    with told() as said:
        model.train()(X)
        model.eval()(X)
        model(X)
    assert len(said) == 2
    assert "because gradients are on" in said[1]


def test_autocast() -> None:
    model = net()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16), told() as said:
        model(X)
        model(X)
    (text,) = said
    assert "autocast is on. Call the model outside of torch.autocast" in text


@pytest.mark.parametrize(
    ("x", "text"),
    [
        (X.double(), "block blocks.0 of Net .* input is float64, and it was planned in float32"),
        (torch.randn(9, K), "9 rows, and the plan covers 1 to 3, 20. Plan with such inputs too"),
    ],
    ids=["dtype", "rows"],
)
def test_what_a_block_was_given(x: Tensor, text: str) -> None:
    model = Net().eval()
    by_rows = ((1, 3, PACKED), (4, 8, None), (20, 20, PACKED))
    decisions = [
        Decision(block=replace(MLP, path=f"blocks.{i}"), by_rows=by_rows) for i in range(3)
    ]
    weld(model, decisions)
    model.to(x.dtype)
    with torch.no_grad(), told() as said:
        model(x)
        model(x)
    assert len(said) == 1
    assert re.search(text, said[0])


def test_other_arguments() -> None:
    module = Gated().eval()
    weld(module, [decide(GATED)])
    with torch.no_grad(), told() as said:
        module(X, torch.zeros(5, N))
    (text,) = said
    assert "Gated is welded for inference" in text
    assert "given arguments that it was not planned with. Plan with such inputs too" in text


def test_hooks_on_all_modules() -> None:
    model = net()
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        with torch.no_grad(), told() as said:
            model(X)
    finally:
        handle.remove()
    (text,) = said
    assert "hooks on all modules are set" in text


class Asking(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        if input.is_inference() or self.weight.requires_grad is None:
            return super().forward(input) + 0
        return super().forward(input)


def test_a_mode_that_the_code_asks_about() -> None:
    model = Asking(K, N).eval()
    plan = tw.plan(model, X, force=True, remember=False)
    tw.apply(model, plan)
    assert tw.stats(model)
    with torch.inference_mode(), told() as said:
        model(X.clone())
    (text,) = said
    assert "asks about modes of the call, which has inference mode" in text
    assert "torch.no_grad() instead of torch.inference_mode()" in text
    with torch.no_grad(), kernel_runs(calls=1):
        model(X)
    model.requires_grad_(False)
    with torch.no_grad():
        model(X)
    originals = tw.stats(model)[""].originals
    assert originals == {"inference mode": 1, "weights that no longer require gradients": 1}


def test_the_warning_points_at_the_line_that_calls_the_model() -> None:
    model = nn.Sequential(nn.Identity(), net())
    with pytest.warns(tw.OriginalCodeWarning) as caught:
        model(X)
    (warning,) = caught
    assert warning.filename == __file__
    assert "model(X)" in Path(__file__).read_text().splitlines()[warning.lineno - 1]


def test_a_filter_for_the_category_silences_it() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", tw.OriginalCodeWarning)
        net()(X)


def test_welding_anew_tells_anew_and_undoing_ends_it() -> None:
    model = net()
    with told() as said:
        model(X)
        weld(model, [decide(MLP, path="blocks.1")])
        model(X)
        undo(model)
        model(X)
    assert len(said) == 2


# ---- calls without a warning ----


def test_a_model_that_has_run_fused_meets_other_calls_silently() -> None:
    model = net()
    with torch.no_grad():
        model(X)
        model(torch.randn(100, K))
        model.train()(X)
        model.double()(X.double())
        model.float().eval()
    model(X)
    counted = {"rows": 1, "training mode": 1, "another dtype": 1, "gradients": 1}
    assert [one.originals for one in tw.stats(model).values()] == 3 * [counted]


def test_rows_that_were_measured_and_left_are_not_told() -> None:
    module = Mlp().eval()
    weld(module, [Decision(block=MLP, by_rows=((1, 3, None), (4, 5, PACKED)))])
    with torch.no_grad():
        module(X[:2])
    assert stats(module)[""].originals == {"rows": 1}


def test_what_was_asked_for_is_not_told() -> None:
    model = net()
    with disabled(model):
        model(X)
    assert tw.stats(model)["blocks.0"].originals == {"disabled": 1}


def test_dropout_in_training_is_not_told_where_training_was_planned() -> None:
    module = Mlp(dropout=0.5).eval()
    weld(module, [decide(replace(MLP, dropout=(0.5,)), training=True)])
    module.train()(X)
    assert stats(module)[""].originals == {"training mode": 1}


def test_errors_come_without_advice() -> None:
    model, _ = model_of("linear")
    with torch.no_grad(), pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model[1](torch.randn(5, K + 1))


def test_verifying_does_not_tell_and_uses_nothing_up() -> None:
    model = net()
    plain = copy.deepcopy(model)
    undo(plain)
    assert tw.verify(plain, model, X, training=True)
    assert tw.stats(model)["blocks.0"].originals == {"training mode": 1}
    with told() as said:
        model(X)
    assert len(said) == 1


def test_what_is_welded_untold_stays_so() -> None:
    with untold():
        model = net()
    model(X)
    copy.deepcopy(model)(X)
    with pytest.raises(TorchweldError), untold():
        raise TorchweldError("x")
    with told() as said:
        net()(X)
    assert len(said) == 1


def test_compiling_and_tracing_do_not_tell() -> None:
    model = net()
    torch.compile(model, backend="eager")(X)
    torch.jit.trace(model.train(), X, check_trace=False)
    assert tw.stats(model)["blocks.0"].originals == {}


# ---- a server whose threads have gradients on ----


@pytest.fixture
def short_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(original_code, "LONG_ROW", 5)


def fused(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        model(X)
    return model


@pytest.mark.usefixtures("short_row")
def test_gradients_that_go_on_are_told_in_the_end() -> None:
    model = fused(net())
    with told() as said:
        for _ in range(4):
            model(X)
        assert not said
        for _ in range(4):
            model(X)
    (text,) = said
    assert "gradients are on" in text


def step(model: nn.Module) -> None:
    model(X).sum().backward()
    with torch.no_grad():
        for p in model.parameters():
            p.sub_(1e-3)
    model.zero_grad()


def gradient(model: nn.Module) -> None:
    model(X).sum().backward()


@pytest.mark.usefixtures("short_row")
@pytest.mark.parametrize("train", [step, gradient])
def test_training_in_eval_mode_is_not_told(train: Callable[[nn.Module], None]) -> None:
    model = fused(net())
    for _ in range(12):
        train(model)


@pytest.mark.usefixtures("short_row")
def test_frozen_weights_behind_what_trains_are_not_told() -> None:
    model = fused(net()).requires_grad_(False)
    for _ in range(12):
        model(X.clone().requires_grad_()).sum().backward()


# ---- copies, files, threads ----


@pytest.mark.parametrize(
    "again", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"]
)
def test_a_copy_tells_once_for_itself(again: Callable[[nn.Module], nn.Module]) -> None:
    model = net()
    with told() as said:
        model(X)
        other = again(model)
        other(X)
        other(X)
        model(X)
    assert len(said) == 2


def test_a_saved_model_tells_once() -> None:
    file = io.BytesIO()
    torch.save(net(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    with told() as said:
        loaded(X)
    (text,) = said
    assert text.startswith("torchweld: Net ")


def test_a_model_that_an_earlier_version_saved_tells() -> None:
    saved = torch.load(Path(__file__).parents[1] / "data" / "welded_0_1.pt", weights_only=False)
    with told() as said:
        saved["model"](saved["x"])
    assert "gradients are on" in said[0]


def test_many_threads_are_told_once() -> None:
    model = net()

    def call() -> None:
        model(X)

    with told() as said:
        at_once(4 * [call])
    assert len(said) == 1


def test_applying_a_plan_tells_of_the_model_it_was_applied_to() -> None:
    model = Net().eval()
    reweld(model, [decide(MLP, path="blocks.1")])
    with told() as said:
        nn.Sequential(model)(X)
    assert "torchweld: Net is welded" in said[0]
