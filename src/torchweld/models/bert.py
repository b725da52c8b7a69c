"""A BERT-like encoder that turns sentences into embeddings: the mean over the tokens, unit length.

The sizes are those of the small encoders people run on CPUs for search. As in BERT, the norm comes
after the sum, and the two Linears of the MLP stand in two modules.

`Bert(config)(input_ids [B, T], attention_mask [B, T]) -> embeddings [B, C]`. The mask is 1 where
there is a token and 0 where there is padding.
"""

# nn.Module calls return Any; forward says what it is.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchweld.core.model_inputs import Inputs
from torchweld.models.model_layers import check_divides


@dataclass(frozen=True, kw_only=True)
class BertConfig:
    vocab: int = 8192
    context: int = 512
    width: int = 384
    hidden: int = 1536
    layers: int = 6
    heads: int = 12
    dropout: float = 0.0
    batch: int = 2
    tokens: int = 32

    def __post_init__(self) -> None:
        check_divides(self.heads, self.width, "heads of equal width")


class BertAttention(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        self.query = nn.Linear(config.width, config.width)
        self.key = nn.Linear(config.width, config.width)
        self.value = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        heads = (*x.shape[:2], self.heads, -1)
        q = self.query(x).view(heads).transpose(1, 2)
        k = self.key(x).view(heads).transpose(1, 2)
        v = self.value(x).view(heads).transpose(1, 2)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)
        return y.transpose(1, 2).reshape(x.shape)


class Intermediate(nn.Module):
    """The first half of the MLP."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.width, config.hidden)
        self.act = nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.dense(x))


class Output(nn.Module):
    """A Linear back to the width, the sum with what came in before, and the norm."""

    def __init__(self, config: BertConfig, inner: int) -> None:
        super().__init__()
        self.dense = nn.Linear(inner, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.norm = nn.LayerNorm(config.width)

    def forward(self, y: Tensor, x: Tensor) -> Tensor:
        return self.norm(self.dropout(self.dense(y)) + x)


class BertLayer(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.attention = BertAttention(config)
        self.attention_output = Output(config, config.width)
        self.intermediate = Intermediate(config)
        self.output = Output(config, config.hidden)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        x = self.attention_output(self.attention(x, mask), x)
        return self.output(self.intermediate(x), x)


class Bert(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.norm = nn.LayerNorm(config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(BertLayer(config) for _ in range(config.layers))

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.dropout(self.norm(self.tokens(input_ids) + self.positions(places)))
        mask = None if attention_mask is None else attention_mask[:, None, None, :].bool()
        for layer in self.layers:
            x = layer(x, mask)
        return F.normalize(mean_of_tokens(x, attention_mask), dim=-1)


def mean_of_tokens(x: Tensor, attention_mask: Tensor | None) -> Tensor:
    """[B, T, C] -> [B, C], the mean over those tokens that are not padding."""
    if attention_mask is None:
        return x.mean(dim=1)
    kept = attention_mask[:, :, None].to(x.dtype)
    return (x * kept).sum(dim=1) / kept.sum(dim=1).clamp(min=1)


def example_inputs(config: BertConfig, generator: torch.Generator) -> Inputs:
    """Sentences of different lengths, the longest first, padded to the same."""
    shape = (config.batch, config.tokens)
    ids = torch.randint(1, config.vocab, shape, generator=generator)
    lengths = torch.linspace(config.tokens, max(1, config.tokens // 2), config.batch).long()
    mask = (torch.arange(config.tokens) < lengths[:, None]).long()
    return Inputs(input_ids=ids * mask, attention_mask=mask)
