"""Three Linears: how many kernels? Guess first, then look.

python examples/03_geglu_mlp.py
"""

import look
import small_model
import torch

import torchweld as tw


def main() -> None:
    chosen = look.options(__doc__)
    model, x = small_model.mlp(chosen.device)

    look.heading("The guess")
    try:
        with torch.no_grad(), tw.expect(model=model, linear=3, ops=3):
            model(x)
    except tw.ExpectationError as wrong:
        print(wrong)

    look.heading("The ops")
    with torch.no_grad(), tw.expect(model=model, linear=3, pointwise=2, ops=5) as ran:
        model(x)
    look.ops(ran)

    profile = tw.profile(model, x)
    look.at(profile, chosen)
    look.findings(tw.diagnose(profile))


if __name__ == "__main__":
    main()
