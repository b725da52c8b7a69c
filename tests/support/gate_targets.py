"""Targets of the gate's tests: one model, as it should be and broken in several ways."""

from __future__ import annotations

from pathlib import Path

# A block that takes most of the step, and something around it.
MODEL = """
import torch
from torch import nn


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(64, 512)
        self.act = nn.GELU()
        self.down = nn.Linear(512, 64)
        {more}

    def forward(self, x):
        return {body}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Mlp(), Mlp()])
        self.norm = nn.LayerNorm(64)

    def forward(self, x):
        for layer in self.layers:
            x = x + {call}
        return self.norm(x)


{slow}
def make():
    slow_down()
    return Net(), torch.randn(128, 64)
"""
PARTS = {
    "more": "",
    "body": "self.down(self.act(self.up(x)))",
    "call": "layer(x)",
    "slow": "def slow_down(): pass",
}
# What a kernel costs is learned from its first calls; from then on every call takes a tenth longer.
SLOW = """
import statistics
import time

from torchweld.welds.swapping import joint, welded_class


def slow_down():
    real, seen = welded_class.compiled_forward, []

    def slower(stand, x):
        begun = time.perf_counter()
        y = real(stand, x)
        end = time.perf_counter()
        if len(seen) < 40:
            seen.append(end - begun)
            if len(seen) == 40:
                seen.append(0.1 * statistics.median(seen))
            return y
        end += seen[-1]
        while time.perf_counter() < end:
            pass
        return y

    welded_class.compiled_forward = joint.compiled_forward = slower
"""
NORM_BETWEEN = {
    "more": "self.between = nn.LayerNorm(512)",
    "body": "self.down(self.between(self.act(self.up(x))))",
}
EXTRA_COPY = {"call": "layer(x).clone()"}
SLOWER_KERNEL = {"slow": SLOW}


def write_model(folder: Path, **changed: str) -> Path:
    """A folder with model.py, whose `make` gives the model and its input."""
    folder.mkdir(parents=True, exist_ok=True)
    text = MODEL
    for name, part in {**PARTS, **changed}.items():
        text = text.replace("{" + name + "}", part)
    (folder / "model.py").write_text(text)
    return folder
