"""The same MLP under torch.compile: what is fused, and what is not?

    python examples/04_compiled.py

The first call compiles, which takes some seconds and needs a C++ compiler.
"""

import look
import small_model
import torch

import torchweld as tw


def main() -> None:
    chosen = look.options(__doc__)
    model, x = small_model.mlp(chosen.device)
    compiled = torch.compile(model)

    look.heading("The ops")
    with torch.no_grad(), tw.expect(linear=3, pointwise=0, fused=1) as ran:
        compiled(x)
    look.ops(ran)

    look.at(tw.profile(compiled, x), chosen)

    if chosen.seconds:
        look.heading("The speed")
        with torch.no_grad():
            sides = (lambda: model(x), lambda: compiled(x))
            names = ("eager", "compiled")
            print("~", tw.compare(*sides, names=names, budget_s=chosen.seconds))


if __name__ == "__main__":
    main()
