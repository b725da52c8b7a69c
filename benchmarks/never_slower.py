"""Is a welded model ever slower than it was? Models and shapes are drawn by lot, and timed.

    python benchmarks/never_slower.py                 30 models and shapes, about 15 minutes
    python benchmarks/never_slower.py --samples 6 --seed 3

Each sample is a built-in model of a random size and one or two random input shapes to plan for.
The welded model is then timed in turn with the same model, welding disabled, on the shape that was
planned for and on one that was not. Exits 1 if any is slower beyond noise, 2 if in too many a loss
of 10 % could not be ruled out.
"""

import argparse
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

import torchweld as tw
from torchweld.core.not_measured import NotMeasured
from torchweld.models import MODELS
from torchweld.timing import CallableSide

PLAN_S = 8.0
# A comparison has as long as its rounds need, within limits: sides, control, and warming up.
ROUNDS, VISITS = 22, 9
LEAST_S, MOST_S = 3.0, 30.0
LEAST_SETTLED, TOLERATED = 0.9, 0.9

# What is drawn from: the fields of a model's configuration, and what they may be.
SIZES: dict[str, dict[str, tuple[Any, ...]]] = {
    "gpt": {"layers": (2, 4), "width": (192, 384, 576)},
    "llama": {"layers": (2, 4), "width": (256, 512)},
    "bert": {"layers": (2, 4), "width": (192, 384)},
    "vit": {"layers": (2, 4), "width": (192, 384)},
    "mixer": {"layers": (2, 4)},
    "dlrm": {},
    "policy": {},
}
TOKENS = (1, 2, 5, 16, 33, 64, 128)
BATCHES = (1, 2, 3, 8, 17, 64)
MOST_ROWS = 256  # or a sample takes minutes
FEW_BATCHES = (1, 2, 3, 4)  # of images
DTYPES = (torch.float32, torch.float32, torch.bfloat16)


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A model's configuration, the ones whose shapes are planned for, and one that is not."""

    name: str
    planned: tuple[Any, ...]
    outside: Any
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.name} {str(self.dtype).removeprefix('torch.')} {shape_of(self.planned[0])}"


def shape_of(config: Any) -> str:
    tokens = getattr(config, "tokens", None)
    return f"{config.batch}" if tokens is None else f"{config.batch} × {tokens}"


def samples(count: int, seed: int) -> Iterator[Sample]:
    lot = random.Random(seed)
    for i in range(count):
        name = list(SIZES)[i % len(SIZES)]
        config = MODELS[name].config
        sizes = {field: lot.choice(values) for field, values in SIZES[name].items()}
        config = replace(config, **sizes)
        batches = FEW_BATCHES if hasattr(config, "patch") else BATCHES
        shapes: list[Any] = []
        while len(shapes) < 3:
            changes: dict[str, Any] = {"batch": lot.choice(batches)}
            if hasattr(config, "tokens"):
                changes["tokens"] = lot.choice(TOKENS)
                if changes["batch"] * changes["tokens"] > MOST_ROWS:
                    continue
            drawn = replace(config, **changes)
            if drawn not in shapes:
                shapes.append(drawn)
        planned = tuple(shapes[: lot.choice((1, 2))])
        yield Sample(name=name, planned=planned, outside=shapes[2], dtype=lot.choice(DTYPES))


def inputs_of(sample: Sample, config: Any) -> tw.Inputs:
    """The example inputs for a shape, floating ones in the model's dtype."""
    builtin = MODELS[sample.name]
    made = builtin.example(config, torch.Generator().manual_seed(0))

    def cast(value: Any) -> Any:
        floating = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(sample.dtype) if floating else value

    return tw.Inputs(*map(cast, made.args), **{k: cast(v) for k, v in made.kwargs.items()})


class Disabled(CallableSide):
    """The model as it was: welding is disabled around the calls, not within what is timed."""

    def __init__(self, call: Callable[[], Any], model: torch.nn.Module) -> None:
        super().__init__(call)
        self.model = model

    def time(self, calls: int) -> float:
        with tw.disabled(self.model):
            return super().time(calls)


def verdicts(sample: Sample, seed: int) -> Iterator[tuple[str, tw.Comparison]]:
    """What the welded model is in comparison, at each shape planned for, and at the other."""
    model, _ = MODELS[sample.name].build(config=sample.planned[0])
    model = model.to(sample.dtype)
    inputs = [inputs_of(sample, config) for config in sample.planned]
    plan = tw.plan(model, inputs, budget_s=PLAN_S, remember=False)
    tw.apply(model, plan)
    shapes = [*((c, "planned") for c in sample.planned), (sample.outside, "outside the plan")]
    for config, word in shapes:
        given = inputs_of(sample, config)

        def welded(given: tw.Inputs = given) -> Any:
            with torch.no_grad():
                return model(*given.args, **given.kwargs)

        sides = (Disabled(welded, model), CallableSide(welded))
        step_s = min(sides[0].time(1) for _ in range(2))
        budget_s = min(max(ROUNDS * VISITS * step_s, LEAST_S), MOST_S)
        found = tw.compare(*sides, names=("original", "welded"), budget_s=budget_s, seed=seed)
        assert isinstance(found, tw.Comparison)
        yield f"{shape_of(config)}, {word}", found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--samples", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    counts = dict.fromkeys(("faster", "same", "slower", "not measured"), 0)
    settled = 0
    begun_s = time.perf_counter()
    for i, sample in enumerate(samples(args.samples, args.seed)):
        for where, found in verdicts(sample, args.seed):
            counts[found.verdict] += 1
            if not isinstance(found.interval, NotMeasured):
                settled += found.interval[0] > TOLERATED
            said = found.speed.reason if isinstance(found.speed, NotMeasured) else found.speed
            print(f"{sample.name:7} {str(sample.dtype)[6:]:9} {where:26} {found.verdict}: {said}")
        left_s = (time.perf_counter() - begun_s) / (i + 1) * (args.samples - i - 1)
        print(f"  {i + 1} of {args.samples}, about {left_s / 60:.0f} min left", flush=True)
    total = sum(counts.values())
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    print(f"a loss of {1 - TOLERATED:.0%} is ruled out in {settled} of {total}")
    if counts["slower"]:
        return 1
    return 0 if settled >= LEAST_SETTLED * total else 2


if __name__ == "__main__":
    sys.exit(main())
