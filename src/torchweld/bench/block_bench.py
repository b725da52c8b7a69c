"""Running a bench of blocks: cases and names in, one cell a case out.

Every output is held to the numerical rule first; who breaks it is not timed. All runs without
gradients, on the CPU, with the same weights. M rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from torchweld.bench.bench_results import Bench, Cell, Cost, Latency, OutputCheck, Result, told
from torchweld.bench.block_truth import JUDGED_ROWS, BlockTruth
from torchweld.bench.cases import Case
from torchweld.bench.eager_block import BlockSource
from torchweld.bench.participants import why_not
from torchweld.bench.runtimes.runtime_names import RUNTIMES, Runtimes
from torchweld.bench.stage_timing import MOST_CELL_S, CallersSide, paired, single_calls
from torchweld.bench.stages import Stage, open_stage
from torchweld.bench.workers.worker_process import WorkerError
from torchweld.core.errors import TorchweldError
from torchweld.core.not_measured import NotMeasured
from torchweld.timing import Comparison

# Why there is no ratio of errors.
EXACT, NOT_FINITE = "eager's own error is 0", "the output is not finite"
# A comparison that cannot get enough undisturbed rounds gives up early; the second has twice the
# time.
ATTEMPTS = 2
# What a run is called whose op left the work to torch.
COMPOSED = "composed"


def measure(
    bench: Bench, cases: Sequence[Case], latency: bool = False, runtimes: Runtimes = RUNTIMES
) -> Iterator[Cell]:
    """The cells of `bench`, each as soon as it is done; `runtimes` has its sides by name."""
    with open_stage(bench.names, bench.threads, runtimes) as stage:
        missing = stage.start(bench.names)
        blocks = BlockBench(stage, bench, missing)
        for case in cases:
            yield blocks.cell(case, latency)


class BlockBench:
    """The sides of a bench on their stage, what they have loaded kept for as long as it serves."""

    def __init__(self, stage: Stage, bench: Bench, missing: dict[str, str]) -> None:
        self._stage, self._bench, self._missing = stage, bench, missing
        self._loaded: dict[str, BlockSource] = {}

    def cell(self, case: Case, latency: bool) -> Cell:
        outputs: dict[str, Tensor] = {}
        results = {name: Result(name=name) for name in self._bench.names}
        for name in self._bench.names:
            reason = self._missing.get(name) or why_not(self._bench, name, case)
            try:
                if not reason:
                    outputs[name] = self._output(name, case)
            except WorkerError as error:
                reason = str(error)
            if reason:
                results[name] = results[name].left_out(reason)
        if "eager" in outputs:
            self._stage.park_all()
            results = self._checked(case, outputs, results)
            asked = replace(self._bench, cold=self._bench.cold or case.cold)
            results = timed(self._stage, asked, results, latency)
        else:
            why = f"eager did not run: {results['eager'].refused}"
            results = {n: r if r.refused else r.left_out(why) for n, r in results.items()}
        return Cell(
            name=str(case),
            case=case,
            dtype=case.dtype,
            flops=case.mlp.flops(case.rows),
            moved_bytes=case.moved_bytes,
            weight_bytes=case.mlp.weight_bytes(case.dtype),
            results=tuple(results.values()),
        )

    def _output(self, name: str, case: Case) -> Tensor:
        """What a side gives for a case, which it is then ready to be timed on; [rows, N]."""
        source = BlockSource(mlp=case.mlp, dtype=case.dtype, seed=self._bench.seed)
        if self._loaded.get(name) != source:
            self._loaded.pop(name, None)
            self._stage.ask(name, "load", source)
            self._loaded[name] = source
        (output,) = self._stage.ask(name, "prepare", *case.lead)
        if output.size != case.rows * case.mlp.sizes[-1]:
            raise WorkerError(f"wrong: an output of shape {list(output.shape)}")
        found = torch.from_numpy(output).to(getattr(torch, case.dtype))
        return found.view(case.rows, case.mlp.sizes[-1])

    def _checked(
        self, case: Case, outputs: dict[str, Tensor], results: dict[str, Result]
    ) -> dict[str, Result]:
        with torch.no_grad():
            truth = BlockTruth.of(
                case.mlp, getattr(torch, case.dtype), case.rows, self._bench.seed, JUDGED_ROWS
            )
        eager = outputs["eager"]
        eager_error = truth.largest_error(eager)
        found = dict(results)
        for name, output in outputs.items():
            if name == "eager":
                continue
            judged = truth.judge(output, eager)
            error = truth.largest_error(output)
            check = OutputCheck(
                ok=judged.ok,
                error_ratio=error_ratio(error, eager_error),
                row_ratio=told(judged.row_ratio, NOT_FINITE),
                rms_ratio=told(judged.rms_ratio, NOT_FINITE),
                reason=judged.reason,
            )
            found[name] = replace(results[name], check=check)
            if not check.ok:
                found[name] = found[name].left_out(f"wrong: {check.reason}")
        return found


# ---- what blocks and whole models share ----


def error_ratio(error: float, eager_error: float) -> float | NotMeasured:
    """How many times eager's error it is."""
    if not math.isfinite(error):
        return NotMeasured(NOT_FINITE)
    return told(error / eager_error, NOT_FINITE) if eager_error else NotMeasured(EXACT)


def with_costs(stage: Stage, result: Result) -> Result:
    """With what it says of itself: the kernel that ran, copies, ops, host and processor time."""
    try:
        details = stage.ask(result.name, "details")
        cost = cost_of(stage.ask(result.name, "cost"), result.us)
    except WorkerError as error:
        unknown = NotMeasured(str(error))
        return replace(result, cost=Cost(host_us=unknown, cpu_us=unknown))
    kernel = kernel_text(details)
    if kernel == COMPOSED:  # nothing is counted inside
        cost = replace(cost, ops=None, buffers=None)
    copied = int(details.get("copied_bytes", 0))
    return replace(result, cost=cost, kernel=kernel, copied_bytes=copied)


def cost_of(found: Mapping[str, Any], us: float | NotMeasured) -> Cost:
    """What a worker found, as parts of a call of `us`, which was timed at another moment."""
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
    )


def _part(
    part_us: float | NotMeasured, share: float | NotMeasured, us: float | NotMeasured
) -> float | NotMeasured:
    """Of a call of `us`. A share that was measured at one moment holds at another.

    Of the two times that gives, the smaller is the less disturbed.
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
    """With the times of all that were not refused, and what else a call of them costs."""
    found = dict(results)
    names = [name for name, result in found.items() if not result.refused]
    if "eager" not in names or len(names) < 2:
        why = "there is nobody to compare it with"
        found |= {name: replace(found[name], us=NotMeasured(why)) for name in names}
    else:
        found |= _times(stage, bench, {name: found[name] for name in names}, latency)
    return found | {name: with_costs(stage, found[name]) for name in names}


def _times(
    stage: Stage, bench: Bench, results: dict[str, Result], latency: bool
) -> dict[str, Result]:
    """Of several, eager first: compared, and as asked for besides."""
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
            most_s=MOST_CELL_S,
        )
        if not any(isinstance(comparison.speedup, NotMeasured) for comparison in found.values()):
            break
    return {name: replace(comparison, cold=bench.cold) for name, comparison in found.items()}
