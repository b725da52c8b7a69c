"""MLPs as models in the wild write them, in small, and what `find` has to say about each.

Every class stands for a row of what is met in practice: names mislead, weights are packed in any
order, activations are spelled out, dropout and multipliers stand anywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

K, H, N = 10, 14, 6  # in, hidden, out; H is even


class Functional(nn.Module):
    """Two Linears with any function between them."""

    def __init__(self, act: Callable[[Tensor], Tensor], bias: bool = True) -> None:
        super().__init__()
        self.a = nn.Linear(K, H, bias=bias)
        self.b = nn.Linear(H, N, bias=bias)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.act(self.a(x)))


class Gated(nn.Module):
    """Llama's: the activation comes with the configuration."""

    def __init__(self, act: Callable[[Tensor], Tensor] = F.silu, bias: bool = False) -> None:
        super().__init__()
        self.up_proj = nn.Linear(K, H, bias=bias)
        self.gate_proj = nn.Linear(K, H, bias=bias)
        self.down_proj = nn.Linear(H, N, bias=bias)
        self.act_fn = act

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Packed(nn.Module):
    """One Linear for gate and up; `parts` says how it is taken apart."""

    def __init__(
        self, parts: Callable[[Tensor], tuple[Tensor, ...]], act: Callable[[Tensor], Tensor]
    ) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(K, 2 * H)
        self.down_proj = nn.Linear(H, N, bias=False)
        self.parts, self.act = parts, act

    def forward(self, hidden_states: Tensor) -> Tensor:
        gate, up = self.parts(self.gate_up_proj(hidden_states))
        return self.down_proj(up * self.act(gate))


class GatedActivation(nn.Module):
    """The Linear sits inside the activation module, and the gate comes second."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(K, 2 * H)

    def forward(self, hidden_states: Tensor) -> Tensor:
        hidden_states, gate = self.proj(hidden_states).chunk(2, dim=-1)
        return hidden_states * F.gelu(gate)


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.ModuleList([GatedActivation(), nn.Dropout(0.0), nn.Linear(H, N)])

    def forward(self, hidden_states: Tensor) -> Tensor:
        for module in self.net:
            hidden_states = module(hidden_states)
        return hidden_states


class MisleadingNames(nn.Module):
    """What is called input is activated, what is called gate is not."""

    def __init__(self) -> None:
        super().__init__()
        self.Wi = nn.Linear(K, 2 * H, bias=False)
        self.drop = nn.Dropout(0.1)
        self.Wo = nn.Linear(H, N, bias=False)

    def forward(self, hidden_states: Tensor) -> Tensor:
        input, gate = self.Wi(hidden_states).chunk(2, dim=-1)  # noqa: A001
        return self.Wo(self.drop(F.gelu(input) * gate))


class Conv1D(nn.Module):
    """A Linear whose weight is [in, out]."""

    def __init__(self, nx: int, nf: int) -> None:
        super().__init__()
        self.nf = nf
        self.weight = nn.Parameter(torch.randn(nx, nf) * 0.2)
        self.bias = nn.Parameter(torch.randn(nf))

    def forward(self, x: Tensor) -> Tensor:
        size_out = (*x.size()[:-1], self.nf)
        x = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        return x.view(size_out)


def new_gelu(x: Tensor) -> Tensor:
    inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))
    return 0.5 * x * (1.0 + torch.tanh(inner))


class TransposedMlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_fc, self.c_proj = Conv1D(K, H), Conv1D(H, N)
        self.dropout = nn.Dropout(0.1)

    def forward(self, hidden_states: Tensor | None) -> Tensor:
        assert hidden_states is not None
        return self.dropout(self.c_proj(new_gelu(self.c_fc(hidden_states))))


class LookAlike(nn.Linear):
    """A subclass that multiplies its own way."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        hidden = input @ self.weight.T
        return hidden if self.bias is None else hidden + self.bias


class LookAlikes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = LookAlike(K, H), LookAlike(H, N, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.gelu(self.a(x)))


