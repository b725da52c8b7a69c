"""A separate Python module with helper functions and a global, for cases that change them."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

BOUNDED = False


def act(h: Tensor) -> Tensor:
    return F.gelu(h)


def finish(y: Tensor) -> Tensor:
    return y.tanh() if BOUNDED else y


_ACT = act


def reset() -> None:
    global BOUNDED
    BOUNDED = False
    globals()["act"] = _ACT
