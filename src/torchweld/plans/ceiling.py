"""What no kernel can beat: the model without its welded modules, and the least that those take.

The time of the model with every welded module stubbed out, plus the larger of the time its weights
take to be read, at the rate of this moment, and its FLOPs to be done at the machine's peak. A stub
computes nothing, but has its weights pass through the caches, outside of the clock: whatever the
kernel, they would, and the rest of the model would not find there what it left.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from torchweld.core.errors import TorchweldError
from torchweld.core.interrupts import is_interrupt
from torchweld.core.not_measured import NotMeasured
from torchweld.machine import measured_peaks
from torchweld.plans.block_calls import module_of, tensors_of
from torchweld.plans.flops_share import flops_of_block
from torchweld.timing import CallableSide, compare
from torchweld.timing.sides import Clock
from torchweld.welds.decisions import Decision
from torchweld.welds.found_blocks import Block

_STUB_S = 2.0


@dataclass(frozen=True, kw_only=True)
class Ceiling:
    """limit: the most that the model could gain, as a speed-up; share: of its time, what is spent
    in the welded modules."""

    limit: float | NotMeasured
    share: float | NotMeasured


def ceiling(
    model: nn.Module,
    decisions: Sequence[Decision],
    run: Callable[[], Any],
    budget_s: float = _STUB_S,
) -> Ceiling:
    """What is left of a step without its welded modules, and what no kernel can beat.

    The stubbed model is timed in turn with the model as it was: a moment later the machine may be
    another.
    """
    sides = (CallableSide(run), StubSide(model, [d.block for d in decisions], run))
    try:
        found = compare(*sides, names=("eager", "stubbed"), budget_s=budget_s)
    except Exception as error:  # a model that looks at what its Linears give
        if is_interrupt(error):
            raise
        why = NotMeasured(f"the model does not run without its Linears' values: {error}")
        return Ceiling(limit=why, share=why)
    speed = found.speed
    if isinstance(speed, NotMeasured):
        return Ceiling(limit=speed, share=speed)
    # Stubs cannot be slower than what they stand for; what looks so is noise around nothing.
    share = max(0.0, 1.0 - 1.0 / speed.speedup)
    bound_us = _kernels_us(model, decisions)
    if isinstance(bound_us, NotMeasured):
        return Ceiling(limit=bound_us, share=share)
    return Ceiling(limit=1.0 / (1.0 - share + bound_us / speed.before_us), share=share)


def _kernels_us(model: nn.Module, decisions: Sequence[Decision]) -> float | NotMeasured:
    """The least that the welded blocks take: their weights read, or their FLOPs done."""
    peaks, threads = measured_peaks.peaks(), torch.get_num_threads()
    if peaks is None:
        return NotMeasured("this machine's peaks are not known; torchweld info --measure")
    weights = {id(t): t for d in decisions for t in tensors_of(model, d.block)}
    size = sum(t.nbytes for t in weights.values())
    gbps = measured_peaks.read_gbps_now(size, threads)
    flops_us = 0.0
    for decision in decisions:
        gflops = peaks.fma_gflops(decision.block.dtype, threads)
        if gflops is None:
            return NotMeasured(f"the peak of {decision.block.dtype} is not known")
        flops_us += flops_of_block(model, decision) / (1e3 * gflops)
    if gbps is None:
        return NotMeasured("the rate at which memory is read is not known")
    return max(size / (1e3 * gbps), flops_us)


class StubSide(CallableSide):
    """The model with `blocks` stubbed out, without the time that their weights are read."""

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[Block],
        run: Callable[[], Any],
        clock: Clock = time.perf_counter,
    ) -> None:
        super().__init__(run, clock)
        self._stubs = Stubs(model, blocks, clock)

    def time(self, calls: int) -> float:
        with self._stubs as stubs:
            before_s = stubs.reading_s
            return super().time(calls) - (stubs.reading_s - before_s)


class Stubs:
    """Inside, the blocks' modules read their weights, and give zeros in the right shape.

    reading_s: how long they have read so far
    """

    def __init__(self, model: nn.Module, blocks: Sequence[Block], clock: Clock) -> None:
        self.reading_s = 0.0
        self._clock = clock
        self._stubs = [
            (module_of(model, block), self._stub(block, tensors_of(model, block)))
            for block in blocks
        ]
        self._before: list[tuple[nn.Module, Any]] = []

    def _stub(self, block: Block, weights: Sequence[Tensor]) -> Callable[..., Tensor]:
        memory = [_memory_of(t) for t in weights if t.device.type == "cpu"]

        def forward(*args: Any, **kwargs: Any) -> Tensor:
            x = kwargs.get(block.argument, args[0] if args else None)
            if not isinstance(x, Tensor):
                raise TorchweldError("the argument that was recorded is missing")
            begun_s = self._clock()
            for numbers in memory:
                numbers.sum()
            # What lay in memory instead could be NaN or denormal, and slow what follows.
            y = x.new_zeros((*x.shape[:-1], block.out_features))
            self.reading_s += self._clock() - begun_s
            return y

        return forward

    def __enter__(self) -> Stubs:
        for module, stub in self._stubs:
            self._before.append((module, module.__dict__.get("forward")))
            module.__dict__["forward"] = stub
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        while self._before:
            module, before = self._before.pop()
            if before is None:
                module.__dict__.pop("forward", None)
            else:
                module.__dict__["forward"] = before


def _memory_of(tensor: Tensor) -> Tensor:
    """What lies where the tensor does, as float32 numbers: torch sums those fastest."""
    storage = tensor.detach().untyped_storage()
    begin, size = tensor.storage_offset() * tensor.element_size(), tensor.nbytes
    first = begin // 4
    count = max(0, min(size // 4, storage.nbytes() // 4 - first))
    return torch.empty(0, dtype=torch.float32).set_(storage, first, (count,), (1,))
