"""The whole model before and after: verified end to end, timed in turn, against its ceiling.

The ceiling is what no kernel can beat: the time of the model with every welded module stubbed out,
plus the larger of the time its weights take to be read, at the rate of this moment, and its FLOPs
to be done at the machine's peak.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from torchweld import hardware
from torchweld.decisions import Decision
from torchweld.discovery.found import Block
from torchweld.errors import TorchweldError
from torchweld.inputs import Workload
from torchweld.measuring import CallableSide, compare
from torchweld.planning.plan import Planned, Whole
from torchweld.planning.timing import FaceSide, faces
from torchweld.planning.tuning import module_of, tensors_of
from torchweld.verifying import (
    Check,
    backward,
    compare_results,
    depth_of,
    floating,
    results,
    truth_of,
)

_STUB_S = 2.0


def measure_whole(
    model: nn.Module,
    decisions: Sequence[Decision],
    planned: Sequence[Planned],
    workload: Workload,
    *,
    training: bool,
    budget_s: float,
    predict: Callable[[float], float],
    kept: Whole | None = None,
) -> Whole:
    """Welds, verifies, times, and undoes again. The model is unwelded, and in the right mode.

    `predict` gives the gain that diagnosis allows, given what a step takes. With `kept` nothing is
    timed, but the numbers are verified anew.
    """
    expected = results(model, workload, training)
    truth = truth_of(model, workload, training)
    modules = [module_of(model, decision.block) for decision in decisions]
    run = runner(model, workload, training)
    with faces(model, modules, [decisions]) as (original, welded):
        welded.show()
        got = results(model, workload, training)
        compared = compare_results(got, expected, truth, depth_of(model))
        check = Check.of(compared, truth.why_not_exact)
        del expected, truth, got
        common: dict[str, Any] = {
            "workload": workload.name,
            "predicted": 0.0 if kept is None else kept.predicted,
            "error_ratio": min(check.error_ratio, 1e30),
            "against": check.against,
        }
        if compared and not check.ok:
            return _unmeasured(common, f"wrong: {check.reason}")
        if kept is not None:
            return replace(kept, **common, remembered=True)
        found = compare(
            FaceSide(original, [run]),
            FaceSide(welded, [run]),
            names=("eager", "welded"),
            budget_s=budget_s,
        )
    common["predicted"] = predict(found.baseline_us if found.rounds else 0.0)
    if found.rounds == 0:
        return _unmeasured(common, found.reason)
    return Whole(
        **common,
        verdict=found.verdict,
        speedup=found.speedup,
        interval=found.interval,
        before_us=found.baseline_us,
        after_us=found.candidate_us,
        saved_us=saved_us(planned),
        ceiling=0.0 if training else _ceiling(model, decisions, run),
        reason=found.reason if found.verdict == "not measured" else "",
    )


def _unmeasured(common: dict[str, Any], reason: str) -> Whole:
    return Whole(
        **common,
        verdict="wrong" if reason.startswith("wrong") else "not measured",
        speedup=0.0,
        interval=(0.0, 0.0),
        before_us=0.0,
        after_us=0.0,
        saved_us=0.0,
        ceiling=0.0,
        reason=reason,
    )


def saved_us(planned: Sequence[Planned]) -> float:
    """What the blocks' own measurements add up to."""
    total = 0.0
    for one in planned:
        for tuning in one.tunings:
            best = tuning.best
            if best is not None and best.speedup > 0:
                total += tuning.count * best.original_us * (1 - 1 / best.speedup)
    return total


def runner(model: nn.Module, workload: Workload, training: bool) -> Callable[[], Any]:
    """One step: forward, in training with the backward."""

    def infer() -> Any:
        with torch.no_grad():
            return workload.run(model)

    def train() -> Any:
        for parameter in model.parameters():
            parameter.grad = None
        output = workload.run(model)
        backward(floating(output))
        return output

    return train if training else infer


# ---- the ceiling ----


class _StubSide(CallableSide):
    """The model with `blocks` stubbed out, around what is timed."""

    def __init__(self, model: nn.Module, blocks: Sequence[Block], run: Callable[[], Any]) -> None:
        super().__init__(run)
        self._model, self._blocks = model, blocks

    def time(self, calls: int) -> float:
        with stubbed(self._model, self._blocks):
            return super().time(calls)


def _ceiling(model: nn.Module, decisions: Sequence[Decision], run: Callable[[], Any]) -> float:
    """The most that the model could gain, as a speed-up; 0 where it cannot be told.

    The stubbed model is timed in turn with the model as it was: a moment later the machine may be
    another.
    """
    bound_us = _kernels_us(model, decisions)
    if bound_us is None:
        return 0.0
    sides = (CallableSide(run), _StubSide(model, [d.block for d in decisions], run))
    try:
        found = compare(*sides, names=("eager", "stubbed"), budget_s=_STUB_S)
    except Exception:  # a model that looks at what its Linears give
        return 0.0
    if found.rounds == 0 or found.speedup <= 0.0:
        return 0.0
    return 1.0 / (1.0 / found.speedup + bound_us / found.baseline_us)


def _kernels_us(model: nn.Module, decisions: Sequence[Decision]) -> float | None:
    """The least that the welded blocks take: their weights read, or their FLOPs done."""
    peaks, threads = hardware.peaks(), torch.get_num_threads()
    if peaks is None:
        return None
    weights = {id(t): t for d in decisions for t in tensors_of(model, d.block)}
    size = sum(t.nbytes for t in weights.values())
    gbps = hardware.read_gbps_now(size, threads)
    flops_us = 0.0
    for decision in decisions:
        gflops = peaks.fma_gflops(decision.block.dtype, threads)
        if gflops is None:
            return None
        flops_us += _flops(model, decision.block) / (1e3 * gflops)
    return None if gbps is None else max(size / (1e3 * gbps), flops_us)


def _flops(model: nn.Module, block: Block) -> float:
    weights = sum(t.numel() for t in tensors_of(model, block) if t.dim() == 2)
    return sum(2.0 * weights * call.rows * call.count for call in block.calls)


@contextmanager
def stubbed(model: nn.Module, blocks: Sequence[Block]) -> Iterator[None]:
    """Inside, the blocks' modules give an empty tensor of the right shape, and compute nothing."""
    undo_list: list[tuple[nn.Module, Any]] = []

    def stub(block: Block) -> Callable[..., Tensor]:
        def forward(*args: Any, **kwargs: Any) -> Tensor:
            x = kwargs.get(block.argument, args[0] if args else None)
            if not isinstance(x, Tensor):
                raise TorchweldError("the argument that was recorded is missing")
            return x.new_empty((*x.shape[:-1], block.out_features))

        return forward

    try:
        for block in blocks:
            module = module_of(model, block)
            undo_list.append((module, module.__dict__.get("forward")))
            module.__dict__["forward"] = stub(block)
        yield
    finally:
        for module, before in undo_list:
            if before is None:
                module.__dict__.pop("forward", None)
            else:
                module.__dict__["forward"] = before
