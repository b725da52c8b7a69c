"""Tests welded models that are switched off and on, checked in use, and called by many threads."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.support.helpers import ISAS, at_once, kernel_runs, run_python
from tests.support.swap_blocks import (
    CASES,
    LINEAR,
    MLP,
    NATURAL,
    PACKED,
    K,
    Mlp,
    N,
    X,
    decide,
    model_of,
)
from torch import Tensor, nn

import torchweld as tw
from torchweld import ops
from torchweld.core.errors import TorchweldError
from torchweld.welds.swapping.call_stats import Stats
from torchweld.welds.swapping.swap import check_calls, disabled, is_welded, stats, undo, weld
from torchweld.welds.weld_decisions import Choice, Decision

pytestmark = [
    pytest.mark.skipif(not ISAS, reason="no compiled kernels on this machine"),
    pytest.mark.usefixtures("one_thread"),
]

TORCH = Choice(backend="torch")


# ---- off and on ----


def test_disabled_runs_the_original() -> None:
    model, plain = model_of("mlp")
    with torch.no_grad():
        welded = model(X)
        with disabled(model):
            with kernel_runs(calls=0):
                assert torch.equal(model(X), plain(X))
            with disabled(model), kernel_runs(calls=0):
                model(X)
            with kernel_runs(calls=0):
                model(X)
            assert is_welded(model[1])
        for _ in range(2):
            with kernel_runs("packed"):
                assert torch.equal(model(X), welded)
    assert stats(model)["1"].originals == {"disabled": 3}


def test_disabled_ends_with_an_error_too() -> None:
    model, _ = model_of("mlp")
    with pytest.raises(KeyError), disabled(model):
        raise KeyError
    with torch.no_grad(), kernel_runs("packed"):
        model(X)


def test_disabled_on_a_part_and_on_what_is_not_welded() -> None:
    model = nn.Sequential(Mlp(), nn.Linear(N, N)).eval()
    with disabled(model):
        pass
    block = replace(LINEAR, in_features=N)
    weld(model, [decide(MLP, path="0"), decide(block, path="1")])
    with torch.no_grad(), disabled(model[0]), kernel_runs("packed", calls=1):
        model(X)
    with disabled(model):
        undo(model)
    assert not is_welded(model[0])


OFF = """
import torch
from torch import nn
from torchweld import ops
from torchweld.welds.weld_decisions import Choice, Decision
from torchweld.welds.found_blocks import Block
from torchweld.welds.swapping.swap import is_welded, stats, undo, weld
block = Block(path="", kind="Linear", form="identity/b", tensors=("weight", "bias"), covers=(),
              argument="input", in_features=8, out_features=4, dtype="float32")
module = nn.Linear(8, 4).eval()
choice = Choice(backend="cpu", packed=True)
weld(module, [Decision(block=block, by_rows=((1, 9, choice),))])
assert is_welded(module)
with torch.no_grad():
    module(torch.randn(2, 8))
