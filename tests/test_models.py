"""The built-in models compute what their names say, the same every time, on any torch path."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchweld.errors import TorchweldError
from torchweld.inputs import Inputs
from torchweld.models import DEMO, MODELS, seeded
from torchweld.models.bert import Bert, BertConfig
from torchweld.models.dlrm import Dlrm, DlrmConfig
from torchweld.models.gpt import Gpt, GptConfig
from torchweld.models.layers import Attention, to_patches
from torchweld.models.llama import (
    Llama,
    LlamaAttention,
    LlamaConfig,
    RmsNorm,
    rotary_tables,
    rotate,
)
from torchweld.models.mixer import MixerConfig
from torchweld.models.policy import PolicyConfig
from torchweld.models.vit import VitConfig

# Odd sizes, small enough for a test.
SMALL: dict[str, Any] = {
    "gpt": GptConfig(vocab=97, context=20, width=24, layers=2, heads=3, batch=2, tokens=9),
    "llama": LlamaConfig(
        vocab=89,
        context=16,
        width=24,
        hidden=41,
        layers=2,
        heads=6,
        kv_heads=2,
        batch=2,
        tokens=7,
    ),
    "bert": BertConfig(
        vocab=83, context=15, width=24, hidden=37, layers=2, heads=4, batch=3, tokens=8
    ),
    "vit": VitConfig(size=12, patch=4, width=18, layers=2, heads=3, classes=5, batch=2),
    "dlrm": DlrmConfig(
        features=3, bottom=(11,), top=(9, 7), tables=4, rows=6, bag=3, width=5, batch=19
    ),
    "policy": PolicyConfig(observation=7, hidden=(11, 5), actions=3, batch=4),
    "mixer": MixerConfig(
        size=12, patch=4, width=10, token_hidden=7, channel_hidden=13, layers=2, classes=5, batch=2
    ),
}
OUTPUT_SHAPES = {
    "gpt": (2, 9, 97),
    "llama": (2, 7, 89),
    "bert": (3, 24),
    "vit": (2, 5),
    "dlrm": (19,),
    "policy": (4, 3),
    "mixer": (2, 5),
}
ALL = list(MODELS)


def small(name: str, seed: int = 0) -> tuple[nn.Module, Inputs]:
    return MODELS[name].build(seed, SMALL[name])


# ---- all of them ----


def test_every_model_is_tested_and_the_demo_is_one() -> None:
    assert set(SMALL) == set(OUTPUT_SHAPES) == set(MODELS)
    assert DEMO in MODELS
    assert [builtin.name for builtin in MODELS.values()] == ALL


@pytest.mark.parametrize("name", ALL)
def test_default_model_runs_on_its_own_inputs(name: str) -> None:
    model, inputs = MODELS[name].build()
    assert not model.training
    with torch.no_grad():
        y = inputs.call(model)
    assert y.isfinite().all()
    assert y.std() > 0


@pytest.mark.parametrize("name", ALL)
def test_descriptions_are_one_line_and_follow_the_configuration(name: str) -> None:
    builtin = MODELS[name]
    assert len(f"{name}  {builtin.description}") <= 100
    assert "{" not in builtin.description
    other = replace(builtin, config=SMALL[name])
    assert other.description != builtin.description


@pytest.mark.parametrize("name", ALL)
def test_output_shapes(name: str) -> None:
    model, inputs = small(name)
    assert inputs.call(model).shape == OUTPUT_SHAPES[name]


@pytest.mark.parametrize("name", ALL)
def test_gradients_reach_every_parameter(name: str) -> None:
    model, inputs = small(name)
    y = inputs.call(model.train())
    (y * torch.randn(y.shape)).sum().backward()
    missing = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert missing == []


@pytest.mark.parametrize("name", ALL)
def test_same_seed_same_model_and_the_global_state_is_untouched(name: str) -> None:
    before = torch.get_rng_state()
    first, x = small(name, seed=3)
    second, y = small(name, seed=3)
    other, z = small(name, seed=4)
    assert torch.equal(torch.get_rng_state(), before)
    for a, b in zip(first.state_dict().values(), second.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    for a, b in zip(x.tensors(), y.tensors(), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(x.tensors()[0], z.tensors()[0])
    changed = [
        not torch.equal(a, b)
        for a, b in zip(first.parameters(), other.parameters(), strict=True)
        if a.dim() > 1
    ]
    assert all(changed)


@pytest.mark.parametrize("name", ALL)
def test_the_model_does_not_depend_on_what_was_drawn_before(name: str) -> None:
    torch.manual_seed(11)
    first, x = small(name)
    torch.manual_seed(12)
    second, y = small(name)
    assert torch.equal(x.call(first), y.call(second))


@pytest.mark.parametrize("name", ALL)
def test_state_dict_round_trip(name: str) -> None:
    model, inputs = small(name, seed=1)
    other, _ = small(name, seed=2)
    assert not torch.equal(inputs.call(model), inputs.call(other))
    other.load_state_dict(model.state_dict())
    assert torch.equal(inputs.call(model), inputs.call(other))


@pytest.mark.parametrize("name", ALL)
def test_training_and_gradient_mode_do_not_change_the_result_without_dropout(name: str) -> None:
    model, inputs = small(name)
    with torch.no_grad():
        plain = inputs.call(model)
    with torch.inference_mode():
        assert torch.equal(inputs.call(model), plain)
    torch.testing.assert_close(inputs.call(model.train()), plain)


@pytest.mark.parametrize("name", ["gpt", "bert", "vit"])
def test_dropout_acts_in_training_only(name: str) -> None:
    model, inputs = MODELS[name].build(config=replace(SMALL[name], dropout=0.5))
    assert torch.equal(inputs.call(model), inputs.call(model))
    model.train()
    assert not torch.equal(inputs.call(model), inputs.call(model))


@pytest.mark.parametrize("name", ALL)
def test_rows_of_a_batch_do_not_see_each_other(name: str) -> None:
    model, inputs = small(name)
    together = inputs.call(model)
    alone = Inputs(
        *(t[:1] for t in inputs.args), **{key: t[:1] for key, t in inputs.kwargs.items()}
    )
    torch.testing.assert_close(alone.call(model), together[:1])


@pytest.mark.parametrize("name", ALL)
def test_bfloat16_stays_close(name: str) -> None:
    model, inputs = small(name)
    wide = inputs.call(model)
    half = Inputs(
        *(t.bfloat16() if t.is_floating_point() else t for t in inputs.args), **inputs.kwargs
    )
    narrow = half.call(model.bfloat16())
    assert narrow.dtype == torch.bfloat16
    assert (narrow.float() - wide).norm() < 0.1 * wide.norm()


def test_another_models_configuration_is_refused() -> None:
    with pytest.raises(TorchweldError, match="'gpt' has a GptConfig, not a BertConfig"):
        MODELS["gpt"].build(config=BertConfig())


@pytest.mark.parametrize(
    ("config", "fields"),
    [
        (GptConfig, {"heads": 7}),
        (LlamaConfig, {"kv_heads": 3}),
        (LlamaConfig, {"width": 24, "heads": 8}),
        (BertConfig, {"heads": 5}),
        (VitConfig, {"patch": 15}),
        (MixerConfig, {"patch": 0}),
    ],
)
def test_sizes_that_do_not_fit_are_refused(config: type, fields: dict[str, int]) -> None:
    with pytest.raises(TorchweldError, match="is not a multiple of"):
        config(**fields)


def test_seeded_restores_the_state_after_an_error() -> None:
    before = torch.get_rng_state()

    def fails() -> None:
        with seeded(5):
            torch.randn(3)
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert torch.equal(torch.get_rng_state(), before)


# ---- decoders ----


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_later_tokens_do_not_change_earlier_logits(name: str) -> None:
    model, inputs = small(name)
    (ids,) = inputs.args
    other = ids.clone()
    other[:, 4] = (other[:, 4] + 1) % 50
    a, b = model(ids), model(other)
    torch.testing.assert_close(a[:, :4], b[:, :4])
    assert (a[:, 4:] != b[:, 4:]).any(dim=-1).all(), "some later token ignores its past"


def test_gpt_knows_where_a_token_stands() -> None:
    model, _ = small("gpt")
    logits = model(torch.full((1, 6), 5))
    assert not torch.allclose(logits[:, 0], logits[:, 3])


def test_gpt_head_is_the_embedding() -> None:
    model, _ = small("gpt")
    assert isinstance(model, Gpt)
    assert model.head.weight is model.tokens.weight
    assert "tokens.weight" in dict(model.named_parameters())


def attention_by_hand(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Softmax of scaled products, one query at a time; [heads, T, width] each."""
    rows = []
    for t in range(q.shape[1]):
        end = t + 1 if causal else k.shape[1]
        scores = torch.einsum("hw,hsw->hs", q[:, t], k[:, :end]) / math.sqrt(q.shape[-1])
        rows.append(torch.einsum("hs,hsw->hw", scores.softmax(-1), v[:, :end]))
    return torch.stack(rows, dim=1)


