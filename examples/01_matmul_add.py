"""A matrix product and an add: how many kernels, and where does the time go?

python examples/01_matmul_add.py
"""

import look
import torch
from torch import Tensor

import torchweld as tw


def matmul_add(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return x @ w + b


def main() -> None:
    chosen = look.options(__doc__)
    x, w, b = (torch.randn(s, device=chosen.device) for s in ((16, 256), (256, 1024), (1024,)))

    look.heading("The ops")
    with tw.expect(linear=1, pointwise=1) as ran:  # guesses; wrong ones would raise
        matmul_add(x, w, b)
    look.ops(ran)

    profile = tw.profile(lambda: matmul_add(x, w, b))
    look.at(profile, chosen)

    look.heading("The machine")
    look.machine(profile)


if __name__ == "__main__":
    main()