print(ops.compiled.last_run()["calls"], dict(stats(module)[""].originals))
traced = torch.jit.trace(module, torch.randn(2, 8))
print("torchweld::" in str(traced.inlined_graph))
undo(module)
assert type(module) is nn.Linear
"""


def test_an_environment_variable_turns_all_of_a_process_off() -> None:
    env = {**os.environ, "TORCHWELD": "0", "PYTHONWARNINGS": "ignore"}
    assert run_python(OFF, env=env) == "0 {'disabled': 1}\nFalse\n"


# ---- stats ----


def test_stats_of_every_welded_module() -> None:
    model = nn.Sequential(Mlp(), nn.ReLU(), nn.Linear(N, N)).eval()
    block = replace(LINEAR, in_features=N)
    weld(model, [decide(MLP, path="0"), decide(block, NATURAL, path="2", rows=(1, 2))])
    assert stats(model) == {"0": Stats(), "2": Stats()}
    with torch.no_grad():
        with pytest.warns(tw.OriginalCodeWarning, match="block 2 .* 5 rows, .* covers 1 to 2"):
            model(X)
        for _ in range(3):
            model(X.expand(2, 5, K))
    model(X)
    found = stats(model)
    assert found["0"].originals == {"gradients": 1}
    assert found["2"].originals == {"rows": 4, "gradients": 1}
    weights = sum(p.nbytes for p in model[0].parameters())
    assert weights <= found["0"].copied_bytes <= 2 * weights
    assert found["2"].copied_bytes == 0


def test_stats_print_as_a_table_with_sums() -> None:
    model = nn.Sequential(Mlp(), nn.ReLU(), nn.Linear(N, N)).eval()
    assert str(stats(model)) == "nothing is welded"
    block = replace(LINEAR, in_features=N)
    by_rows = ((1, 2, NATURAL), (3, 99, None))
    weld(
        model,
        [decide(MLP, NATURAL, path="0"), Decision(block=replace(block, path="2"), by_rows=by_rows)],
    )
    assert str(stats(model)).splitlines()[1:] == [
        "0      –                   0",
        "2      –                   0",
        "2 blocks welded, 0 of them ran fused",
        "0 calls of the original code",
    ]
    with torch.no_grad():
        for _ in range(3):
            model(X)
        with disabled(model):
            model(X)
    assert str(stats(model)).splitlines() == [
        "block  fused  original calls  why",
        "0      yes                 1  disabled 1",
        "2      never               4  rows 3, disabled 1",
        "2 blocks welded, 1 of them ran fused",
        "5 calls of the original code: rows 3, disabled 2",
    ]
    check_calls(model, first=1)
    with torch.no_grad():
        model(X)
    assert str(stats(model)).splitlines()[-1] == "1 call checked"
    assert "of packed weights" in str(stats(model_used("mlp")))
    assert tw.stats is stats


def model_used(kind: str) -> nn.Module:
    model, _ = model_of(kind)
    with torch.no_grad():
        model(X)
    return model


# ---- the safety net ----


@pytest.mark.parametrize("choice", [PACKED, NATURAL, TORCH], ids=["packed", "natural", "torch"])
@pytest.mark.parametrize("kind", CASES)
def test_the_first_calls_are_checked(kind: str, choice: Choice) -> None:
    model, _ = model_of(kind, choice)
    with torch.no_grad():
        model(X)
        assert check_calls(model, first=3) is model
        for i in range(5):
            with kernel_runs(calls=1 if choice.backend == "cpu" else 0):
                model(torch.randn(1 + i, K))
    assert stats(model)["1"].checked == 3
    assert is_welded(model[1])


def test_calls_that_are_not_covered_are_not_checked() -> None:
    model, _ = model_of("mlp")
    check_calls(model, first=2)
    with pytest.warns(tw.OriginalCodeWarning, match="gradients are on"):
        model(X)
    with torch.no_grad():
        with pytest.warns(tw.OriginalCodeWarning, match="100 rows"):
            model(torch.randn(100, K))
        assert stats(model)["1"].checked == 0
        model(X)
    assert stats(model)["1"].checked == 1


def test_a_sample_is_checked_until_it_is_ended() -> None:
    model, _ = model_of("linear")
    check_calls(model, sample=0.5)
    with torch.no_grad():
        for _ in range(60):
            model(X)
        checked = stats(model)["1"].checked
        assert 15 <= checked <= 45
        check_calls(model, first=0)
        for _ in range(20):
            model(X)
    assert stats(model)["1"].checked == checked


@pytest.mark.parametrize("grad", [False, True])
def test_training_is_checked_with_its_gradients(grad: bool) -> None:
    model, plain = model_of("gated", training=True)
    check_calls(model, first=1)
    with torch.set_grad_enabled(grad), kernel_runs(calls=2 if grad else 1):
        y = model.train()(X)
    assert stats(model)["1"].checked == 1
    torch.testing.assert_close(y, plain.train()(X))
    if grad:
        y.sum().backward()
        assert model.get_parameter("1.gate.weight").grad is not None


def test_a_checked_call_draws_no_random_numbers() -> None:
    model, _ = model_of("mlp")
    check_calls(model, first=1)
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    with torch.no_grad():
        model(X)
    assert stats(model)["1"].checked == 1
    assert torch.equal(torch.rand(3), expected)


def undone(model: nn.Sequential, plain: nn.Sequential, x: Tensor, because: str) -> None:
    """Asserts that a check undoes the weld, and gives the original's result."""
    check_calls(model, first=1)
    message = f"1 is welded no longer, since a call disagreed with the original: .*{because}"
    with pytest.warns(UserWarning, match=message):
        y = model(x)
    assert torch.equal(y, plain(x))
    assert not is_welded(model[1])
    assert type(model[1]) is type(plain[1])
    with kernel_runs(calls=0):
        assert torch.equal(model(x), plain(x))


def test_a_block_that_is_not_what_the_module_computes_is_undone() -> None:
    """Wrong blocks: another activation, another order of gate and up, another factor."""
    wrong = {
        "mlp": replace(CASES["mlp"][1], form="gelu_tanh/b;identity/b"),
        "packed gate": replace(CASES["packed gate"][1], form="silu/b/second;identity/b"),
        "raw": replace(CASES["raw"][1], scale=0.5001),
    }
    for kind, block in wrong.items():
        model, plain = model_of(kind)
        weld(model, [decide(block, path="1")])
        with torch.no_grad():
            undone(model, plain, X, "the module computes something else than its block")


