"""A few model types through the whole of `benchmarks/model_coverage.py`, and the counts it rests on."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from model_coverage import Count, Coverage, cover, mlp_modules, quiet, summary
from torch import Tensor, nn

import torchweld as tw
from torchweld.welds.swapping import swap

pytest.importorskip("transformers")


@pytest.mark.parametrize(
    ("model_type", "whole"),
    [
        ("gpt2", True),  # Conv1D
        ("llama", True),  # gated, separate
        ("phi3", True),  # gated, packed
        ("falcon", True),  # a look-alike of nn.Linear
        ("clip_text_model", True),  # quick_gelu
        ("bert", False),  # an MLP in two modules
        ("opt", False),  # inline in the layer
        ("mixtral", False),  # experts of three dimensions
    ],
)
def test_a_model_type_is_welded_and_gives_the_same_numbers(model_type: str, whole: bool) -> None:
    with quiet():
        found = cover(model_type)
    assert found.problem == ""
    assert found.wrong == ()
    assert found.trained == ""
    assert found.fused_calls > 0
    assert found.welded_flops >= 0.95 * found.linear_flops > 0
    assert (found.mlps > 0) == whole
    assert found.welded_mlps == found.mlps
    assert (found.stack_flops > 0) == (model_type == "mixtral")


class Mlp(nn.Module):
    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 4, bias=False)
        self.norm = nn.LayerNorm(10) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.norm(F.gelu(self.up(x))))
        return y


def test_flops_are_those_of_products_with_parameters() -> None:
    model, x = Mlp(), torch.randn(3, 5, 6)
    with torch.no_grad(), Count(model) as count:
        model(x) @ torch.randn(4, 7)
    assert count.linear_flops == 2 * 15 * (6 * 10 + 10 * 4)
    assert count.stack_flops == 0
    assert count.fused == 0


def test_a_welded_model_has_no_products_left() -> None:
    model, x = Mlp().eval(), torch.randn(3, 6)
    tw.apply(model, tw.plan(model, x, force=True))
    with torch.no_grad(), Count(model) as count:
        model(x)
    assert count.linear_flops == 0
    assert count.fused == 1


def test_an_mlp_is_two_products_in_a_row_with_nothing_but_elementwise_ops() -> None:
    model = nn.Sequential(Mlp(), nn.Linear(4, 6), nn.Sequential(Mlp(norm=True)), nn.Tanh())
    assert mlp_modules(model, lambda: model(torch.randn(2, 6))) == ["0"]


def test_a_wrong_output_misses_the_figure() -> None:
    good = Coverage(model_type="good", linear_flops=100.0, welded_flops=99.0, mlps=2, welded_mlps=2)
    assert summary([good])[1]
    bad = copy.replace(good) if hasattr(copy, "replace") else Coverage(**vars(good))
    bad.model_type, bad.wrong = "bad", ("output 0 is off",)
    text, kept = summary([good, bad])
    assert not kept
    assert "WRONG bad: output 0 is off" in text
    missed = Coverage(model_type="m", linear_flops=100.0, welded_flops=10.0, mlps=1)
    assert not summary([good, missed])[1]


# ---- others than transformers ----


def welded_like(model: nn.Module, inputs: Any) -> tuple[list[str], tw.Check]:
    welded = tw.apply(copy.deepcopy(model), tw.plan(model, inputs, force=True))
    check = tw.verify(model, welded, inputs)
    originals = [p for p, s in swap.stats(welded).items() if s.originals]
    assert originals == []
    return swap.welded_paths(welded), check


@pytest.mark.parametrize("activation", ["geglu", "gelu", "gelu-approximate"])
def test_a_feed_forward_of_diffusers(activation: str) -> None:
    attention = pytest.importorskip("diffusers.models.attention")
    model = attention.FeedForward(24, mult=2, activation_fn=activation).eval()
    paths, check = welded_like(model, torch.randn(2, 5, 24))
    assert paths == [""]
    assert check, check.reason


def test_a_transformer_block_of_diffusers() -> None:
    attention = pytest.importorskip("diffusers.models.attention")
    model = attention.BasicTransformerBlock(24, 2, 12, cross_attention_dim=10).eval()
    inputs = tw.Inputs(torch.randn(2, 5, 24), encoder_hidden_states=torch.randn(2, 3, 10))
    paths, check = welded_like(model, inputs)
    assert "ff" in paths
    assert {"attn1.to_q", "attn1.to_k", "attn1.to_v"} <= set(paths)
    assert check, check.reason


def test_a_model_with_adapters_is_welded_where_its_linears_stand() -> None:
    peft = pytest.importorskip("peft")
    import zoo

    with quiet():
        built = zoo.build("llama")
        config = peft.LoraConfig(target_modules=["q_proj", "up_proj"], r=4, init_lora_weights=False)
        model = peft.get_peft_model(built.model, config).eval()
        paths, check = welded_like(model, built.inputs)
    inner = [path for path in paths if "q_proj" in path]
    assert any(path.endswith("base_layer") for path in inner)
    assert any("lora_A" in path for path in inner)
    assert not any(path.endswith("mlp") for path in paths)  # its up_proj is wrapped
    assert check, check.reason


@pytest.mark.parametrize("fast", [True, False])
def test_the_encoder_of_torch(fast: bool) -> None:
    layer = nn.TransformerEncoderLayer(24, 2, 48, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(fast)
    try:
        paths, check = welded_like(model, torch.randn(2, 5, 24))
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
    assert check, check.reason
    # The fast path reads the weights directly: there is nothing to weld.
    expected = [] if fast else ["layers.0.linear1", "layers.0.linear2"]
    assert [path for path in paths if path.startswith("layers.0.linear")] == expected
