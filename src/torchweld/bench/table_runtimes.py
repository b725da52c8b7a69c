"""The runtimes of tables of known speeds: a module as people write it, and the same one welded.

Beside `runtimes`, whose fused block is the public module: a table speaks of welded models, where
every call also passes the guard, and of the layout that GPT-2's Conv1D has. Eager and welded are
one module: `show` makes it the one or the other, before the clock starts. K in, N out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import chain
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from torchweld import ops
from torchweld.bench.cases import SEED, MlpShape
from torchweld.bench.eager_block import activation_of
from torchweld.bench.speed_tables import TABLED, WAYS
from torchweld.core.errors import TorchweldError
from torchweld.welds.decisions import Choice, Decision
from torchweld.welds.finding.find import find
from torchweld.welds.found_blocks import Block
from torchweld.welds.swapping.faces import Face
from torchweld.welds.swapping.swap import stats, weld

Call = Callable[[], Any]
MOST_ROWS = 1 << 40
# For calls with one row and with several: they are told apart.
FOUND_ROWS = (1, 4)


class Conv1D(nn.Module):
    """A Linear whose weight is [in, out], as transformers has it."""

    def __init__(self, weight_KN: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.nf = weight_KN.shape[1]
        self.weight, self.bias = nn.Parameter(weight_KN), nn.Parameter(bias)

    def forward(self, x: Tensor) -> Tensor:
        size_out = (*x.size()[:-1], self.nf)
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(size_out)


class FunctionalMlp(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class TwoLayers(nn.Module):
    def __init__(self, up: nn.Module, down: nn.Module, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.act = up, down, act

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.act(self.up(x)))
        return y


class Gated(TwoLayers):
    def __init__(self, gate: nn.Module, *others: Any) -> None:
        super().__init__(*others)
        self.gate = gate

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.act(self.gate(x)) * self.up(x))
        return y


def module_of(mlp: MlpShape, dtype: torch.dtype, seed: int = SEED) -> nn.Module:
    """The block as its users write it: nothing in it that a model would not have."""
    layers = _layers(mlp, dtype, seed)
    act = activation_of(mlp)
    if mlp.gated:
        gate, up, down = layers
        return Gated(gate, up, down, act)
    if len(layers) == 1:
        return layers[0]
    if len(layers) == 2:
        return TwoLayers(layers[0], layers[1], act)
    *hidden, last = layers
    return nn.Sequential(*chain.from_iterable((one, FunctionalMlp(act)) for one in hidden), last)


def _layers(mlp: MlpShape, dtype: torch.dtype, seed: int) -> list[nn.Module]:
    found: list[nn.Module] = []
    for own in mlp.linears(seed):
        N, K = own.weight.shape
        weight = torch.from_numpy(own.weight).to(dtype)
        bias = None if own.bias is None else torch.from_numpy(own.bias).to(dtype)
        if mlp.transposed:
            assert bias is not None, mlp
            found.append(Conv1D(weight.t().contiguous(), bias))
            continue
        linear = nn.Linear(K, N, bias=bias is not None, device="meta", dtype=dtype)
        linear.weight = nn.Parameter(weight)
        if bias is not None:
            linear.bias = nn.Parameter(bias)
        found.append(linear)
    return found


@dataclass(frozen=True, kw_only=True)
class Made:
    """A module, what was found in it, and how it looks before it is welded."""

    module: nn.Module
    block: Block
    original: Face


# One at a time: all sides load the same block before any loads the next.
@functools.lru_cache(maxsize=1)
def _made(mlp: MlpShape, dtype: str, seed: int) -> Made:
    module = module_of(mlp, getattr(torch, dtype), seed).eval()
    found = find(module, [_input(mlp, dtype, seed, rows) for rows in FOUND_ROWS])
    whole = [block for block in found.blocks if block.path == ""]
    if not whole:
        raise TorchweldError(f"{mlp.name} was not found as one block: {found}")
    return Made(module=module, block=whole[0], original=Face(list(module.modules())))


def _input(mlp: MlpShape, dtype: str, seed: int, *lead: int) -> Tensor:
    values = torch.from_numpy(mlp.inputs(prod(lead), seed + 1))
    return values.to(getattr(torch, dtype)).view(*lead, mlp.sizes[0])


class EagerModule:
    """The module's own code."""

    countable = False

    def load(self, mlp: MlpShape, dtype: str, seed: int = SEED) -> None:
        self.made = _made(mlp, dtype, seed)
        self.input = partial(_input, mlp, dtype, seed)
        self.face = self.made.original

    def show(self) -> None:
        self.face.show()

    def prepare(self, *lead: int) -> Call:
        module, x = self.made.module, self.input(*lead)
        return lambda: module(x)

    def details(self) -> dict[str, Any]:
        return {}


class WeldedModule(EagerModule):
    """The same module, welded to the backend that tables are about."""

    def __init__(self, packed: bool) -> None:
        self.choice = Choice(backend=TABLED, packed=packed)

    def load(self, mlp: MlpShape, dtype: str, seed: int = SEED) -> None:
        super().load(mlp, dtype, seed)
        module, block = self.made.module, self.made.block
        self.made.original.show()
        try:
            weld(module, [Decision(block=block, by_rows=((1, MOST_ROWS, self.choice),))])
            self.face = Face(list(module.modules()))
        finally:
            self.made.original.show()

    def prepare(self, *lead: int) -> Call:
        call = super().prepare(*lead)
        self.show()
        call()
        (found,) = stats(self.made.module).values()
        if found.originals:
            reasons = ", ".join(found.originals)
            raise TorchweldError(f"the welded block ran the original code: {reasons}")
        return call

    def details(self) -> dict[str, Any]:
        (found,) = stats(self.made.module).values()
        ran = {} if ops.compiled is None else ops.compiled.last_run()
        return {**ran, "copied_bytes": found.copied_bytes}


RUNTIMES: dict[str, Callable[[], EagerModule]] = {
    "eager": EagerModule,
    **{name: partial(WeldedModule, packed=way == "packed") for name, way in WAYS.items()},
}
