"""Counters: what they count, that they are the same at every run, and what is made of a change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchweld as tw
from torchweld.core.errors import NotMeasuredError
from torchweld.gates.gate_outcome import CounterChange, changes_of, lost_blocks
from torchweld.gates.step_counters import NAMES, Counters, count_step
from torchweld.models import MODELS
from torchweld.models.gpt import GptConfig
from torchweld.plans.plan_fitting import fit_plan
from torchweld.profiles.attributing.launch_counts import counts_of
from torchweld.welds.found_blocks import Refusal
from torchweld.welds.swapping.module_faces import both_faces

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL_GPT = GptConfig(layers=2, width=48, heads=4, context=16, tokens=5, vocab=70)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))


def welded(model: nn.Module, given: Any, training: bool = False) -> nn.Module:
    return tw.apply(model.train(training), tw.plan(model, given, training=training, force=True))


# ---- counting ----


@pytest.mark.parametrize("training", [False, True])
def test_counters_are_the_same_in_twenty_runs(training: bool) -> None:
    model, inputs = MODELS["gpt"].build(config=SMALL_GPT)
    first = count_step(welded(model, inputs, training), inputs, training)
    assert first.step("kernels") > 20
    assert len(first.welded) > 3
    for _ in range(19):
        assert count_step(model, inputs, training) == first


def test_a_fresh_model_has_the_same_counters() -> None:
    found = []
    for seed in range(2):
        model, inputs = MODELS["gpt"].build(seed, config=SMALL_GPT)
        found.append(count_step(welded(model, inputs), inputs, False))
    assert found[0] == found[1]


def test_kernels_are_what_expect_counts() -> None:
    model, inputs = MODELS["gpt"].build(config=SMALL_GPT)
    with torch.no_grad(), tw.expect() as expected:
        inputs.call(model)
    counted = count_step(model, inputs, False)
    assert counted.step("kernels") == counts_of(expected.ops)["ops"]


def test_welding_shows_in_every_counter() -> None:
    # So many rows that what they save is more than the empty part of a packed panel, of any width.
    model, x = mlp(), torch.randn(64, 8)
    before = count_step(model, x, False)
    after = count_step(welded(model, x), x, False)
    for name in ("kernels", "ops", "allocations", "bytes moved"):
        assert after.step(name) < before.step(name), name
    assert before.step("kernels") == 3
    assert after.step("kernels") == 1
    assert before.welded == ()
    assert after.welded == ("",)


def test_counters_belong_to_the_module_that_causes_them() -> None:
    class Copying(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.clone()

    model = nn.Sequential(mlp(), Copying(), nn.Tanh())
    found = count_step(model, torch.randn(3, 8), False)
    assert found.own["1"]["kernels"] == 1
    assert found.own["1"]["bytes moved"] == 2 * 4 * 3 * 8
    assert found.own["1"]["allocations"] == 1
    assert found.inside("kernels") == {
        "": 5,
        "0": 3,
        "1": 1,
        "2": 1,
        "0.0": 1,
        "0.1": 1,
        "0.2": 1,
    }


def test_calls_that_run_the_original_code_are_counted_with_the_reason() -> None:
    model, x = mlp(), torch.randn(3, 8)
    made = tw.plan(model, x, force=True)
    tw.apply(model, made)
    found = count_step(model, torch.randn(4, 8), False)  # rows that the plan does not cover
    assert found.welded == ()
    assert found.step("original calls") == 1
    assert found.reasons == {"": "rows"}


def test_what_the_gate_welds_says_nothing_of_its_own() -> None:
    """The gate reports the original code itself; a warning would be an error here."""
    model, x = mlp().eval(), torch.randn(3, 8)
    made = tw.plan(model, x, force=True)
    with both_faces(model, fit_plan(model, made).decisions), torch.no_grad():
        model(torch.randn(4, 8))
        assert tw.stats(model)[""].originals == {"rows": 1}


def test_the_model_is_left_as_it_was() -> None:
    model, x = mlp().train(), torch.randn(3, 8)
    model(x).sum().backward()
    grads = [p.grad for p in model.parameters()]
    count_step(model, x, False)
    assert model.training
    assert all(p.grad is g for p, g in zip(model.parameters(), grads, strict=True))


def test_a_step_that_is_not_the_same_twice_has_no_counters() -> None:
    class Growing(nn.Module):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            for _ in range(self.calls):
                x = x + 1
            return x

    with pytest.raises(NotMeasuredError, match="differ between two steps on the same inputs"):
        count_step(Growing(), torch.randn(3), False)


# ---- what is made of a change ----


def counters(welded: tuple[str, ...] = (), **kernels: int) -> Counters:
    """Counters by module, with _ for the dots; `root` is the model."""
    own = {
        path.replace("_", ".").removeprefix("root"): {**dict.fromkeys(NAMES, 0), "kernels": n}
        for path, n in kernels.items()
    }
    return Counters(own={"": dict.fromkeys(NAMES, 0), **own}, welded=welded)


def kernels(module: str, before: int, after: int) -> CounterChange:
    return CounterChange(counter="kernels", module=module, before=before, after=after)


def test_nothing_changed() -> None:
    assert changes_of(counters(a=1, a_b=2), counters(a=1, a_b=2)) == []


def test_the_innermost_module_that_got_worse_is_named() -> None:
    before, after = counters(a=1, a_b=2, c=1), counters(a=1, a_b=4, c=1)
    assert changes_of(before, after) == [kernels("", 4, 6), kernels("a.b", 2, 4)]


def test_what_got_worse_is_found_where_the_whole_did_not() -> None:
    found = changes_of(counters(a=1, b=3), counters(a=2, b=1))
    assert found == [kernels("", 4, 3), kernels("a", 1, 2)]
    assert [change.worse for change in found] == [False, True]


def test_a_new_module_is_judged_by_what_it_stands_in() -> None:
    before, after = counters(a=1, a_b=2), counters(a=1, a_b=2, a_new=1)
    assert changes_of(before, after) == [kernels("", 3, 4), kernels("a", 3, 4)]
    renamed = counters(a=1, a_other=2)
    assert changes_of(before, renamed) == []


def test_a_change_of_the_models_own_forward_is_the_steps() -> None:
    assert changes_of(counters(root=1, a=1), counters(root=2, a=1)) == [kernels("", 2, 3)]


def test_a_block_is_lost_with_the_reason() -> None:
    before, after = counters(welded=("a", "b", "c")), counters(welded=("a",))
    after = Counters(own=after.own, welded=after.welded, reasons={"c": "rows"})
    norm = "a layer norm between the Linears"
    refusal = Refusal(path="b", kind="Mlp", reason=norm, op="aten.layer_norm", where="model.py:7")
    found = lost_blocks(before, after, [refusal])
    assert [(one.path, one.why) for one in found] == [
        ("b", f"{norm} (aten.layer_norm, model.py:7)"),
        ("c", "rows"),
    ]