class BareParameters(nn.Module):
    """No Linear at all: einsum one way, matmul the other."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(H, K) * 0.3)
        self.w2 = nn.Parameter(torch.randn(H, N) * 0.3)
        self.b2 = nn.Parameter(torch.randn(N))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.einsum("bsd,hd->bsh", x, self.w1)
        return self.b2 + torch.matmul(F.mish(hidden), self.w2)


class QuickGelu(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(K, H), nn.Linear(H, N)

    def forward(self, hidden_states: Tensor) -> Tensor:
        hidden_states = self.fc1(hidden_states)
        return self.fc2(hidden_states * torch.sigmoid(1.702 * hidden_states))


class FunctionalDropout(nn.Module):
    def __init__(self, p: float = 0.2) -> None:
        super().__init__()
        self.c_fc, self.c_proj = nn.Linear(K, H), nn.Linear(H, N)
        self.p = p

    def forward(self, hidden_states: Tensor) -> Tensor:
        hidden_states = F.gelu(self.c_fc(hidden_states), approximate="tanh")
        hidden_states = self.c_proj(hidden_states)
        return F.dropout(hidden_states, p=self.p, training=self.training)


class GatedWithDropout(nn.Module):
    """Dropout before the last product, whose type is looked at on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.wi_0, self.wi_1 = nn.Linear(K, H, bias=False), nn.Linear(K, H, bias=False)
        self.wo = nn.Linear(H, N, bias=False)
        self.dropout = nn.Dropout(0.1)

    def forward(self, hidden_states: Tensor) -> Tensor:
        gelu = new_gelu(self.wi_0(hidden_states))
        hidden_states = self.dropout(gelu * self.wi_1(hidden_states))
        if hidden_states.dtype != self.wo.weight.dtype:
            hidden_states = hidden_states.to(self.wo.weight.dtype)
        return self.wo(hidden_states)


class Multipliers(nn.Module):
    def __init__(self, gate: float, down: float) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(K, H, bias=False)
        self.up_proj = nn.Linear(K, H, bias=False)
        self.down_proj = nn.Linear(H, N, bias=False)
        self.gate_multiplier, self.down_multiplier = gate, down

    def forward(self, x: Tensor) -> Tensor:
        y = self.up_proj(x) * F.silu(self.gate_proj(x) * self.gate_multiplier)
        return self.down_proj(y) * self.down_multiplier


class Loop(nn.Module):
    """Any number of layers, an activation after the last one too."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.relu(layer(x))
        return x


class Reshaping(nn.Module):
    """Folds rows together on the way in and unfolds them on the way out."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(K, H), nn.Linear(H, N)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        y = self.b(torch.tanh(self.a(rows)).unsqueeze(0)).squeeze(0)
        return y.unflatten(0, x.shape[:-1]).contiguous()


class InPlace(nn.Module):
    """Does not look at what the activation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(K, H), nn.Linear(H, N)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h.relu_()
        h *= 1.0
        return self.b(h)


class Weight(nn.Module):
    """A Linear that has nothing but a weight."""

    def __init__(self, k: int, n: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(n, k))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.t()


class TimeFirst(nn.Module):
    """Swaps batch and time on the way in, and back on the way out."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(K, H), nn.Linear(H, N)

    def forward(self, x: Tensor) -> Tensor:
        y = self.b(torch.tanh(self.a(x.transpose(0, 1))))
        return y.transpose(0, 1)


