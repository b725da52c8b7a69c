"""Comparisons that are made up: a speed-up, with an interval as wide as wanted."""

from __future__ import annotations

import math

from torchweld.timing import Comparison, Verdict


def comparison(
    speedup: float, width: float = 0.01, verdict: Verdict | None = None, eager_us: float = 100.0
) -> Comparison:
    if verdict is None:
        verdict = "faster" if speedup > 1 + width else "slower" if speedup < 1 - width else "same"
    return Comparison(
        baseline="eager",
        candidate="welded",
        verdict=verdict,
        reason="the machine is not steady enough" if verdict == "not measured" else "",
        speedup=speedup,
        interval=(speedup / (1 + width), speedup * (1 + width)),
        confidence=0.99,
        rounds=100,
        discarded=0,
        baseline_us=eager_us,
        candidate_us=eager_us / speedup,
        noise=0.01,
        threshold=0.01,
        cold=False,
        threads=1,
        seed=0,
        elapsed_s=1.0,
        log_ratios=(math.log(speedup),),
        control_log_ratios=(0.0,),
    )
