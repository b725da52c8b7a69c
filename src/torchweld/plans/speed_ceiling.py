"""The speed-up that no kernel can beat: how fast would the model be with perfect kernels?

That takes the time of the model with a stub for every welded module, plus the least time for the
blocks: reading their weights at the rate of this moment, or doing their FLOPs at the machine's
peak, whichever is longer. A stub computes nothing. But it reads its weights while the clock stands
still, since any kernel would: the rest of the model then finds the caches as it would beside one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torchweld.core.errors import TorchweldError
from torchweld.core.model_state import forwards_replaced
from torchweld.core.not_measured import NotMeasured
from torchweld.core.passing_exceptions import is_interrupt
from torchweld.machine import measured_peaks
from torchweld.plans.block_calls import module_of, tensors_of
from torchweld.plans.flops_share import flops_of_block
from torchweld.timing import CallableSide, compare
from torchweld.timing.timed_sides import Clock
from torchweld.welds.found_blocks import Block
from torchweld.welds.weld_decisions import Decision

_STUB_S = 2.0


@dataclass(frozen=True, kw_only=True)
class Ceiling:
    """limit: the largest possible speed-up of the model
    share: the part of its time that is spent in welded modules
    """

    limit: float | NotMeasured
    share: float | NotMeasured


def ceiling(
    model: nn.Module,
    decisions: Sequence[Decision],
    run: Callable[[], Any],
    budget_s: float = _STUB_S,
) -> Ceiling:
    """Times the model with stubs in turn with the original: the machine's speed changes."""
    sides = (CallableSide(run), StubSide(model, [d.block for d in decisions], run))
    try:
        found = compare(*sides, names=("eager", "stubbed"), budget_s=budget_s)
    except Exception as error:  # a model that looks at the values of its Linears
        if is_interrupt(error):
            raise
        why = NotMeasured(f"the model does not run without its Linears' values: {error}")
        return Ceiling(limit=why, share=why)
    speed = found.speed
    if isinstance(speed, NotMeasured):
        return Ceiling(limit=speed, share=speed)
    # Stubs cannot be slower than the modules they replace; if they seem so, it is noise.
    share = max(0.0, 1.0 - 1.0 / speed.speedup)
    bound_us = _kernels_us(model, decisions)
    if isinstance(bound_us, NotMeasured):
        return Ceiling(limit=bound_us, share=share)
    return Ceiling(limit=1.0 / (1.0 - share + bound_us / speed.before_us), share=share)


def _kernels_us(model: nn.Module, decisions: Sequence[Decision]) -> float | NotMeasured:
    """The least time that the welded blocks take: for their weights, or for their FLOPs."""
    peaks, threads = measured_peaks.peaks(), torch.get_num_threads()
    if peaks is None:
        return NotMeasured("this machine's peaks are not known; torchweld info --measure")
    weights = {id(t): t for d in decisions for t in tensors_of(model, d.block)}
    elsewhere = sorted({t.device.type for t in weights.values()} - {"cpu"})
    if elsewhere:
        return NotMeasured(f"the weights are on {elsewhere[0]}, and the peaks known are the CPU's")
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
    """The model with stubs for its blocks: they read their weights and return zeros.

    The time that the reading takes is not counted.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[Block],
        run: Callable[[], Any],
        clock: Clock = time.perf_counter,
    ) -> None:
        super().__init__(run, clock)
        self._reading_s = 0.0
        self._stubs = {
            module_of(model, block): self._stub(block, tensors_of(model, block)) for block in blocks
        }

    def time(self, calls: int) -> float:
        before_s = self._reading_s
        with forwards_replaced(self._stubs):
            return super().time(calls) - (self._reading_s - before_s)

    def _stub(self, block: Block, weights: Sequence[Tensor]) -> Callable[..., Tensor]:
        memory = [_memory_of(t) for t in weights if t.device.type == "cpu"]

        def forward(*args: Any, **kwargs: Any) -> Tensor:
            x = kwargs.get(block.argument, args[0] if args else None)
            if not isinstance(x, Tensor):
                raise TorchweldError("the argument that was recorded is missing")
            begun_s = self._clock()
            for numbers in memory:
                numbers.sum()
            # Uninitialised memory could hold NaN or denormal numbers, and slow what follows.
            y = x.new_zeros((*x.shape[:-1], block.out_features))
            self._reading_s += self._clock() - begun_s
            return y

        return forward


def _memory_of(tensor: Tensor) -> Tensor:
    """The memory of the tensor as float32 numbers, which torch sums fastest."""
    storage = tensor.detach().untyped_storage()
    begin, size = tensor.storage_offset() * tensor.element_size(), tensor.nbytes
    first = begin // 4
    count = max(0, min(size // 4, storage.nbytes() // 4 - first))
    return torch.empty(0, dtype=torch.float32).set_(storage, first, (count,), (1,))
