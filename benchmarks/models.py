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
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torchweld.bench import measure_model, plan_model
from torchweld.bench.model_bench import LoadedModel
from torchweld.bench.model_sources import SizedSource
from torchweld.core.speeds import Speed

PEERS = ("compile", "compile-welded", "onnxruntime", "openvino")
CEILING_SHARE = 0.9


@dataclass(frozen=True, kw_only=True)
class Spot:
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
    Spot(model="policy", target="policy", dtype="float32", batch=1, tokens=64, goal=4.0),
    Spot(model="gpt2", target="hf:gpt2", dtype="float32", batch=1, tokens=1, goal=1.7),
    Spot(model="gpt2", target="hf:gpt2", dtype="float32", batch=8, tokens=1, goal=2.6),
    Spot(model="bert", target="hf:bert", dtype="float32", batch=1, tokens=16, goal=2.0),
    Spot(model="bert", target="hf:bert", dtype="float32", batch=1, tokens=128, goal=1.15),
    Spot(**LLAMA, dtype="float32", batch=1, tokens=1, goal=1.5),
    Spot(**LLAMA, dtype="float32", batch=8, tokens=1, goal=2.6),
    Spot(**LLAMA, dtype="bfloat16", batch=1, tokens=1, goal=1.4),
    Spot(**LLAMA, dtype="bfloat16", batch=8, tokens=1, goal=4.5),
    Spot(**LLAMA, dtype="bfloat16", batch=1, tokens=64, goal=5.0),
)


@dataclass(kw_only=True)
class Measured:
    """What came of a spot; speeds are over eager's, errors over eager's own."""

    spot: Spot
    speed: dict[str, tuple[float, float, float]] = field(default_factory=dict)
    verdict: dict[str, str] = field(default_factory=dict)
    error: dict[str, float] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)

    @property
    def share(self) -> float:
        """Of its ceiling."""
        ceiling = self.plan.get("ceiling")
        known = isinstance(ceiling, float) and "torchweld" in self.speed
        return self.speed["torchweld"][0] / ceiling if known else 0

    def lines(self) -> list[str]:
        found = [f"{self.spot.name}: goal {self.spot.goal:.2f} of eager"]
        for name, (speed, low, high) in sorted(self.speed.items(), key=lambda kv: -kv[1][0]):
            error = f", error {self.error[name]:.2g}x of eager's" if name in self.error else ""
            found.append(
                f"    {name:<12} {speed:5.2f} ({low:.2f}–{high:.2f}) {self.verdict[name]}{error}"
            )
        if self.plan:
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
            found.append(f"    {told}; {self.plan['copied_bytes'] / 1e6:.0f} MB more")
        found += [f"    {name}: {why}" for name, why in self.refused.items()]
        return found


def measure(spot: Spot, peers: Sequence[str], seconds: float) -> Measured:
    bench = plan_model(spot.target, peers, seconds=seconds)
    measured = Measured(spot=spot, refused=dict(bench.left_out))
    for found in measure_model(bench, spot.source):
        if isinstance(found, LoadedModel):
            measured.plan = found.plan
            continue
        for result in found.results[1:]:
            compared, name = result.comparison, result.name
            if result.check is not None and isinstance(result.check.error_ratio, float):
                measured.error[name] = result.check.error_ratio
            if compared is not None and isinstance(compared.speed, Speed):
                measured.speed[name] = (compared.speed.speedup, *compared.speed.interval)
                measured.verdict[name] = compared.verdict
            else:
                measured.refused[name] = result.refused or f"not measured: {result.why_not}"
    return measured


def figures(results: Sequence[Measured]) -> tuple[list[str], int]:
    """Kept or missed, and the exit code."""
    lines, code = [], 0
    for one in results:
        if "torchweld" not in one.speed:
            lines.append(f"{one.spot.name}: not measured")
            code = code or 2
            continue
        speed, low, high = one.speed["torchweld"]
        kept = speed >= one.spot.goal
        ceiling = "kept" if one.share >= CEILING_SHARE else "MISSED"
        share = f"{one.share:.0%} of the ceiling {ceiling}" if one.share else "ceiling not measured"
        others = [name for name in one.speed if name != "compile-welded"]  # that is us
        best = max(others, key=lambda name: one.speed[name][0])
        beaten = (
            ""
            if best == "torchweld"
            else f"; {best} is {one.speed[best][0] / speed:.2f} times as fast"
        )
        lines.append(
            f"{one.spot.name}: {speed:.2f} ({low:.2f}–{high:.2f}), goal {one.spot.goal:.2f} "
            f"{'kept' if kept else 'MISSED'}; {share}{beaten}"
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
    try:
        for spot in SPOTS:
            if spot.model not in args.models or (args.dtypes and spot.dtype not in args.dtypes):
                continue
            peers = [p for p in args.peers if spot.dtype == "float32" or "welded" in p]
            results.append(measure(spot, peers, args.seconds))
            print("\n".join(results[-1].lines()), flush=True)
            if args.json:
                rows = [{**asdict(r), "share": r.share} for r in results]
                args.json.write_text(json.dumps(rows, default=str, indent=1))
    except KeyboardInterrupt:
        print("stopped; what there is:", flush=True)
    lines, code = figures(results)
    print("\n".join(["", "figures (speed over eager's)", *lines]))
    return code


if __name__ == "__main__":
    sys.exit(main())
