"""One cell: every side gets ready and is verified; those that pass are timed, with their costs.

What blocks and whole models have in common. An output that breaks the numerical rule is reported,
and its side is not timed. All runs without gradients, unless it is training.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torchweld.bench.bench_cases import Array
from torchweld.bench.bench_results import (
    Bench,
    Cell,
    Cost,
    Latency,
    OutputCheck,
    Result,
    TrainingCost,
)
from torchweld.bench.bench_stages import Stage
from torchweld.bench.stage_timing import (
    MOST_CELL_S,
    MOST_TRAINING_S,
    CallersSide,
    paired,
    single_calls,
)
from torchweld.bench.workers.worker_process import WorkerError
from torchweld.core.errors import TorchweldError
from torchweld.core.not_measured import NotMeasured
from torchweld.timing import Comparison

# A comparison that cannot get enough undisturbed rounds gives up early; the second has twice the
# time.
ATTEMPTS = 2
# The kernel's name if the op left the work to torch.
COMPOSED = "composed"

Outputs = list[Array]
# A side by name, and its outputs.
Judge = Callable[[str, Outputs], OutputCheck]


def measured_cell(
    stage: Stage,
    bench: Bench,
    cell: Cell,
    *,
    reasons: Mapping[str, str],
    prepare: Callable[[str], Outputs],
    judge_of: Callable[[Outputs], Judge],
    latency: bool,
) -> Cell:
    """`cell` with its results.

    reasons:  why sides do not take part; empty for those that do
    prepare:  gets a side ready, and gives its outputs
    judge_of: from eager's outputs, what judges those of the others
    """
    outputs: dict[str, Outputs] = {}
    results = {name: Result(name=name) for name in bench.names}
    for name in bench.names:
        reason = reasons[name]
        try:
            if not reason:
                outputs[name] = prepare(name)
        except WorkerError as error:
            reason = str(error)
        if reason:
            results[name] = results[name].left_out(reason)
    if "eager" in outputs:
        stage.park_all()
        judge = judge_of(outputs.pop("eager"))
        for name, output in outputs.items():
            check = judge(name, output)
            results[name] = replace(results[name], check=check)
            if not check.ok:
                results[name] = results[name].left_out(f"wrong: {check.reason}")
        results = timed(stage, bench, results, latency)
    else:
        why = f"eager did not run: {results['eager'].refused}"
        results = {n: r if r.refused else r.left_out(why) for n, r in results.items()}
    return replace(cell, results=tuple(results.values()))


def with_costs(stage: Stage, result: Result, trained: bool = False) -> Result:
    """`result` with what the side reports: its kernel, copies, ops, host and processor time.

    A training step also reports bytes saved, page faults and the peak of memory.
    """
    try:
        details = stage.ask(result.name, "details")
        cost = cost_of(stage.ask(result.name, "cost"), result.us)
        training = stage.ask(result.name, "training_cost") if trained else None
    except WorkerError as error:
        unknown = NotMeasured(str(error))
        return replace(result, cost=Cost(host_us=unknown, cpu_us=unknown))
    kernel = kernel_text(details)
    if kernel == COMPOSED:  # nothing is counted inside
        cost = replace(cost, ops=None, buffers=None)
    copied = int(details.get("copied_bytes", 0))
    return replace(
        result,
        cost=cost,
        kernel=kernel,
        copied_bytes=copied,
        training=None if training is None else TrainingCost(**training),
    )


def cost_of(found: Mapping[str, Any], us: float | NotMeasured) -> Cost:
    """The costs that a worker found, as parts of a call of `us`, timed at another moment."""
    host_us = found.get("host_us")
    if host_us is not None:
        host_us = _part(host_us, found.get("host_share", math.inf), us)
        if (
            not isinstance(us, NotMeasured)
            and not isinstance(host_us, NotMeasured)
            and host_us > us
        ):
            host_us = NotMeasured(
                f"with nothing to compute a call took {host_us:.3g} µs, and {us:.3g} µs with all "
                "of it: the machine was busier at one moment than at the other"
            )
    return Cost(
        ops=found.get("ops"),
        buffers=found.get("buffers"),
        host_us=host_us,
        cpu_us=_part(found["cpu_us"], found["cores"], us),
        cuda_us=found.get("cuda_us"),
        kernels=found.get("kernels"),
    )


def _part(
    part_us: float | NotMeasured, share: float | NotMeasured, us: float | NotMeasured
) -> float | NotMeasured:
    """The time of a part of a call of `us`, from its time and its share at another moment.

    The time alone and the share of `us` give two values; the smaller one is less disturbed.
    """
    if isinstance(part_us, NotMeasured) or isinstance(us, NotMeasured):
        return part_us
    return share if isinstance(share, NotMeasured) else min(part_us, share * us)


def kernel_text(details: dict[str, Any]) -> str:
    if "weights" in details:
        return f"{details['weights']} {details['partition']}".strip()
    return str(details.get("kernel") or details.get("form") or details.get("backend") or "")


def timed(
    stage: Stage, bench: Bench, results: dict[str, Result], latency: bool
) -> dict[str, Result]:
    """`results` with the times and costs of all sides that were not refused."""
    found = dict(results)
    names = [name for name, result in found.items() if not result.refused]
    if "eager" not in names or len(names) < 2:
        why = "there is no other side to compare it with"
        found |= {name: replace(found[name], us=NotMeasured(why)) for name in names}
    else:
        found |= _times(stage, bench, {name: found[name] for name in names}, latency)
    return found | {name: with_costs(stage, found[name], bench.training) for name in names}


def _times(
    stage: Stage, bench: Bench, results: dict[str, Result], latency: bool
) -> dict[str, Result]:
    """Times several sides, eager first: the comparison, then latency and callers if asked for."""
    found, names = dict(results), list(results)
    try:
        compared = _compared(stage, bench, names)
        for name, comparison in compared.items():
            found[name] = replace(found[name], us=comparison.candidate_us, comparison=comparison)
        longest = max(compared.values(), key=lambda comparison: comparison.rounds)
        found["eager"] = replace(found["eager"], us=longest.baseline_us)
        if latency:
            calls = single_calls(stage, names, seconds=bench.seconds, seed=bench.seed)
            for name, us in calls.items():
                found[name] = replace(found[name], latency=Latency(calls_us=tuple(us)))
        if bench.callers:
            for name, comparison in _together(stage, bench, names).items():
                found[name] = replace(found[name], callers=comparison)
    except TorchweldError as error:  # a side that gave up, or is gone
        for name, result in found.items():
            if isinstance(result.us, NotMeasured) and result.comparison is None:
                found[name] = result.left_out(str(error))
    return found


def _together(stage: Stage, bench: Bench, names: Sequence[str]) -> dict[str, Comparison]:
    """Several callers at once, compared like single ones."""
    try:
        return paired(
            [CallersSide(stage, name, bench.callers) for name in names],
            names,
            seconds=bench.seconds * (len(names) - 1),
            threads=bench.threads,
            seed=bench.seed,
        )
    finally:
        for name in names:
            stage.ask(name, "dismiss")


def _compared(stage: Stage, bench: Bench, names: Sequence[str]) -> dict[str, Comparison]:
    sides = [stage.side(name, bench.cold) for name in names]
    found: dict[str, Comparison] = {}
    for attempt in range(ATTEMPTS):
        found = paired(
            sides,
            names,
            seconds=bench.seconds * (len(names) - 1),
            threads=bench.threads,
            seed=bench.seed,
            patience=attempt + 1,
            most_s=MOST_TRAINING_S if bench.training else MOST_CELL_S,
        )
        if not any(isinstance(comparison.speedup, NotMeasured) for comparison in found.values()):
            break
    return {name: replace(comparison, cold=bench.cold) for name, comparison in found.items()}
