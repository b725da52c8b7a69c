"""Comparisons that were never timed, and benches made of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchweld.bench import Bench, Case, Cell, Cost, MlpShape, OutputCheck, Result
from torchweld.core.not_measured import NotMeasured
from torchweld.machine.measured_peaks import FmaPeak, Peaks, ReadPeak
from torchweld.timing import Comparison, Verdict

PLAIN = MlpShape(sizes=(8, 16, 4))
GATED = MlpShape(sizes=(8, 16, 4), activation="silu", gated=True, bias=False)
PEAKS = Peaks(
    fingerprint="made up",
    method="none",
    fma=tuple(FmaPeak(dtype=dtype, threads=2, gflops=100.0) for dtype in ("float32", "bfloat16")),
    read=(ReadPeak(working_set_bytes=1 << 30, threads=2, gbps=10.0),),
)


def comparison(
    speedup: float = 2.0, verdict: Verdict = "faster", candidate: str = "cpu", us: float = 123.456
) -> Comparison:
    unknown = NotMeasured("because we say so") if verdict == "not measured" else None
    return Comparison(
        baseline="eager",
        candidate=candidate,
        verdict=verdict,
        reason="because we say so",
        speedup=speedup if unknown is None else unknown,
        interval=(speedup * 0.9, speedup * 1.1) if unknown is None else unknown,
        confidence=0.99,
        rounds=20,
        discarded=0,
        baseline_us=us,
        candidate_us=us / speedup,
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
    """Stands for `compare`: runs each side once, keeps its options, answers with `speedup`.

    `verdicts` has those of sides by name that are not `verdict`.
    """

    def __init__(self, speedup: float = 2.0, verdict: Verdict = "faster") -> None:
        self.calls: list[dict[str, Any]] = []
        self.speedup, self.verdict = speedup, verdict
        self.verdicts: dict[str, Verdict] = {}

    def __call__(self, *sides: Any, **options: Any) -> Comparison | list[Comparison]:
        self.calls.append(options)
        for side in sides:
            side.time(1)
        found = [
            comparison(self.speedup, self.verdicts.get(name, self.verdict), name)
            for name in options["names"][1:]
        ]
        return found if len(found) > 1 else found[0]


def case(mlp: MlpShape = PLAIN, rows: int = 3, dtype: str = "float32", label: str = "") -> Case:
    return Case(mlp=mlp, lead=(rows,), dtype=dtype, label=label)


def cell(what: Case, compared: Mapping[str, Comparison | None], us: float = 123.456) -> Cell:
    """A cell of eager and the sides that are named; None: refused."""
    check = OutputCheck(ok=True, error_ratio=1.5, row_ratio=0.5, rms_ratio=0.25, reason=None)
    results = [Result(name="eager", us=us, cost=Cost(ops=5, buffers=3, host_us=9.0, cpu_us=200.0))]
    for name, one in compared.items():
        if one is None:
            results.append(Result(name=name).left_out("it cannot"))
            continue
        results.append(
            Result(
                name=name,
                us=one.candidate_us,
                kernel="packed columns",
                check=check,
                comparison=one,
                cost=Cost(ops=1, buffers=1, host_us=3.0, cpu_us=100.0),
                copied_bytes=100,
            )
        )
    return Cell(
        name=str(what),
        case=what,
        dtype=what.dtype,
        flops=what.flops,
        moved_bytes=what.moved_bytes,
        weight_bytes=what.weight_bytes,
        results=tuple(results),
    )


def check_of(measured: Cell, name: str) -> OutputCheck:
    found = measured.result(name).check
    assert found is not None
    return found


def comparison_of(measured: Cell, name: str) -> Comparison:
    found = measured.result(name).comparison
    assert found is not None
    return found


def bench(cells: list[Cell], **changes: Any) -> Bench:
    """A bench of cells in which everybody else stands after eager, ours first."""
    given: dict[str, Any] = {
        "torch": "2.13",
        "cpu": "a CPU",
        "isa": "avx2",
        "threads": 2,
        "backends": ("cpu",),
        "against": (),
        "cold": False,
        "seconds": 1.5,
        "seed": 0,
        "peaks": PEAKS,
        "cells": tuple(cells),
    }
    return Bench(**{**given, **changes})
