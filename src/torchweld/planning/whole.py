"""The whole model before and after: verified end to end, timed in turn, against its ceiling.

The ceiling is what no kernel can beat: the time of the model with every welded module stubbed out,
plus the larger of the time its weights take to be read and its FLOPs to be done at the machine's
peaks.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from torchweld import hardware
from torchweld.decisions import Decision
from torchweld.discovery.found import Block
from torchweld.errors import TorchweldError
from torchweld.inputs import Workload
from torchweld.measuring import compare
from torchweld.planning.plan import Planned, Whole
from torchweld.planning.tuning import Instances, Switch, module_of, tensors_of
from torchweld.swap import undo, weld

# Beyond this a copy in float64 would be too large; the output is then compared with eager's alone.
MOST_REFERENCE_BYTES = 1 << 30
# How much larger than eager's the error of the whole output may be: twice, by the numerical rule.
ALLOWED_RATIO = 2.0


def measure_whole(
    model: nn.Module,
    decisions: Sequence[Decision],
    planned: Sequence[Planned],
    workload: Workload,
    *,
    training: bool,
    budget_s: float,
) -> Whole:
    """Welds, verifies, times, and undoes again."""
    run = _runner(model, workload, training)
    expected = outputs(run())
    modules = [module_of(model, decision.block) for decision in decisions]
    switch = Switch(modules)
    switch.note_original()
    weld(model, decisions)
    try:
        switch.note_welded()
        got = outputs(run())
        error_ratio, wrong = judge_outputs(model, workload, expected, got, switch)
        if wrong is not None:
            return _unmeasured(workload, wrong, error_ratio)
        found = compare(
            Instances([run], switch.off),
            Instances([run], switch.on),
            names=("eager", "welded"),
            budget_s=budget_s,
        )
        switch.off()
        ceiling = 0.0 if training else _ceiling(model, decisions, run, found.baseline_us)
    finally:
        switch.on()
        undo(model)
    if found.rounds == 0:
        return _unmeasured(workload, found.reason, error_ratio)
    return Whole(
        workload=workload.name,
        verdict=found.verdict,
        speedup=found.speedup,
        interval=found.interval,
        before_us=found.baseline_us,
        after_us=found.candidate_us,
        saved_us=saved_us(planned),
        ceiling=ceiling,
        error_ratio=error_ratio,
        reason=found.reason if found.verdict == "not measured" else "",
    )


def _unmeasured(workload: Workload, reason: str, error_ratio: float) -> Whole:
    return Whole(
        workload=workload.name,
        verdict="not measured",
        speedup=0.0,
        interval=(0.0, 0.0),
        before_us=0.0,
        after_us=0.0,
        saved_us=0.0,
        ceiling=0.0,
        error_ratio=error_ratio,
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


def _runner(model: nn.Module, workload: Workload, training: bool) -> Callable[[], Any]:
    def infer() -> Any:
        with torch.no_grad():
            return workload.run(model)

    def train() -> Any:
        for parameter in model.parameters():
            parameter.grad = None
        output = workload.run(model)
        terms = [t.sum() for t in outputs(output) if t.requires_grad]
        torch.stack([term.to(torch.float32) for term in terms]).sum().backward()  # type: ignore[no-untyped-call]
        return output

    return train if training else infer


def outputs(value: Any) -> list[Tensor]:
    """The floating tensors of whatever a model returns."""
    return [
        leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.is_floating_point()
    ]


# ---- numbers ----


def judge_outputs(
    model: nn.Module,
    workload: Workload,
    expected: Sequence[Tensor],
    got: Sequence[Tensor],
    switch: Switch,
) -> tuple[float, str | None]:
    """Error of the output over eager's own, and what is wrong with it, if anything."""
    if [t.shape for t in expected] != [t.shape for t in got]:
        return 0.0, "the outputs have other shapes than eager's"
    if not got:
        return 0.0, None
    switch.off()
    try:
        exact = _reference(model, workload)
    finally:
        switch.on()
    worst = 0.0
    for i, (ours, eager) in enumerate(zip(got, expected, strict=True)):
        if not torch.equal(torch.isfinite(ours), torch.isfinite(eager)):
            return math.inf, f"output {i} has NaN or Inf where eager has none"
        truth = eager.double() if exact is None else exact[i]
        scale = float(truth.abs().nan_to_num().max()) if truth.numel() else 0.0
        slack = 4 * torch.finfo(ours.dtype).eps * scale * math.sqrt(max(model_depth(model), 1))
        allowed = ALLOWED_RATIO * _error(eager, truth) + slack
        error = _error(ours, truth)
        worst = max(worst, error / allowed if allowed else 0.0)
        if error > allowed:
            return worst, f"output {i} is {error / allowed:.1f} times further off than allowed"
    return worst, None


def model_depth(model: nn.Module) -> int:
    """Roughly how many roundings follow each other."""
    return sum(p.dim() >= 2 for p in model.parameters())


def _error(value: Tensor, truth: Tensor) -> float:
    return float((value.double() - truth).abs().nan_to_num().max()) if truth.numel() else 0.0


def _reference(model: nn.Module, workload: Workload) -> list[Tensor] | None:
    """The outputs in float64, or None where the model cannot give them."""
    size = sum(p.numel() for p in model.parameters()) * 8
    if size > MOST_REFERENCE_BYTES or workload.inputs is None:
        return None
    try:
        exact = copy.deepcopy(model).double()
        with torch.no_grad():
            found = outputs(_doubled(workload).call(exact))
    except Exception:  # the user's model, in a type it was not made for
        return None
    return [tensor.double() for tensor in found]


def _doubled(workload: Workload) -> Any:
    from torchweld.inputs import Inputs

    def wide(value: Any) -> Any:
        return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value

    assert workload.inputs is not None
    given = workload.inputs
    return Inputs(*map(wide, given.args), **{k: wide(v) for k, v in given.kwargs.items()})


# ---- the ceiling ----


def _ceiling(
    model: nn.Module, decisions: Sequence[Decision], run: Callable[[], Any], eager_us: float
) -> float:
    """The most that the model could gain, as a speed-up; 0 where it cannot be told."""
    peaks = hardware.peaks()
    threads = torch.get_num_threads()
    gflops = None if peaks is None else peaks.fma_gflops("float32", threads)
    size = sum(t.nbytes for d in decisions for t in tensors_of(model, d.block))
    gbps = None if peaks is None else peaks.read_gbps(size, threads)
    if gflops is None or gbps is None:
        return 0.0
    flops = sum(_flops(model, d.block) for d in decisions)
    try:
        with _stubbed(model, [d.block for d in decisions]):
            run()
            stub_us = min(_clock_us(run) for _ in range(5))
    except Exception:  # a model that looks at what its Linears give
        return 0.0
    least_us = stub_us + max(size / (1e3 * gbps), flops / (1e3 * gflops))
    return eager_us / least_us if least_us else 0.0


def _flops(model: nn.Module, block: Block) -> float:
    weights = sum(t.numel() for t in tensors_of(model, block) if t.dim() == 2)
    return sum(2.0 * weights * call.rows * call.count for call in block.calls)


def _clock_us(run: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    run()
    return 1e6 * (time.perf_counter() - begun)


@contextmanager
def _stubbed(model: nn.Module, blocks: Sequence[Block]) -> Iterator[None]:
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
