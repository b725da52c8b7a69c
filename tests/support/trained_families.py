"""The built-in models in small, each with something to learn, trained by one seed.

Data are made: sequences that follow a rule, images of a few patterns, a teacher's answers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchweld.core.model_inputs import Inputs
from torchweld.models import MODELS

BATCH, TOKENS, VOCAB, CLASSES = 8, 16, 32, 10


@dataclass(frozen=True, kw_only=True)
class Family:
    """A built-in model of four layers, and how a batch of its task gives a loss."""

    sizes: dict[str, Any]
    task: Callable[[nn.Module, torch.Generator], Tensor]

    def build(self, name: str) -> tuple[nn.Module, Inputs]:
        config = replace(MODELS[name].config, **self.sizes)
        model, inputs = MODELS[name].build(config=config)
        return model.train(), inputs


# ---- tasks ----


def next_tokens(model: nn.Module, random: torch.Generator) -> Tensor:
    """Sequences that go on by a step of their own."""
    start, step = (torch.randint(VOCAB, (BATCH, 1), generator=random) for _ in range(2))
    ids = (start + (1 + step % 4) * torch.arange(TOKENS + 1)) % VOCAB
    logits = model(ids[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def sentences(model: nn.Module, random: torch.Generator) -> Tensor:
    """Sentences of a topic, which has its own tokens, and its own place to be put at."""
    topics = torch.randint(4, (BATCH,), generator=random)
    ids = 1 + topics[:, None] * 7 + torch.randint(7, (BATCH, TOKENS), generator=random)
    lengths = torch.randint(TOKENS // 2, TOKENS + 1, (BATCH, 1), generator=random)
    mask = (torch.arange(TOKENS) < lengths).long()
    found = model(input_ids=ids * mask, attention_mask=mask)
    places = F.normalize(torch.randn(4, found.shape[1], generator=_fixed()), dim=-1)
    return (1 - (found * places[topics]).sum(-1)).mean()


def images(model: nn.Module, random: torch.Generator) -> Tensor:
    """Noisy patterns to be told apart."""
    labels = torch.randint(CLASSES, (BATCH,), generator=random)
    patterns = torch.randn(CLASSES, 3, 16, 16, generator=_fixed())
    noise = torch.randn(BATCH, 3, 16, 16, generator=random)
    return F.cross_entropy(model(patterns[labels] + noise), labels)


def clicks(model: nn.Module, random: torch.Generator) -> Tensor:
    dense = torch.randn(4 * BATCH, 13, generator=random)
    categories = torch.randint(50, (4 * BATCH, 4, 2), generator=random)
    taste = torch.randn(13, generator=_fixed())
    wanted = dense @ taste + (categories.sum((1, 2)) - 196) / 20 > 0
    return F.binary_cross_entropy_with_logits(model(dense, categories), wanted.float())


def actions(model: nn.Module, random: torch.Generator) -> Tensor:
    seen = torch.randn(4 * BATCH, 64, generator=random)
    teacher = torch.randn(64, 8, generator=_fixed()) / 8
    return F.mse_loss(model(seen), torch.tanh(seen @ teacher))


def _fixed() -> torch.Generator:
    return torch.Generator().manual_seed(17)


_text = {"layers": 4, "width": 64, "heads": 2, "vocab": VOCAB, "context": 32}
_text |= {"batch": BATCH, "tokens": TOKENS}
_images = {"layers": 4, "width": 64, "size": 16, "patch": 4, "classes": CLASSES, "batch": BATCH}
FAMILIES: dict[str, Family] = {
    "gpt": Family(sizes=_text, task=next_tokens),
    "llama": Family(sizes={**_text, "hidden": 176, "kv_heads": 1}, task=next_tokens),
    "bert": Family(sizes={**_text, "hidden": 256}, task=sentences),
    "vit": Family(sizes={**_images, "heads": 2}, task=images),
    "mixer": Family(sizes={**_images, "token_hidden": 32, "channel_hidden": 256}, task=images),
    "dlrm": Family(
        sizes={"bottom": (64, 64, 32), "top": (64, 64, 32), "tables": 4, "rows": 50}
        | {"width": 16, "batch": 4 * BATCH},
        task=clicks,
    ),
    "policy": Family(sizes={"hidden": (64, 64, 64, 64), "batch": 4 * BATCH}, task=actions),
}


# ---- training ----


def nudge(model: nn.Module, seed: int) -> None:
    """Moves every weight by one unit in the last place, up or down by the seed; 0 moves none."""
    if seed == 0:
        return
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            to = torch.rand(parameter.shape, generator=random) < 0.5
            parameter.copy_(torch.nextafter(parameter, torch.where(to, torch.inf, -torch.inf)))


def train(family: Family, model: nn.Module, steps: int) -> list[float]:
    """The losses of all steps, on batches that depend on the step alone."""
    random = torch.Generator().manual_seed(23)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = family.task(model, random)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
