"""The same MLP welded: one op. Are the numbers the same, and is it faster?

python examples/05_welded.py
"""

import copy

import look
import small_model
import torch

import torchweld as tw


def main() -> None:
    chosen = look.options(__doc__)
    eager, x = small_model.mlp(chosen.device)
    model = copy.deepcopy(eager)
    # By force, every block that verifies is welded. Without it, only what is measured to be faster.
    tw.apply(model, tw.plan(model, x, force=True))

    look.heading("The ops")
    with torch.no_grad():
        model(x)  # the first call packs the weights
        with tw.expect(model=model, linear=0, pointwise=0, fused=1) as ran:
            model(x)
    look.ops(ran)

    look.at(tw.profile(model, x), chosen)

    look.heading("The numbers")
    check = tw.verify(eager, model, x)
    print(f"within the numerical rule: {check.ok} ~ {check}")

    if chosen.seconds:
        look.heading("The speed")
        with torch.no_grad():
            sides = (lambda: eager(x), lambda: model(x))
            names = ("eager", "welded")
            print("~", tw.compare(*sides, names=names, budget_s=chosen.seconds))


if __name__ == "__main__":
    main()
