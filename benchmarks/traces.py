"""How long a trace takes to read, next to HolisticTraceAnalysis.

Both read the same file in fresh processes, in turn and in random order; the time is that of the
read alone, without starting Python and importing. First it is checked that both see the same thing:
idle, compute and non-compute time of the device within 0.5 %. Prints the ratio of times with its
interval, and the peak memory of both.

    python benchmarks/traces.py tests/traces/a100_training_step.json.gz
    python benchmarks/traces.py trace.json.gz --hta-python /path/to/venv/bin/python --rounds 20

HolisticTraceAnalysis brings pandas and more; install it apart, and say where with --hta-python:

    python -m venv hta && hta/bin/pip install HolisticTraceAnalysis==0.5.0
"""

import argparse
import json
import math
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from torchweld.timing.timing_statistics import median_interval

OURS = """
import json, resource, sys, time
from torchweld.profiles.recording.trace_profile import read_trace
start = time.perf_counter()
device = read_trace(sys.argv[1]).device
seconds = time.perf_counter() - start
figures = [device.idle_us, device.compute_us, device.non_compute_us] if device else []
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps({"seconds": seconds, "figures": figures, "peak_kb": peak}))
"""

THEIRS = """
import json, logging, os, resource, sys, time
logging.disable(logging.CRITICAL)
from hta.trace_analysis import TraceAnalysis
start = time.perf_counter()
found = TraceAnalysis(trace_files={0: sys.argv[1]}, trace_dir=os.path.dirname(sys.argv[1]))
seconds = time.perf_counter() - start
row = found.get_temporal_breakdown(visualize=False).iloc[0]
figures = [float(row[f"{what}_time(us)"]) for what in ("idle", "compute", "non_compute")]
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps({"seconds": seconds, "figures": figures, "peak_kb": peak}))
"""

TOLERANCE = 0.005


def run(python: str, code: str, trace: Path) -> dict[str, Any]:
    done = subprocess.run(
        [python, "-W", "ignore", "-c", code, str(trace)], capture_output=True, text=True
    )
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:]
        raise SystemExit(f"{python} cannot read {trace}: {' '.join(last)}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def has_hta(python: str) -> bool:
    done = subprocess.run([python, "-c", "import hta"], capture_output=True)
    return done.returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--hta-python", default=sys.executable)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    trace = arguments.trace.resolve()
    if not has_hta(arguments.hta_python):
        print(
            f"HolisticTraceAnalysis is not installed for {arguments.hta_python}: install it apart "
            "(python -m venv hta && hta/bin/pip install HolisticTraceAnalysis==0.5.0) and give "
            "--hta-python hta/bin/python"
        )
        return 2
    sides = {"torchweld": (sys.executable, OURS), "hta": (arguments.hta_python, THEIRS)}
    first = {name: run(*side, trace) for name, side in sides.items()}
    for ours, theirs in zip(first["torchweld"]["figures"], first["hta"]["figures"], strict=True):
        if abs(ours - theirs) > TOLERANCE * max(theirs, 1.0):
            print(f"the two disagree: {first['torchweld']['figures']}, {first['hta']['figures']}")
            return 1
    rng = random.Random(0)
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(arguments.rounds):
        for name in rng.sample(list(sides), k=len(sides)):
            seconds[name].append(run(*sides[name], trace)["seconds"])
    ratios = np.log(seconds["hta"]) - np.log(seconds["torchweld"])
    low, high = (math.exp(end) for end in median_interval(ratios, 0.01, seed=0))
    print(f"{trace.name}: both see the same idle, compute and non-compute time")
    for name in sides:
        peak_mb = first[name]["peak_kb"] / 1024
        print(f"  {name:10} {np.median(seconds[name]):6.2f} s   peak {peak_mb:,.0f} MB")
    faster = math.exp(float(np.median(ratios)))
    print(f"  torchweld reads it {faster:.2f} ({low:.2f}-{high:.2f}) times faster")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"seconds": seconds, "first": first}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
