"""Small modules of every kind that is welded, and the blocks that describe them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from tests.support.helpers import fixed
from torch import Tensor, nn

from torchweld.welds.found_blocks import Block
from torchweld.welds.swapping.swap import weld
from torchweld.welds.weld_decisions import Choice, Decision

K, H, N = 31, 48, 16
X = fixed(5, K)

PACKED = Choice(backend="cpu", packed=True)
NATURAL = Choice(backend="cpu")


class Mlp(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(K, H), nn.Linear(H, N)
        self.act, self.dropout = nn.GELU(), nn.Dropout(dropout)
        self.gain = 1.0

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.dropout(self.act(self.up(x))))
        return y if self.gain == 1.0 else self.gain * y


class Gated(nn.Module):
    """A gated block without a child for the activation, which is an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(K, H, bias=False), nn.Linear(K, H, bias=False)
        self.down = nn.Linear(H, N, bias=False)
        self.act_fn = F.silu

    def forward(self, hidden: Tensor, residual: Tensor | None = None) -> Tensor:
        y: Tensor = self.down(self.act_fn(self.gate(hidden)) * self.up(hidden))
        return y if residual is None else y + residual


class PackedGate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Linear(K, 2 * H), nn.Linear(H, N)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        y: Tensor = self.down(F.silu(gate) * up)
        return y


class Conv1D(nn.Module):
    """Weights as `[in, out]`."""

    def __init__(self, k: int, n: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(k, n) / k**0.5)
        self.bias = nn.Parameter(torch.randn(n))

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight)
        return rows.view(*x.shape[:-1], -1)


class ConvMlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.proj = Conv1D(K, H), Conv1D(H, N)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.proj(F.gelu(self.fc(x), approximate="tanh"))
        return y


class Quiet(nn.Linear):
    """A subclass that computes what Linear computes."""


class Raw(nn.Module):
    """Tensors of its own, not named as a Linear's, one of them a buffer; times a constant."""

    w1: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("w1", torch.randn(H, K) / K**0.5)
        self.b1 = nn.Parameter(torch.randn(H))
        self.w2 = nn.Parameter(torch.randn(N, H) / H**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * F.linear(torch.tanh(F.linear(x, self.w1, self.b1)), self.w2)


def block(
    kind: str,
    form: str,
    tensors: str,
    covers: str = "",
    *,
    sizes: tuple[int, int] = (K, N),
    argument: str = "x",
    dropout: tuple[float, ...] = (),
    scale: float = 1.0,
) -> Block:
    return Block(
        path="",
        kind=kind,
        form=form,
        tensors=tuple(tensors.split()),
        argument=argument,
        in_features=sizes[0],
        out_features=sizes[1],
        dtype="float32",
        covers=tuple(covers.split()),
        dropout=dropout,
        scale=scale,
    )


LINEAR = block("Linear", "identity/b", "weight bias", argument="input")
MLP = block(
    "Mlp",
    "gelu/b;identity/b",
    "up.weight up.bias down.weight down.bias",
    "up act dropout down",
    dropout=(0.0, 0.0),
)
GATED = block(
    "Gated",
    "silu/separate;identity",
    "gate.weight up.weight down.weight",
    "gate up down",
    argument="hidden",
)


def sequential() -> nn.Sequential:
    """The activation of the first layer is the first of an inner Sequential's."""
    inner = nn.Sequential(nn.Linear(H, N, bias=False), nn.Tanh())
    return nn.Sequential(nn.Linear(K, H), nn.ReLU(), inner)


SEQUENTIAL = block(
    "Sequential",
    "relu/b;tanh",
    "0.weight 0.bias 2.0.weight",
    "0 1 2 2.0 2.1",
    argument="input",
)

CASES: dict[str, tuple[Callable[[], nn.Module], Block]] = {
    "linear": (lambda: nn.Linear(K, N), LINEAR),
    "linear without bias": (
        lambda: nn.Linear(K, N, bias=False),
        block("Linear", "identity", "weight", argument="input"),
    ),
    "subclass": (lambda: Quiet(K, N), replace(LINEAR, kind="Quiet")),
    "mlp": (Mlp, MLP),
    "gated": (Gated, GATED),
    "packed gate": (
        PackedGate,
        block(
            "PackedGate",
            "silu/b/first;identity/b",
            "gate_up.weight gate_up.bias down.weight down.bias",
            "gate_up down",
        ),
    ),
    "conv1d": (
        ConvMlp,
        block(
            "ConvMlp",
            "gelu_tanh/b/t;identity/b/t",
            "fc.weight fc.bias proj.weight proj.bias",
            "fc proj",
        ),
    ),
    "sequential": (sequential, SEQUENTIAL),
    "raw": (Raw, block("Raw", "tanh/b;identity", "w1 b1 w2", scale=0.5)),
}


def decide(
    block: Block,
    choice: Choice | None = PACKED,
    *,
    path: str = "",
    rows: tuple[int, int] = (1, 64),
    training: bool = False,
) -> Decision:
    return Decision(block=replace(block, path=path), by_rows=((*rows, choice),), training=training)


def model_of(
    kind: str, choice: Choice = PACKED, *, training: bool = False
) -> tuple[nn.Sequential, nn.Sequential]:
    """A model with a welded module of that kind at "1", in eval, and the same model unwelded."""
    torch.manual_seed(3)
    make, own = CASES[kind]
    model = nn.Sequential(nn.LayerNorm(K), make(), nn.ReLU()).eval()
    torch.manual_seed(3)
    plain = nn.Sequential(nn.LayerNorm(K), make(), nn.ReLU()).eval()
    weld(model, [decide(own, choice, path="1", training=training)])
    return model, plain
