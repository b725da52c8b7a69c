"""Whole models: torchweld, alone and compiled, against eager, torch.compile and other runtimes.

    python benchmarks/models.py                          everything, about 45 minutes
    python benchmarks/models.py --models gpt2 policy     some
    python benchmarks/models.py --peers --json m.json    eager and torchweld alone

Random weights, the same in every process; each spot is measured as `torchweld bench TARGET` does:
outputs verified against float64 before anything is timed, one paired comparison. Exits 1 if a
figure is missed, 2 if one is not measured.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from torchweld.bench import Bench, Cell, measure_model, plan_model, summarise
from torchweld.bench.model_bench import LoadedModel
from torchweld.bench.model_sources import SizedSource
from torchweld.core.measured_speed import Speed
from torchweld.report.bench_tables import speed_table
from torchweld.report.bench_text import closing
from torchweld.report.text_style import WIDTH

PEERS = ("compile", "compile-welded", "onnxruntime", "openvino")
CEILING_SHARE = 0.9


@dataclass(frozen=True, kw_only=True)
class ModelSpot:
    """A model at a shape, and the speed-up over eager to reach."""

    model: str
    target: str
    dtype: str
    batch: int
    tokens: int
    goal: float

    @property
    def name(self) -> str:
        return f"{self.model} {self.dtype} {self.batch} × {self.tokens}"

    @property
    def source(self) -> SizedSource:
        return SizedSource(
            target=self.target, dtype=self.dtype, batch=self.batch, tokens=self.tokens
        )


LLAMA = {"model": "llama", "target": "hf:llama"}
SPOTS = (
    ModelSpot(model="policy", target="policy", dtype="float32", batch=1, tokens=64, goal=4.0),
    ModelSpot(model="gpt2", target="hf:gpt2", dtype="float32", batch=1, tokens=1, goal=1.7),
    ModelSpot(model="gpt2", target="hf:gpt2", dtype="float32", batch=8, tokens=1, goal=2.6),
    ModelSpot(model="bert", target="hf:bert", dtype="float32", batch=1, tokens=16, goal=2.0),
    ModelSpot(model="bert", target="hf:bert", dtype="float32", batch=1, tokens=128, goal=1.15),
    ModelSpot(**LLAMA, dtype="float32", batch=1, tokens=1, goal=1.5),
    ModelSpot(**LLAMA, dtype="float32", batch=8, tokens=1, goal=2.6),
    ModelSpot(**LLAMA, dtype="bfloat16", batch=1, tokens=1, goal=1.4),
    ModelSpot(**LLAMA, dtype="bfloat16", batch=8, tokens=1, goal=4.5),
    ModelSpot(**LLAMA, dtype="bfloat16", batch=1, tokens=64, goal=5.0),
)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What came of a spot; `plan` is what the welded model says of itself."""

    spot: ModelSpot
    bench: Bench
    plan: dict[str, Any]

    @property
    def speeds(self) -> dict[str, Speed]:
        """Speeds over eager's, for the sides that have a verdict."""
        found = {r.name: r.comparison.speed for r in self.bench.cells[0].results if r.comparison}
        return {name: speed for name, speed in found.items() if isinstance(speed, Speed)}

    @property
    def share(self) -> float:
        """The share of the model's ceiling that was reached."""
        ceiling = self.plan["ceiling"]
        known = isinstance(ceiling, float) and "torchweld" in self.speeds
        return self.speeds["torchweld"].speedup / ceiling if known else 0

    def gains(self) -> str:
        """What was promised and what is possible beside what was measured."""
        gains = {
            f"ceiling, of which {self.share:.0%} was reached": self.plan["ceiling"],
            "promised by the blocks": self.plan["promised"],
            "at most by diagnosis": self.plan["predicted"],
        }
        told = ", ".join(
            f"{gain:.2f} {what}"
            if isinstance(gain, float)
            else f"not measured: {what.partition(',')[0]}"
            for what, gain in gains.items()
        )
        return f"{told}; {self.plan['copied_bytes'] / 1e6:.0f} MB more"


def measure(spot: ModelSpot, peers: Sequence[str], seconds: float) -> Measured:
    bench = plan_model(spot.target, peers, seconds=seconds)
    loaded, cell = measure_model(bench, spot.source)
    assert isinstance(loaded, LoadedModel)
    assert isinstance(cell, Cell)
    return Measured(spot=spot, bench=replace(bench, cells=(cell,)), plan=loaded.plan)


def figures(results: Sequence[Measured]) -> tuple[list[str], int]:
    """What is kept or missed, and the exit code."""
    lines, code = [], 0
    for one in results:
        speeds = one.speeds
        if "torchweld" not in speeds:
            lines.append(f"{one.spot.name}: not measured")
            code = code or 2
            continue
        own = speeds["torchweld"]
        kept = own.speedup >= one.spot.goal
        ceiling = "kept" if one.share >= CEILING_SHARE else "MISSED"
        share = f"{one.share:.0%} of the ceiling {ceiling}" if one.share else "ceiling not measured"
        others = [name for name in speeds if name != "compile-welded"]  # that is us
        best = max(others, key=lambda name: speeds[name].speedup)
        beaten = (
            ""
            if best == "torchweld"
            else f"; {best} is {speeds[best].speedup / own.speedup:.2f} times as fast"
        )
        lines.append(
            f"{one.spot.name}: {own}, goal {one.spot.goal:.2f} {'kept' if kept else 'MISSED'}; "
            f"{share}{beaten}"
        )
        if not kept or 0 < one.share < CEILING_SHARE:
            code = 1
        elif not one.share:
            code = code or 2
    return lines, code


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    names = sorted({spot.model for spot in SPOTS})
    parser.add_argument("--models", nargs="+", choices=names, default=names)
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"))
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS))
    parser.add_argument("--seconds", type=float, default=4.0, help="for each other side of a spot")
    parser.add_argument("--json", type=Path, help="write everything there")
    args = parser.parse_args()
    results: list[Measured] = []
    console = Console(width=WIDTH, highlight=False)
    try:
        for spot in SPOTS:
            if spot.model not in args.models or (args.dtypes and spot.dtype not in args.dtypes):
                continue
            peers = [p for p in args.peers if spot.dtype == "float32" or "welded" in p]
            results.append(measure(spot, peers, args.seconds))
            done = results[-1]
            console.print(f"{spot.name}: goal {spot.goal:.2f} of eager")
            console.print(speed_table(done.bench, console.width)[0], done.gains())
            console.print(*closing(summarise(done.bench)))
            if args.json:
                rows = [
                    {"spot": asdict(r.spot), "plan": r.plan, **r.bench.to_dict()} for r in results
                ]
                args.json.write_text(json.dumps(rows, indent=1))
    except KeyboardInterrupt:
        print("stopped; what there is:", flush=True)
    lines, code = figures(results)
    print("\n".join(["", "figures (speed over eager's)", *lines]))
    return code


if __name__ == "__main__":
    sys.exit(main())