def test_a_kernel_that_is_wrong_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    from torchweld.welds.swapping import joint

    def off_by_little(stand: Any, x: Tensor) -> Tensor:
        y = ops.compiled_forward(stand, x)
        assert y is not None
        y[-1, -1] += 1e-4
        return y

    monkeypatch.setattr(joint, "compiled_forward", off_by_little)
    model, plain = model_of("linear")
    with torch.no_grad():
        undone(model, plain, X, "row 4 is off by")


def test_only_the_block_that_disagrees_is_undone() -> None:
    model = nn.Sequential(Mlp(), nn.Linear(N, N)).eval()
    block = replace(LINEAR, in_features=N)
    wrong = replace(MLP, form="silu/b;identity/b")
    weld(model, [decide(wrong, path="0"), decide(block, path="1")])
    check_calls(model, first=2)
    with torch.no_grad(), pytest.warns(UserWarning, match="0 is welded no longer"):
        model(X)
    assert list(stats(model)) == ["1"]


def test_what_check_calls_takes() -> None:
    model, _ = model_of("mlp")
    for wrong in ({}, {"first": 1, "sample": 0.1}, {"first": -1}, {"sample": 0.0}, {"sample": 1.5}):
        with pytest.raises(TorchweldError, match=r"first|sample"):
            check_calls(model, **wrong)


# ---- threads ----

CALLS = 30


def in_threads(model: nn.Module, sizes: tuple[int, ...], meanwhile: Callable[[], None]) -> None:
    """Calls the model with different sizes at once, while `meanwhile` runs."""
    xs = [torch.randn(rows, K) for rows in sizes]
    with torch.no_grad(), disabled(model):
        expected = [model(x) for x in xs]
    working, interval = threading.Semaphore(0), sys.getswitchinterval()

    def body(x: Tensor, right: Tensor) -> Callable[[], None]:
        def run() -> None:
            try:
                with torch.no_grad():
                    for _ in range(CALLS):
                        torch.testing.assert_close(model(x), right)
            finally:
                working.release()

        return run

    def other() -> None:
        done = 0
        while done < len(xs):
            meanwhile()
            done += working.acquire(timeout=0.001)

    sys.setswitchinterval(1e-6)
    try:
        at_once([*(body(x, y) for x, y in zip(xs, expected, strict=True)), other])
    finally:
        sys.setswitchinterval(interval)


@pytest.mark.parametrize("kind", CASES)
def test_many_threads_call_one_model(kind: str) -> None:
    model, _ = model_of(kind)
    in_threads(model, (1, 3, 8, 40), lambda: None)
    assert stats(model)["1"].originals == {"disabled": 4}


@pytest.mark.filterwarnings("ignore::torchweld.OriginalCodeWarning")  # if 100 rows come first
def test_switched_off_and_on_under_way() -> None:
    model, _ = model_of("mlp")

    def switch() -> None:
        with disabled(model):
            pass

    in_threads(model, (1, 3, 100), switch)
    with torch.no_grad(), kernel_runs("packed"):
        model(X)


def test_welded_and_undone_under_way() -> None:
    model, _ = model_of("mlp")
    decisions = [decide(MLP, path="1"), decide(MLP, NATURAL, path="1")]

    def swap() -> None:
        undo(model)
        weld(model, decisions[:1])
        weld(model, decisions[1:])

    in_threads(model, (1, 3, 40), swap)


def test_copies_dropped_and_hooks_set_under_way() -> None:
    model, _ = model_of("mlp")
    act = model.get_submodule("1.act")
    seen: list[int] = []

    def disturb() -> None:
        handle = act.register_forward_hook(lambda *_: seen.append(1))
        model.to("cpu")
        handle.remove()
        tw.repack(model)

    handle = act.register_forward_hook(lambda *_: None)
    with torch.no_grad(), pytest.warns(UserWarning, match="act has forward hooks"):
        model(X)  # warns once here, so not in the threads
    handle.remove()
    in_threads(model, (1, 3, 40), disturb)


def test_the_first_calls_in_many_threads() -> None:
    for _ in range(5):
        model, plain = model_of("mlp")
        with torch.no_grad():
            expected = plain(X)

        def body(model: nn.Module = model, expected: Tensor = expected) -> None:
            with torch.no_grad(), kernel_runs("packed"):
                y = model(X)
            torch.testing.assert_close(y, expected)

        at_once([body] * 4)


@pytest.mark.filterwarnings("ignore::torchweld.OriginalCodeWarning")  # if 13 rows come first
def test_a_table_read_by_many_threads() -> None:
    module = Mlp().eval()
    by_rows = ((1, 2, NATURAL), (3, 6, PACKED), (7, 8, None), (9, 12, TORCH))
    weld(module, [Decision(block=MLP, by_rows=by_rows)])
    in_threads(module, (1, 2, 3, 7, 10, 13), lambda: None)
