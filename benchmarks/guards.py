"""What it costs a welded module to know that it is still valid, at every call.

For some blocks at one row: how many facts are compared, how long that takes, and what a second
comparison does to the speed of a call, paired, with an interval: the first costs as much.

    python benchmarks/guards.py
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from torch import nn

import torchweld as tw
from torchweld.models.llama import LlamaConfig, LlamaMlp
from torchweld.models.model_layers import Mlp
from torchweld.welds.weld_marks import KEY

CALLS = 50_000


def blocks() -> dict[str, tuple[nn.Module, int]]:
    """Modules, with the width of their input."""
    layers = (nn.Linear(24, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 6))
    return {
        "Linear, 24 → 64": (nn.Linear(24, 64), 24),
        "RL policy": (nn.Sequential(*layers), 24),
        "GPT's MLP, 64": (Mlp(64, 256), 64),
        "Llama's MLP, 64": (LlamaMlp(LlamaConfig(width=64, hidden=128)), 64),
    }


def welded(module: nn.Module, x: torch.Tensor) -> Any:
    """What a module that was welded by force keeps, after some calls."""
    tw.apply(module.eval(), tw.plan(module, x, force=True, remember=False))
    for _ in range(3):
        module(x)
    return module.__dict__[KEY]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=4.0, help="for each comparison")
    given = parser.parse_args()
    torch.set_num_threads(1)
    print("block, one row      facts     ns   a call with a second comparison, against one")
    with torch.inference_mode():
        for name, (module, width) in blocks().items():
            x = torch.randn(1, width)
            joint = welded(module, x)
            facts, watch = joint.guard.facts, joint.watch
            begun_s = time.perf_counter()
            for _ in range(CALLS):
                watch.holds(module, False, False)
            ns = (time.perf_counter() - begun_s) / CALLS * 1e9

            def once(module: nn.Module = module, x: torch.Tensor = x) -> None:
                module(x)

            def twice(module: nn.Module = module, x: torch.Tensor = x, watch: Any = watch) -> None:
                watch.holds(module, False, False)
                module(x)

            found = tw.compare(once, twice, names=("once", "twice"), budget_s=given.seconds)
            count = len(facts.entries) + len(facts.items) + len(facts.classes) + len(facts.parts)
            print(f"{name:18}{count:7}{ns:7.0f}   {found}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
