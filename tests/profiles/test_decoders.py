"""The built-in decoders: causal, positions, attention and rotary tables against plain loops."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from tests.models.test_models import SMALL, small
from torch import Tensor, nn

from torchweld.models.gpt import Gpt
from torchweld.models.llama import Llama, LlamaAttention, RmsNorm, rotary_tables, rotate
from torchweld.models.model_layers import Attention


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
