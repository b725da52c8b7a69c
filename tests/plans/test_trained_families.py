"""Welded models train as eager does: the built-in families, and models of transformers.

Training is chaotic: a weight that differs in its last bit changes all later losses in theirs, then
in more. So a welded run is compared with several runs of eager, which differ in just that.
"""

from __future__ import annotations

import importlib.util
import statistics
from typing import Any

import pytest
import torch
from tests.support.helpers import ISAS, last_run, using_threads
from tests.support.trained_families import FAMILIES, nudge, train
from tests.support.training_steps import saved_bytes
from torch import nn

import torchweld as tw
from torchweld.core.model_inputs import Inputs

pytestmark = pytest.mark.skipif(not ISAS, reason="no compiled kernels on this machine")


def weld_all(model: nn.Module, inputs: Inputs | Any, **how: Any) -> tw.Plan:
    """Every block that verifies, whether it is faster or not."""
    plan = tw.plan(model, inputs, training=True, force=True, **how)
    tw.apply(model, plan)
    return plan


def welded_run(name: str, steps: int, **how: Any) -> list[float]:
    """The losses; every step's backward is seen to go through our kernels."""
    model, inputs = FAMILIES[name].build(name)
    plan = weld_all(model, inputs, **how)
    assert plan.outcomes["welded"] >= 1
    before = last_run()["backwards"]
    losses = train(FAMILIES[name], model, steps)
    assert last_run()["backwards"] - before >= steps
    assert all(stat.fused for stat in tw.stats(model).values())
    return losses


def eager_run(name: str, steps: int, seed: int = 0) -> list[float]:
    model, _ = FAMILIES[name].build(name)
    nudge(model, seed)
    return train(FAMILIES[name], model, steps)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("recompute", [None, pytest.param(True, marks=pytest.mark.slow)])
def test_a_welded_model_trains_as_eager_does(recompute: bool | None) -> None:
    losses = welded_run("mixer", 20, recompute=recompute)
    assert losses == pytest.approx(eager_run("mixer", 20), rel=1e-4)
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("recompute", "most"), [(False, 0.57), (True, 0.12)])
def test_bytes_that_a_welded_block_saves(recompute: bool, most: float) -> None:
    block = nn.Sequential(nn.Linear(96, 384), nn.GELU(), nn.Linear(384, 96))
    x = torch.randn(4, 96, requires_grad=True)
    eager = saved_bytes(lambda: block(x), block)
    weld_all(block, x.detach(), recompute=recompute)
    assert saved_bytes(lambda: block(x), block) <= most * eager


# Thread counts, and by what seed all weights are moved by one unit in the last place.
RUNS = [(1, 0), (2, 0), (1, 1), (2, 2), (1, 3)]


def end_of(losses: list[float]) -> float:
    """A single batch that goes wrong would move a mean by more than all runs are apart."""
    return statistics.median(losses[-50:])


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [False, True], ids=["save", "recompute"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_ends_within_the_spread_of_eager(name: str, recompute: bool) -> None:
    """200 steps of each of five runs of eager, and of two that are welded.

    A sixth run of eager would be outside of the other five in one of three cases, by chance. So
    what is allowed goes as far beyond them on either side as they are apart.
    """
    steps, ends = 200, []
    for threads, seed in RUNS:
        with using_threads(threads):
            losses = eager_run(name, steps, seed)
        ends.append(end_of(losses))
    assert end_of(losses) < 0.7 * losses[0], "it did not learn"
    least, most = min(ends), max(ends)
    assert most > least, "eager's runs are all the same: there is no spread"
    for threads in (1, 2):
        with using_threads(threads):
            end = end_of(welded_run(name, steps, recompute=recompute))
        assert 2 * least - most <= end <= 2 * most - least, f"{end} is not among {ends}"


# ---- models of transformers ----

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)
needs_peft = pytest.mark.skipif(
    importlib.util.find_spec("peft") is None, reason="peft is not installed"
)


def tiny(kind: str) -> tuple[nn.Module, torch.Tensor]:
    """GPT-2 or Llama with random weights, in train mode, without dropout."""
    import transformers

    torch.manual_seed(2)
    sizes: dict[str, Any] = {
        "vocab_size": 50,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    if kind == "gpt2":
        config = transformers.GPT2Config(**sizes, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)
        model: nn.Module = transformers.GPT2LMHeadModel(config)
    else:
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**sizes, intermediate_size=88)
        )
    return model.train(), torch.randint(50, (2, 12))


def steps_of(model: nn.Module, ids: torch.Tensor, count: int = 4) -> list[float]:
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    losses = []
    for _ in range(count):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    return losses


@needs_transformers
@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_model_of_transformers(kind: str) -> None:
    model, ids = tiny(kind)
    plan = weld_all(model, Inputs(input_ids=ids, labels=ids))
    assert plan.outcomes["welded"] >= 4
    before = last_run()["backwards"]
    losses = steps_of(model, ids)
    assert last_run()["backwards"] - before >= 4 * 4
    assert losses == pytest.approx(steps_of(*tiny(kind)), rel=1e-4)


def adapted(kind: str) -> tuple[nn.Module, torch.Tensor]:
    import peft

    model, ids = tiny(kind)
    gpt = kind == "gpt2"
    config = peft.LoraConfig(
        r=4,
        target_modules=["c_attn" if gpt else "q_proj"],
        fan_in_fan_out=gpt,
        init_lora_weights=False,
    )
    return peft.get_peft_model(model, config).train(), ids


@needs_transformers
@needs_peft
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks for it
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("kind", ["gpt2", pytest.param("llama", marks=pytest.mark.slow)])
def test_a_frozen_model_with_adapters(kind: str) -> None:
    """The base is welded, its weights get no gradients, and no product computes any."""
    model, ids = adapted(kind)
    weld_all(model, Inputs(input_ids=ids, labels=ids))
    before = last_run()["backwards"]
    losses = steps_of(model, ids)
    assert last_run()["backwards"] > before
    assert losses == pytest.approx(steps_of(*adapted(kind)), rel=1e-4)
    frozen = [p for name, p in model.named_parameters() if "lora" not in name]
    assert all(p.grad is None and not p.requires_grad for p in frozen)
