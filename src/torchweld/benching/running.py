"""Running a bench of blocks: cases and names in, one cell a case out.

Every output is held to the numerical rule first; who breaks it is not timed. All runs without
gradients, on the CPU, with the same weights. M rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from torchweld.benching.cases import Case, Mlp
from torchweld.benching.choosing import why_not
from torchweld.benching.processes import BLOCK_RUNTIMES, WorkerError
from torchweld.benching.results import Bench, Cell, Check, Cost, Latency, Result
from torchweld.benching.stages import AnyStage, open_stage
from torchweld.benching.timing import MIN_ROUNDS, MOST_CELL_S, CallersSide, paired, single_calls
from torchweld.benching.truth import JUDGED_ROWS, Truth
from torchweld.errors import TorchweldError
from torchweld.measuring import Comparison

# A comparison that cannot get enough undisturbed rounds gives up early; the second has twice the
# time.
ATTEMPTS = 2
# What a run is called whose op left the work to torch.
COMPOSED = "composed"


def measure(
    bench: Bench, cases: Sequence[Case], latency: bool = False, runtimes: str = BLOCK_RUNTIMES
) -> Iterator[Cell]:
    """The cells of `bench`, each as soon as it is done; `runtimes` is the module that has them."""
    with open_stage(bench.names, bench.threads, runtimes) as stage:
        missing = stage.start(bench.names)
        blocks = Blocks(stage, bench, missing)
        for case in cases:
            yield blocks.cell(case, latency)


class Blocks:
    """The sides of a bench on their stage, what they have loaded kept for as long as it serves."""

    def __init__(self, stage: AnyStage, bench: Bench, missing: dict[str, str]) -> None:
        self._stage, self._bench, self._missing = stage, bench, missing
        self._loaded: dict[str, tuple[Mlp, str]] = {}

    def cell(self, case: Case, latency: bool) -> Cell:
        outputs: dict[str, Tensor] = {}
        results = {name: Result(name=name) for name in self._bench.names}
        for name in self._bench.names:
            reason = self._missing.get(name) or why_not(name, case)
            try:
                if not reason:
                    outputs[name] = self._output(name, case)
            except WorkerError as error:
                reason = str(error)
            if reason:
                results[name] = replace(results[name], refused=reason)
        if "eager" in outputs:
            self._stage.park_all()
            results = self._checked(case, outputs, results)
            right = [name for name, result in results.items() if not result.refused]
            for name in right:
                results[name] = with_costs(self._stage, results[name])
            asked = replace(self._bench, cold=self._bench.cold or case.cold)
            results = timed(self._stage, asked, results, right, latency)
        else:
            why = f"eager did not run: {results['eager'].refused}"
            results = {n: r if r.refused else replace(r, refused=why) for n, r in results.items()}
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
        if self._loaded.get(name) != (case.mlp, case.dtype):
            self._loaded.pop(name, None)
            self._stage.ask(name, "load", case.mlp, case.dtype, self._bench.seed)
            self._loaded[name] = (case.mlp, case.dtype)
        (output,) = self._stage.ask(name, "prepare", *case.lead)
        if output.size != case.rows * case.mlp.sizes[-1]:
            raise WorkerError(f"wrong: an output of shape {list(output.shape)}")
        found = torch.from_numpy(output).to(getattr(torch, case.dtype))
        return found.view(case.rows, case.mlp.sizes[-1])

    def _checked(
        self, case: Case, outputs: dict[str, Tensor], results: dict[str, Result]
    ) -> dict[str, Result]:
        with torch.no_grad():
            truth = Truth.of(
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
            check = Check(
                ok=judged.ok,
                error_ratio=error / eager_error if eager_error else math.nan,
                row_ratio=judged.row_ratio,
                rms_ratio=judged.rms_ratio,
                reason=judged.reason,
            )
            refused = "" if check.ok else f"wrong: {check.reason}"
            found[name] = replace(results[name], check=check, refused=refused)
        return found


# ---- what blocks and whole models share ----


def with_costs(stage: AnyStage, result: Result) -> Result:
    """With what it says of itself: the kernel that ran, copies, ops, host and processor time."""
    try:
        details = stage.ask(result.name, "details")
        cost = Cost(**stage.ask(result.name, "cost"))
    except WorkerError as error:
        return replace(result, refused=str(error))
    kernel = kernel_text(details)
    if kernel == COMPOSED:  # nothing is counted inside
        cost = replace(cost, ops=None, buffers=None)
    copied = int(details.get("copied_bytes", 0))
    return replace(result, cost=cost, kernel=kernel, copied_bytes=copied)


def kernel_text(details: dict[str, Any]) -> str:
    if "weights" in details:
        return f"{details['weights']} {details['partition']}".strip()
    return str(details.get("kernel") or details.get("form") or details.get("backend") or "")


def timed(
    stage: AnyStage, bench: Bench, results: dict[str, Result], names: Sequence[str], latency: bool
) -> dict[str, Result]:
    """With the times of `names`, eager first among them: compared, and as asked for besides."""
    found = dict(results)
    names = [name for name in names if not found[name].refused]
    if "eager" not in names or len(names) < 2:
        return found
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
        for name in names:
            if not math.isfinite(found[name].us):
                found[name] = replace(found[name], refused=str(error))
    return found


def _together(stage: AnyStage, bench: Bench, names: Sequence[str]) -> dict[str, Comparison]:
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


def _compared(stage: AnyStage, bench: Bench, names: Sequence[str]) -> dict[str, Comparison]:
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
        if all(comparison.rounds >= MIN_ROUNDS for comparison in found.values()):
            break
    return {name: replace(comparison, cold=bench.cold) for name, comparison in found.items()}