@pytest.mark.parametrize("causal", [True, False])
def test_packed_attention_against_one_query_at_a_time(causal: bool) -> None:
    layer = Attention(12, 3, causal=causal).double()
    x = torch.randn(1, 5, 12, dtype=torch.float64)
    q, k, v = (part.view(5, 3, 4).transpose(0, 1) for part in layer.qkv(x)[0].chunk(3, dim=-1))
    y = attention_by_hand(q, k, v, causal).transpose(0, 1).reshape(1, 5, 12)
    torch.testing.assert_close(layer(x), layer.out(y))


@pytest.mark.parametrize("kv_heads", [1, 2, 6])
def test_llama_attention_against_one_query_at_a_time(kv_heads: int) -> None:
    config = replace(SMALL["llama"], kv_heads=kv_heads)
    layer = LlamaAttention(config).double()
    tokens, width = 5, config.width // config.heads
    x = torch.randn(1, tokens, config.width, dtype=torch.float64)
    cos, sin = (table[:tokens].double() for table in rotary_tables(16, width, 10_000.0))

    def turned(row: Tensor, position: int) -> Tensor:
        """Pair by pair as complex numbers."""
        speeds = 10_000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
        pairs = torch.complex(row[: width // 2], row[width // 2 :])
        pairs = pairs * torch.polar(torch.ones_like(speeds), position * speeds)
        return torch.cat((pairs.real, pairs.imag))

    def heads(linear: nn.Linear, count: int, turn: bool) -> Tensor:
        rows = linear(x)[0].view(tokens, count, width)
        if turn:
            rows = torch.stack(
                [torch.stack([turned(r, t) for r in rows[t]]) for t in range(tokens)]
            )
        return rows.transpose(0, 1)

    share = [h // (config.heads // kv_heads) for h in range(config.heads)]
    q = heads(layer.q_proj, config.heads, True)
    k = heads(layer.k_proj, kv_heads, True)[share]
    v = heads(layer.v_proj, kv_heads, False)[share]
    y = attention_by_hand(q, k, v, causal=True).transpose(0, 1).reshape(1, tokens, config.width)
    # The model's tables are float32.
    torch.testing.assert_close(layer(x, cos, sin), layer.o_proj(y), rtol=1e-5, atol=1e-6)


def test_rotary_products_depend_on_the_distance_only() -> None:
    cos, sin = rotary_tables(64, 8, 10_000.0)
    q, k = torch.randn(2, 8)

    def product(i: int, j: int) -> Tensor:
        return rotate(q, cos[i], sin[i]) @ rotate(k, cos[j], sin[j])

    for distance in (0, 1, 7, 30):
        products = torch.stack([product(i + distance, i) for i in (0, 1, 13, 33)])
        torch.testing.assert_close(products, products[:1].expand(4), rtol=1e-5, atol=1e-5)
    assert not torch.isclose(product(5, 0), product(0, 5), rtol=1e-3)


def test_rotary_keeps_lengths_and_the_first_position() -> None:
    cos, sin = rotary_tables(32, 6, 500.0)
    x = torch.randn(2, 3, 32, 6)
    y = rotate(x, cos, sin)
    torch.testing.assert_close(y.norm(dim=-1), x.norm(dim=-1))
    assert torch.equal(y[:, :, 0], x[:, :, 0])
    assert not torch.allclose(y[:, :, 1], x[:, :, 1])


def test_llama_does_not_depend_on_the_absolute_position() -> None:
    """Rotary positions are relative: shifting all of them changes nothing."""
    model, inputs = small("llama")
    assert isinstance(model, Llama)
    (ids,) = inputs.args
    plain = model(ids)
    model.cos, model.sin = model.cos[5:], model.sin[5:]
    torch.testing.assert_close(model(ids), plain, rtol=1e-4, atol=1e-5)
    model.cos, model.sin = model.cos.flip(0) * 0.5, model.sin
    assert not torch.allclose(model(ids), plain, rtol=1e-4, atol=1e-5)


def test_rms_norm_is_torchs() -> None:
    ours, theirs = RmsNorm(6, 1e-5), nn.RMSNorm(6, 1e-5)
    with torch.no_grad():
        for norm in (ours, theirs):
            norm.weight.copy_(torch.arange(6.0))
    x = torch.randn(3, 6) * 10
    torch.testing.assert_close(ours(x), theirs(x))


def test_rotary_tables_are_not_in_checkpoints() -> None:
    model, _ = small("llama")
    assert not [name for name in model.state_dict() if name in ("cos", "sin")]


# ---- encoders ----


def test_sentence_embeddings_have_unit_length() -> None:
    model, inputs = small("bert")
    torch.testing.assert_close(inputs.call(model).norm(dim=-1), torch.ones(3))


def test_padding_does_not_change_a_sentence() -> None:
    model, _ = small("bert")
    ids = torch.randint(1, 80, (1, 5))
    padded = torch.cat((ids, torch.randint(1, 80, (1, 4))), dim=1)
    mask = torch.tensor([[1] * 5 + [0] * 4])
    torch.testing.assert_close(model(padded, mask), model(ids))
    assert not torch.allclose(model(padded), model(ids))


def test_example_sentences_have_different_lengths() -> None:
    _, inputs = MODELS["bert"].build()
    lengths = inputs.kwargs["attention_mask"].sum(dim=1).tolist()
    assert len(set(lengths)) == len(lengths)
    assert (inputs.kwargs["input_ids"].ne(0).sum(dim=1) == torch.tensor(lengths)).all()


def test_bert_reads_in_both_directions() -> None:
    model, _ = small("bert")
    assert isinstance(model, Bert)
    x = torch.randn(1, 6, 24)
    y = x.clone()
    y[:, 5] += 1
    layer = model.layers[0]
    assert not torch.allclose(layer(x, None)[:, 0], layer(y, None)[:, 0])


# ---- images ----


def test_patches_are_the_squares_of_the_image() -> None:
    images = torch.randn(2, 3, 8, 12)
    patches = to_patches(images, 4)
    assert patches.shape == (2, 6, 48)
    assert torch.equal(patches[1, 4], images[1, :, 4:8, 4:8].flatten())


def test_a_linear_over_patches_is_a_strided_convolution() -> None:
    images = torch.randn(1, 3, 12, 12)
    linear = nn.Linear(48, 5)
    conv = nn.functional.conv2d(images, linear.weight.view(5, 3, 4, 4), linear.bias, stride=4)
    y = linear(to_patches(images, 4)).transpose(1, 2).reshape(1, 5, 3, 3)
    torch.testing.assert_close(y, conv)


@pytest.mark.parametrize("name", ["vit", "mixer"])
def test_every_patch_matters(name: str) -> None:
    model, inputs = small(name)
    (images,) = inputs.args
    images = images[:1].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(images)[0, 0], images)
    assert to_patches(gradient, 4).abs().sum(dim=-1).all()


def test_mixer_runs_its_first_mlp_on_a_transposed_view() -> None:
    model, inputs = small("mixer")
    seen: list[bool] = []
    model.layers[0].token_mlp.register_forward_pre_hook(
        lambda _, args: seen.append(args[0].is_contiguous())
    )
    inputs.call(model)
    assert seen == [False]


# ---- recommender ----


def test_dlrm_against_one_row_at_a_time() -> None:
    model, inputs = small("dlrm")
    assert isinstance(model, Dlrm)
    dense, categories = inputs.args
    expected = []
    for row, chosen in zip(dense, categories, strict=True):
        x = model.bottom(row)
        tables = [t.weight[ids].sum(dim=0) for t, ids in zip(model.tables, chosen, strict=True)]
        vectors = [x, *tables]
        products = [vectors[i] @ vectors[j] for i in range(len(vectors)) for j in range(i)]
        expected.append(model.top(torch.cat((x, torch.stack(products)))))
    torch.testing.assert_close(model(dense, categories), torch.cat(expected))
