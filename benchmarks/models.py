"""Whole models: torchweld, alone and compiled, against eager, torch.compile and other runtimes.

    python benchmarks/models.py                          everything, about 45 minutes
    python benchmarks/models.py --models gpt2 policy     some
    python benchmarks/models.py --peers --json m.json    eager and torchweld alone

Random weights, the same in every process; every runtime in a process of its own, all but one parked
(see docs/benchmarks.md); outputs verified against float64 before anything is timed; one paired
comparison a spot. Exits 1 if a figure is missed, 2 if one is not measured.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from torchweld.bench.model_bench import MOST_ERROR
from torchweld.bench.model_sources import SizedSource
from torchweld.bench.stage_timing import MIN_ROUNDS, paired
from torchweld.bench.stages import ProcessStage
from torchweld.bench.workers.worker_process import WorkerError
from torchweld.core.speeds import Speed
from torchweld.numerics.model_check import ModelTruth, compare_results

PEERS = ("compile", "compile-welded", "onnxruntime", "openvino")
ATTEMPTS = 3
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
class Result:
    spot: Spot
    speed: dict[str, tuple[float, float, float]] = field(default_factory=dict)  # over eager's
    verdict: dict[str, str] = field(default_factory=dict)
    error: dict[str, float] = field(default_factory=dict)  # over eager's own
    refused: dict[str, str] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def share(self) -> float:
        """Of its ceiling."""
        ceiling = self.details.get("ceiling")
        known = isinstance(ceiling, float) and "torchweld" in self.speed
        return self.speed["torchweld"][0] / ceiling if known else 0

    def lines(self) -> list[str]:
        goal = self.spot.goal
        found = [f"{self.spot.name}: goal {goal:.2f} of eager"]
        for name, (speed, low, high) in sorted(self.speed.items(), key=lambda kv: -kv[1][0]):
            error = f", error {self.error[name]:.2g}x of eager's" if name in self.error else ""
            found.append(
                f"    {name:<12} {speed:5.2f} ({low:.2f}–{high:.2f}) {self.verdict[name]}{error}"
            )
        if self.details:
            gains = {
                f"ceiling, of which {self.share:.0%} was reached": self.details["ceiling"],
                "promised by the blocks": self.details["promised"],
                "at most by diagnosis": self.details["predicted"],
            }
            told = ", ".join(
                f"{gain:.2f} {what}"
                if isinstance(gain, float)
                else f"not measured: {what.partition(',')[0]}"
                for what, gain in gains.items()
            )
            found.append(f"    {told}; {self.details['copied_bytes'] / 1e6:.0f} MB more")
        found += [f"    {name}: {why}" for name, why in self.refused.items()]
        return found


def measure(stage: ProcessStage, spot: Spot, peers: Sequence[str], seconds: float) -> Result:
    result = Result(spot=spot)
    outputs: dict[str, torch.Tensor] = {}
    for name in ("eager", "torchweld", *peers):
        try:
            stage.ask(name, "load", spot.source)
            found = stage.ask(name, "prepare")
            outputs[name] = torch.from_numpy(found[0])
        except WorkerError as error:  # noqa: PERF203
            result.refused[name] = str(error)[:300]
    if "eager" not in outputs or "torchweld" not in outputs:
        return result
    exact = stage.ask("eager", "truth")["exact"]
    result.details = stage.ask("torchweld", "details")
    truth = ModelTruth(
        exact=None if exact is None else {"output": torch.from_numpy(exact["output 0"])}
    )
    for name, output in outputs.items():
        if name == "eager" or spot.dtype != "float32":
            continue  # torchweld's own plan has judged 16-bit outputs in their own type
        (one,) = compare_results({"output": output}, {"output": outputs["eager"]}, truth, depth=100)
        ratio = one.error / one.reference_error if one.reference_error else 0.0
        result.error[name] = ratio
        if (not one.ok and name == "torchweld") or ratio > MOST_ERROR:
            result.refused[name] = f"wrong: {one.reason or f'{ratio:.0f} times the error of eager'}"
    timed = [name for name in outputs if name not in result.refused and name != "eager"]
    if "torchweld" not in timed:
        return result
    sides = [stage.side(name) for name in ("eager", *timed)]
    for attempt in range(ATTEMPTS):
        comparisons = paired(
            sides,
            ("eager", *timed),
            seconds=seconds,
            threads=stage.threads,
            seed=0,
            patience=attempt + 1,
        )
        if all(one.rounds >= MIN_ROUNDS for one in comparisons.values()):
            break
    for name, one in comparisons.items():
        result.verdict[name] = one.verdict
        if isinstance(one.speed, Speed):
            result.speed[name] = (one.speed.speedup, *one.speed.interval)
        else:
            result.refused[name] = f"not measured: {one.reason}"
    return result


def figures(results: Sequence[Result]) -> tuple[list[str], int]:
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
    parser.add_argument("--seconds", type=float, default=8.0, help="for each spot at least")
    parser.add_argument("--json", type=Path, help="write everything there")
    args = parser.parse_args()
    results: list[Result] = []
    try:
        for spot in SPOTS:
            if spot.model not in args.models or (args.dtypes and spot.dtype not in args.dtypes):
                continue
            with ProcessStage(torch.get_num_threads()) as stage:
                peers = [p for p in args.peers if spot.dtype == "float32" or "welded" in p]
                missing = stage.start(["eager", "torchweld", *peers])
                for name, why in missing.items():
                    print(f"{name} takes no part: {why}", flush=True)
                peers = [name for name in peers if name not in missing]
                results.append(measure(stage, spot, peers, args.seconds))
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