class ExtraArguments(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(K, H), nn.Linear(H, N)

    def forward(
        self, hidden_states: Tensor, mask: Tensor | None = None, scale: float = 1.0
    ) -> Tensor:
        y = self.b(F.relu(self.a(hidden_states)))
        return y if scale == 1.0 else y * scale


class WideActivation(nn.Module):
    """Computes the activation in float32, as some do in half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(K, H), nn.Linear(H, N)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.silu(self.a(x).float()).to(x.dtype))


# ---- what spreads over modules ----


class Intermediate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(K, H)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return F.gelu(self.dense(hidden_states))


class Output(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(H, K)
        self.LayerNorm = nn.LayerNorm(K)
        self.dropout = nn.Dropout(0.1)

    def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        return self.LayerNorm(self.dropout(self.dense(hidden_states)) + input_tensor)


class TwoModules(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.intermediate, self.output = Intermediate(), Output()

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.intermediate(x), x)


class Inline(nn.Module):
    """fc1 and fc2 stand in the layer itself."""

    def __init__(self) -> None:
        super().__init__()
        self.final_layer_norm = nn.LayerNorm(K)
        self.fc1, self.fc2 = nn.Linear(K, H), nn.Linear(H, K)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc2(F.relu(self.fc1(self.final_layer_norm(x))))


class WithResidual(nn.Module):
    """Takes the residual as an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.dense_h_to_4h, self.dense_4h_to_h = nn.Linear(K, H), nn.Linear(H, K)

    def forward(self, hidden_states: Tensor, residual: Tensor) -> Tensor:
        y = self.dense_4h_to_h(F.gelu(self.dense_h_to_4h(hidden_states)))
        return residual + F.dropout(y, 0.1, training=self.training)


class Lora(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base_layer = nn.Linear(K, N)
        self.lora_A, self.lora_B = nn.Linear(K, 3, bias=False), nn.Linear(3, N, bias=False)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora_B(self.lora_A(x)) * 0.5


# ---- what is no chain ----


class Sparse(nn.Module):
    """Keeps the hidden values above a cut-off that depends on the row."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(K, H), nn.Linear(H, N)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        cutoff = h.mean(dim=-1, keepdim=True) + h.std(dim=-1, keepdim=True)
        return self.b(F.gelu(F.relu(h - cutoff)))


class ResponseNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(K, H), nn.Linear(H, N)
        self.gamma = nn.Parameter(torch.ones(H))

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.a(x))
        size = h.norm(p=2, dim=1, keepdim=True)
        return self.b(h + self.gamma * h * size / (size.mean(dim=-1, keepdim=True) + 1e-6))


class NormInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(K, H), nn.LayerNorm(H), nn.Linear(H, N)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.norm(F.gelu(self.a(x))))


class SpatialGate(nn.Module):
    """A gate whose halves are mixed over another dimension."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(K, 2 * H), nn.Linear(H, N)
        self.spatial = nn.Linear(tokens, tokens)

    def forward(self, x: Tensor) -> Tensor:
        u, v = self.fc1(x).chunk(2, dim=-1)
        return self.fc2(u * self.spatial(v.transpose(-1, -2)).transpose(-1, -2))


class ClampedGate(nn.Module):
    """Interleaved, clamped at 7, a sigmoid of 1.702 times the gate, and up + 1."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Linear(K, 2 * H), nn.Linear(H, N)

    def forward(self, x: Tensor) -> Tensor:
        both = self.gate_up(x)
        gate, up = both[..., ::2], both[..., 1::2]
        gate, up = gate.clamp(max=7.0), up.clamp(min=-7.0, max=7.0)
        return self.down((up + 1) * (gate * torch.sigmoid(gate * 1.702)))


class Experts(nn.Module):
    """Weights of three dimensions and a loop over the experts that were hit."""

    def __init__(self, count: int = 3) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(count, 2 * H, K) * 0.2)
        self.down_proj = nn.Parameter(torch.randn(count, K, H) * 0.2)

    def forward(self, hidden_states: Tensor, chosen: Tensor) -> Tensor:
        result = torch.zeros_like(hidden_states)
        for expert in chosen.unique():
            at = torch.where(chosen == expert)[0]
            both = F.linear(hidden_states[at], self.gate_up_proj[expert])
            gate, up = both.chunk(2, dim=-1)
            result[at] = F.linear(F.silu(gate) * up, self.down_proj[expert])
        return result


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(K, H), nn.Linear(H, N)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if h.sum() > 0:
            h = F.relu(h)
        return self.b(h)


class ScaledWeight(nn.Module):
    """A Linear whose weight is made anew at every call."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(N, K))
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * self.gain)
