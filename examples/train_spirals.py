"""Trains a classifier twice, eager and welded: the same data, the same start, side by side.

The data is made here: points on three spirals, with noise. The model is a small residual MLP. Both
runs start from the same weights and see the same batches; the table shows their losses, and what a
step takes in time and keeps in memory.

    python examples/train_spirals.py
"""

from __future__ import annotations

import copy
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchweld as tw

CLASSES, WIDTH, BLOCKS, BATCH = 3, 256, 4, 32


def spirals(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Points [count, 2] on spirals, and which spiral each is on."""
    random = torch.Generator().manual_seed(seed)
    label = torch.randint(CLASSES, (count,), generator=random)
    radius = torch.rand(count, generator=random)
    angle = 2 * math.pi * (label / CLASSES + 1.25 * radius)
    points = torch.stack([radius * angle.cos(), radius * angle.sin()], 1)
    return points + 0.02 * torch.randn(count, 2, generator=random), label


class Residual(nn.Module):
    """x + mlp(norm(x)), as in a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.mlp(self.norm(x))
        return y


def classifier() -> nn.Module:
    blocks = [Residual() for _ in range(BLOCKS)]
    return nn.Sequential(nn.Linear(2, WIDTH), *blocks, nn.Linear(WIDTH, CLASSES))


def train(model: nn.Module, steps: int) -> list[float]:
    """The losses of all steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    losses = []
    for i in range(steps):
        points, label = spirals(BATCH, seed=i)
        loss = F.cross_entropy(model(points), label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def accuracy(model: nn.Module) -> float:
    points, label = spirals(2000, seed=-1)
    with torch.no_grad():
        return float((model(points).argmax(1) == label).float().mean())


def saved_bytes(model: nn.Module) -> int:
    """What one forward keeps for its backward, without the parameters."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def note(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        y = model(spirals(BATCH, seed=0)[0])
    del y
    return sum(kept.values())


def main(steps: int = 300, seconds: float = 8.0, force: bool = False) -> None:
    torch.manual_seed(0)
    eager = classifier()
    welded = copy.deepcopy(eager)  # to have both; in a program of yours, weld the model itself
    points, _ = spirals(BATCH, seed=0)
    plan = tw.plan(welded, points, training=True, quick=not force, force=force)
    tw.apply(welded, plan)
    verdict, _, _table = str(plan).partition("\n\n")
    print(f"{verdict}\n")

    curves = [train(model, steps) for model in (eager, welded)]
    print("step   loss, eager  loss, welded")
    every = max(1, steps // 6)
    for i in range(every - 1, steps, every):
        means = [sum(curve[max(0, i - 9) : i + 1]) / min(10, i + 1) for curve in curves]
        print(f"{i + 1:4d} {means[0]:13.4f} {means[1]:13.4f}")
    print(f"\naccuracy on new points: eager {accuracy(eager):.3f}, welded {accuracy(welded):.3f}")
    kept = [saved_bytes(model) for model in (eager, welded)]
    print(f"kept for the backward: {kept[0] / 1e6:.2f} MB, welded {kept[1] / 1e6:.2f} MB")

    if not tw.stats(welded):
        return  # and nothing to compare
    found = tw.compare(
        lambda: train(eager, 1),
        lambda: train(welded, 1),
        names=("eager", "welded"),
        budget_s=seconds,
    )
    print(f"a step: {found}")


if __name__ == "__main__":
    main()
