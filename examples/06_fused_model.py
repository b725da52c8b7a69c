"""A whole model, eager and welded: first to serve it, then to train it.

python examples/06_fused_model.py
"""

import copy
from functools import partial

import look
import small_model
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchweld as tw


def step(model: nn.Module, words: Tensor, training: bool) -> None:
    """One call of the model; in training with a loss (say each word twice) and a backward."""
    model.zero_grad()
    with torch.set_grad_enabled(training):
        scores = model(words)
        if training:
            F.cross_entropy(scores.flatten(0, 1), words.flatten()).backward()


def main() -> None:
    chosen = look.options(__doc__)
    model, words = small_model.transformer(chosen.device)
    for training in (False, True):
        doing = "training" if training else "inference"
        eager = copy.deepcopy(model).train(training)
        welded = copy.deepcopy(eager)
        tw.apply(welded, tw.plan(welded, words, training=training, force=True))

        look.heading(f"The counts, {doing}")
        for name, one in (("eager", eager), ("welded", welded)):
            step(one, words, training)  # the first call packs weights
            with tw.expect(backward=True) as ran:
                step(one, words, training)
            print(f"{name:<8}{look.counted(ran.counts)}")

        for name, one in (("eager", eager), ("welded", welded)):
            profile = tw.profile(one, words, training=training)
            if not training:  # once is enough to read
                look.heading(f"The account, {doing}, {name}")
                look.account(profile)
            look.heading(f"The flame graph, {doing}, {name}")
            look.flame(profile, ops=False, depth=3)
        look.page(profile, chosen)  # of the welded model; in the end, of its training

        if chosen.seconds:
            look.heading(f"The speed, {doing}")
            sides = (partial(step, eager, words, training), partial(step, welded, words, training))
            names = ("eager", "welded")
            print("~", tw.compare(*sides, names=names, budget_s=chosen.seconds))


if __name__ == "__main__":
    main()
