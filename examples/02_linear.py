"""nn.Linear: where is the add, what does the transpose cost, and what is left for a compiler?

python examples/02_linear.py
"""

import look
import torch
from torch import Tensor, nn

import torchweld as tw


def matmul_add(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return x @ w + b


def main() -> None:
    chosen = look.options(__doc__)
    linear = nn.Linear(256, 1024, device=chosen.device).requires_grad_(False)
    x = torch.randn(16, 256, device=chosen.device)

    look.heading("The ops")
    with tw.expect(linear=1, pointwise=0, copies=0) as ran:
        linear(x)
    look.ops(ran)

    look.heading("The transpose")
    for name, w in (("weight", linear.weight), ("weight.t()", linear.weight.t())):
        here = w.data_ptr() == linear.weight.data_ptr()
        print(f"{name:<12}{list(w.shape)}, strides {w.stride()}, in the weight's memory: {here}")

    look.at(tw.profile(linear, x), chosen, inside=True)

    look.heading("Compiled")
    parts = (x, linear.weight.t(), linear.bias)
    for name, step, inputs in (("Linear", linear, (x,)), ("matmul_add", matmul_add, parts)):
        compiled = torch.compile(step)
        compiled(*inputs)
        with tw.expect(linear=1, pointwise=0, fused=0) as ran:  # one addmm, no kernel of its own
            compiled(*inputs)
        print(f"{name}:")
        look.ops(ran)


if __name__ == "__main__":
    main()
