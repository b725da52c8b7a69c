"""Our own ways: the public module, a backend below it, a welded block, a planned model."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from torchweld import ops
from torchweld.bench.bench_cases import MlpShape
from torchweld.bench.eager_block import BlockSource
from torchweld.bench.model_sources import ModelSource
from torchweld.bench.runtimes.runtime import Call, Runtime, Source, loaded
from torchweld.bench.runtimes.torch_runtimes import (
    CompiledRuntime,
    form_of,
    form_of_shape,
)
from torchweld.bench.speed_tables import TABLED
from torchweld.core.errors import TorchweldError
from torchweld.core.muted_warnings import untold
from torchweld.core.not_measured import NotMeasured
from torchweld.core.records import to_plain
from torchweld.numerics.model_results import step_of
from torchweld.ops.backends import backend_named, reference_backend
from torchweld.ops.backends.backend import CountsKernels, mode_of
from torchweld.ops.fused_mlp import FusedMLP
from torchweld.plans.plan import UNASKED, Plan
from torchweld.plans.planner import apply, plan
from torchweld.plans.speed_ceiling import ceiling
from torchweld.welds.finding.find import find
from torchweld.welds.found_blocks import Block
from torchweld.welds.swapping.module_faces import Face
from torchweld.welds.swapping.swap import stats, weld
from torchweld.welds.weld_decisions import Choice, Decision

MOST_ROWS = 1 << 40
# For calls with one row and with several: they are told apart.
FOUND_ROWS = (1, 4)
# For the ceiling of a model that a plan had no time to measure.
CEILING_S = 30.0


class FusedMlpRuntime(Runtime):
    """`tw.FusedMLP`, called as users call it."""

    trains = True

    def __init__(self, packing: bool = True, recompute: bool | None = None) -> None:
        self.packing, self.recompute = packing, recompute

    def load(self, source: Source) -> None:
        super().load(source)
        assert isinstance(source, BlockSource)
        mlp = source.mlp
        self.modules = [
            FusedMLP.from_linears(
                linears,
                mlp.activation,
                gated=mlp.gated,
                packing=self.packing,
                recompute=self.recompute,
            )
            for linears in source.linears
        ]
        whole = self.modules[0] if source.blocks == 1 else nn.Sequential(*self.modules)
        self.function = whole.train(source.training)

    def details(self) -> dict[str, Any]:
        if ops.compiled is None:
            return {"backend": reference_backend.BACKEND.name, "copied_bytes": 0}
        copied = sum(module.packed_bytes for module in self.modules)
        return {**ops.compiled.last_run(), "copied_bytes": copied}


class BackendRuntime(Runtime):
    """A backend by name and mode, below the public module."""

    def __init__(self, name: str, mode: str | None = None) -> None:
        self.backend = backend_named(name)
        self.mode = mode_of(self.backend, mode)
        self.apart = self.backend.abilities.compiles
        self.countable = not self.apart
        self.devices = self.backend.abilities.devices

    def expected_kernels(self, mlp: MlpShape) -> dict[str, int] | None:
        backend = self.backend
        if not isinstance(backend, CountsKernels):
            return None
        return backend.expected_kernels(form_of_shape(mlp))

    def load(self, source: Source) -> None:
        super().load(source)
        assert isinstance(source, BlockSource)
        self.runner = self.backend.build(form_of(source), source.tensors, self.mode)
        self.function = self.runner

    def details(self) -> dict[str, Any]:
        return {"kernel": self.mode, "copied_bytes": self.runner.copied_bytes}


@functools.lru_cache(maxsize=1)
def _whole_block(source: BlockSource) -> Block:
    """The module of a block as `find` sees it: one block, without anything around it."""
    made = loaded(source).made
    given = [source.workload(made, rows).inputs for rows in FOUND_ROWS]
    found = find(made.model, given)
    whole = [block for block in found.blocks if block.path == ""]
    if not whole:
        raise TorchweldError(f"{source.mlp.name} was not found as one block: {found}")
    return whole[0]


class WeldedBlockRuntime(Runtime):
    """A block's module welded to the backend that tables are about, as it is inside a welded model.

    Tables of known speeds speak of these: beside the kernel, every call passes the guard.
    """

    countable = False

    def __init__(self, packed: bool) -> None:
        self.choice = Choice(backend=TABLED, packed=packed)

    def load(self, source: Source) -> None:
        super().load(source)
        assert isinstance(source, BlockSource)
        self.original.show()
        try:
            decision = Decision(block=_whole_block(source), by_rows=((1, MOST_ROWS, self.choice),))
            weld(self.model, [decision])
            self.face = Face(list(self.model.modules()))
        finally:
            self.original.show()

    def prepare(self, *where: int) -> Call:
        call = super().prepare(*where)
        self.show()
        call()
        (found,) = stats(self.model).values()
        if found.originals:
            reasons = ", ".join(found.originals)
            raise TorchweldError(f"the welded block ran the original code: {reasons}")
        return call

    def details(self) -> dict[str, Any]:
        (found,) = stats(self.model).values()
        ran = {} if ops.compiled is None else ops.compiled.last_run()
        return {**ran, "copied_bytes": found.copied_bytes}


class PlannedRuntime(Runtime):
    """A model after `tw.plan` and `tw.apply`, or with a plan from a file."""

    trains = True

    def load(self, source: Source) -> None:
        super().load(source)
        assert isinstance(source, ModelSource)
        self.original.show()
        if source.plan is not None:
            self.plan = Plan.load(source.plan)
        else:
            self.plan = plan(
                self.model,
                list(self.made.workloads),
                training=source.training,
                budget_s=source.tuning_s,
                remember=source.remember,
            )
        with untold():  # `details` has the blocks that run their original code
            apply(self.model, self.plan)
        self.face = Face(list(self.model.modules()))
        self.original.show()

    def details(self) -> dict[str, Any]:
        whole = self.plan.whole[0] if self.plan.whole else None
        limit = whole.ceiling if whole else UNASKED
        inference = self.step is None
        if whole and inference and isinstance(limit, NotMeasured):  # too long steps for a plan
            self.original.show()
            run = step_of(self.model, self.made.workloads[0], training=False)
            limit = ceiling(self.model, self.plan.decisions, run, CEILING_S).limit
        self.show()
        originals = [path for path, one in stats(self.model).items() if one.originals]
        unused = f", {len(originals)} ran the original" if originals else ""
        return {
            "kernel": f"{len(self.plan.decisions)} welded{unused}",
            "sentence": self.plan.sentence(),
            "ceiling": to_plain(limit),
            "predicted": to_plain(whole.predicted if whole else UNASKED),
            "promised": to_plain(whole.promised if whole else UNASKED),
            "copied_bytes": self.plan.copied_bytes,
            "ran_the_original": originals,
        }

    def judged(self, call: Call) -> Any:
        """The results to judge. In training, raises if every welded block ran the original code."""
        found = super().judged(call)
        # A model that runs only original code would be eager, timed twice.
        ran = stats(self.model)
        if self.step is not None and ran and all(one.originals for one in ran.values()):
            reasons = dict.fromkeys(why for one in ran.values() for why in one.originals)
            raise TorchweldError(f"all welded blocks ran the original code: {', '.join(reasons)}")
        return found


class CompiledWeldedRuntime(CompiledRuntime, PlannedRuntime):
    """`torch.compile(tw.fuse(model, inputs))`: the welded op in a compiled graph."""
