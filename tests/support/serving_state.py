"""A model with state of every kind, and all that can be seen of it, to be compared."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from torchweld.welds.weld_marks import KEY, PLAN_KEY


class Stateful(nn.Module):
    """Changes buffers, attributes and containers when it runs, and draws random numbers."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.Dropout(0.5))
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 4)
        self.register_buffer("count", torch.zeros(3))
        self.plain = torch.zeros(1)
        self.calls = 0
        self.seen: list[int] = []
        self.kept: dict[str, Any] = {}
        self.norm.eval()
        self.last.register_forward_hook(_hook)

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.plain += 1
        self.calls += 1
        self.seen.append(self.calls)
        x = self.norm(self.block(x))
        self.kept["last"] = x
        y: Tensor = self.last(x + torch.rand_like(x))
        return y


def _hook(module: nn.Module, args: Any, result: Tensor) -> None:
    pass


def snapshot(model: nn.Module, *, welding: bool = True) -> list[Any]:
    """The class, attributes, hooks, mode, tensors and gradients of every module, to be compared."""
    found: list[Any] = []
    for name, module in model.named_modules():
        found.append((name, id(module), type(module)))
        for key, value in sorted(module.__dict__.items()):
            if key in (KEY, PLAN_KEY):
                if welding:
                    found.append((key, id(value)))
            else:
                found.append((key, id(value), _seen(value)))
    found += [(name, id(p), p._version, p.requires_grad, id(p.grad)) for name, p in _tensors(model)]
    return found


def _tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def _seen(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return [(key, id(item), _seen(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple, set)):
        return [id(item) for item in value]
    return repr(value) if isinstance(value, (int, float, str, bool, type(None))) else id(value)
