"""Sentence embeddings on a CPU, made faster by one line.

    python examples/sentence_embeddings.py

A service turns sentences into vectors and finds the closest ones: a query alone, and documents in
batches, two shapes of the same model. The encoder is the built-in BERT-like one with random
weights, so the neighbours mean little; with your own, pass its tokens instead.
"""

import re
import zlib

import torch
from torch import Tensor, nn

import torchweld as tw
from torchweld.measuring import CallableSide
from torchweld.models import MODELS

DOCUMENTS = [
    "The kernel keeps the hidden values in cache and writes only the result.",
    "Fresh bread needs flour, water, salt, yeast and an afternoon.",
    "A profiler shows where the time goes, op by op and module by module.",
    "The night train to Vienna leaves at ten and arrives for breakfast.",
    "Fusing a Linear with its activation saves a round trip through memory.",
    "Tomatoes want sun, and water at the root rather than on the leaves.",
    "An interval tells more than an average, and a control tells whether to believe it.",
    "The museum is closed on Mondays, except in August.",
]
QUERY = "Which op takes the time?"


def tokenize(sentences: list[str], vocabulary: int) -> tw.Inputs:
    """A stand-in for a tokenizer: every word is hashed, sentences are padded to the longest."""
    words = [re.findall(r"\w+", sentence.lower()) for sentence in sentences]
    longest = max(len(sentence) for sentence in words)
    ids = torch.zeros(len(words), longest, dtype=torch.long)
    for row, sentence in zip(ids, words, strict=True):
        for i, word in enumerate(sentence):
            row[i] = 1 + zlib.crc32(word.encode()) % (vocabulary - 1)
    return tw.Inputs(input_ids=ids, attention_mask=(ids > 0).long())


@torch.inference_mode()
def embed(encoder: nn.Module, sentences: tw.Inputs) -> Tensor:
    vectors: Tensor = encoder(**sentences.kwargs)
    return vectors


class Side(CallableSide):
    """One encoder, welded or as it was, for `tw.compare`."""

    def __init__(self, encoder: nn.Module, sentences: tw.Inputs, *, welded: bool) -> None:
        super().__init__(lambda: embed(encoder, sentences))
        self.encoder, self.welded = encoder, welded

    def time(self, calls: int) -> float:
        if self.welded:
            return super().time(calls)
        with tw.disabled(self.encoder):
            return super().time(calls)


def main(seconds: float = 5.0) -> None:
    encoder, _ = MODELS["bert"].build()
    vocabulary = MODELS["bert"].config.vocab
    query, documents = tokenize([QUERY], vocabulary), tokenize(DOCUMENTS, vocabulary)
    before = embed(encoder, documents) @ embed(encoder, query).T

    tw.fuse(encoder, [query, documents], quick=True)  # the one line; both shapes are planned for

    after = embed(encoder, documents) @ embed(encoder, query).T
    closest = int(after.argmax())
    print(f"{QUERY!r} is closest to {DOCUMENTS[closest]!r}")
    print(f"similarities moved by at most {float((after - before).abs().max()):.1e}")
    for name, sentences in (("the query alone", query), ("eight documents", documents)):
        sides = [Side(encoder, sentences, welded=welded) for welded in (False, True)]
        print(f"{name}: {tw.compare(*sides, names=('original', 'welded'), budget_s=seconds)}")


if __name__ == "__main__":
    main()
