"""Comparisons that were never timed, for tests of what is made of them."""

from __future__ import annotations

import math
from typing import Any

from torchweld.measuring import Comparison, Verdict


def comparison(
    speedup: float = 2.0, verdict: Verdict = "faster", candidate: str = "cpu"
) -> Comparison:
    measured = verdict != "not measured"
    return Comparison(
        baseline="eager",
        candidate=candidate,
        verdict=verdict,
        reason="because we say so",
        speedup=speedup if measured else math.nan,
        interval=(speedup * 0.9, speedup * 1.1) if measured else (0.0, math.inf),
        confidence=0.99,
        rounds=20,
        discarded=0,
        baseline_us=123.456,
        candidate_us=123.456 / speedup,
        noise=0.01,
        threshold=0.01,
        cold=False,
        threads=2,
        seed=0,
        elapsed_s=0.1,
        log_ratios=(0.5, 0.6),
        control_log_ratios=(0.0, 0.1),
    )


class FakeCompare:
    """In place of `compare`: runs each side once, keeps its options, answers with `speedup`."""

    def __init__(self, speedup: float = 2.0, verdict: Verdict = "faster") -> None:
        self.calls: list[dict[str, Any]] = []
        self.speedup, self.verdict = speedup, verdict

    def __call__(self, *sides: Any, **options: Any) -> Comparison | list[Comparison]:
        self.calls.append(options)
        for side in sides:
            side()
        found = [comparison(self.speedup, self.verdict, name) for name in options["names"][1:]]
        return found if len(found) > 1 else found[0]
