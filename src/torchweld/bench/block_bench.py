"""Running a bench of blocks: cases and names in, one cell per case out. M rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby

import torch

from torchweld.bench.bench_cases import Case
from torchweld.bench.bench_participants import why_not
from torchweld.bench.bench_results import NOT_FINITE, Bench, Cell, OutputCheck, error_ratio, told
from torchweld.bench.bench_stages import Stage, open_stage, open_training_stage
from torchweld.bench.block_truth import JUDGED_ROWS, BlockTruth
from torchweld.bench.cell_bench import Judge, Outputs, measured_cell
from torchweld.bench.eager_block import BlockSource
from torchweld.bench.runtime_server import tensors_from
from torchweld.bench.runtimes.runtime_names import RUNTIMES, TRAINING_RUNTIMES, Runtimes
from torchweld.bench.training_step import TrainingStep
from torchweld.bench.training_truth import TrainingTruth
from torchweld.bench.workers.worker_process import WorkerError


def measure(
    bench: Bench,
    cases: Sequence[Case],
    latency: bool = False,
    runtimes: Runtimes | None = None,
) -> Iterator[Cell]:
    """The cells of `bench`, each as soon as it is done; `runtimes` has its sides by name."""
    table = runtimes or (TRAINING_RUNTIMES if bench.training else RUNTIMES)
    for malloc, group in groupby(cases, key=lambda case: case.training and case.training.malloc):
        with (
            open_stage(bench.names, bench.threads, table)
            if malloc is None
            else open_training_stage(bench.threads, table, malloc)
        ) as stage:
            missing = stage.start(bench.names)
            blocks = BlockBench(stage, bench, missing)
            for case in group:
                yield blocks.cell(case, latency)


class BlockBench:
    """The sides of a bench on their stage. A side keeps its block until another is needed."""

    def __init__(self, stage: Stage, bench: Bench, missing: dict[str, str]) -> None:
        self._stage, self._bench, self._missing = stage, bench, missing
        self._loaded: dict[str, BlockSource] = {}

    def cell(self, case: Case, latency: bool) -> Cell:
        bench = replace(self._bench, cold=self._bench.cold or case.cold)
        source = BlockSource(
            mlp=case.mlp,
            dtype=case.dtype,
            seed=bench.seed,
            blocks=case.blocks,
            training=case.training is not None,
            device=bench.device,
        )
        empty = Cell(
            name=str(case),
            case=case,
            dtype=case.dtype,
            flops=case.flops,
            moved_bytes=case.moved_bytes,
            weight_bytes=case.weight_bytes,
            results=(),
        )
        return measured_cell(
            self._stage,
            bench,
            empty,
            reasons={n: self._missing.get(n) or why_not(bench, n, case) for n in bench.names},
            prepare=lambda name: self._prepare(name, source, case),
            judge_of=lambda eager: judge_of(source, case, eager),
            latency=latency,
        )

    def _prepare(self, name: str, source: BlockSource, case: Case) -> Outputs:
        if self._loaded.get(name) != source:
            self._loaded.pop(name, None)
            self._stage.ask(name, "load", source)
            self._loaded[name] = source
        self._stage.ask(name, "train", case.training)
        outputs: Outputs = self._stage.ask(name, "prepare", *case.lead)
        judged = outputs[:1] if case.training else outputs
        if [output.size for output in judged] != [case.rows * case.mlp.sizes[-1]]:
            raise WorkerError(f"wrong: outputs of shapes {[list(one.shape) for one in outputs]}")
        return outputs


def judge_of(source: BlockSource, case: Case, eager: Outputs) -> Judge:
    """The judge of a cell. It works here, since in eager's process it would move memory about."""
    if case.training is None:
        return block_judge(source, case.rows, eager)
    return training_judge(source, case.training, case.lead, eager)


def training_judge(
    source: BlockSource, step: TrainingStep, lead: Sequence[int], eager_outputs: Outputs
) -> Judge:
    """The output and every gradient, by the numerical rule."""
    truth = TrainingTruth.of(source, step, *lead)
    eager = tensors_from(eager_outputs, truth.dtype)

    def judge(_: str, outputs: Outputs) -> OutputCheck:
        return truth.check(tensors_from(outputs, truth.dtype), eager)

    return judge


def block_judge(source: BlockSource, rows: int, eager_outputs: Outputs) -> Judge:
    """Judges outputs of a block by the numerical rule."""
    dtype, width = source.torch_dtype, source.mlp.sizes[-1]
    with torch.no_grad():
        truth = BlockTruth.of(source.mlp, dtype, rows, source.seed, JUDGED_ROWS)

    def tensor(outputs: Outputs) -> torch.Tensor:
        return torch.from_numpy(outputs[0]).to(dtype).view(rows, width)

    eager = tensor(eager_outputs)
    eager_error = truth.largest_error(eager)

    def judge(_: str, outputs: Outputs) -> OutputCheck:
        output = tensor(outputs)
        judged = truth.judge(output, eager)
        return OutputCheck(
            ok=judged.ok,
            error_ratio=error_ratio(truth.largest_error(output), eager_error),
            row_ratio=told(judged.row_ratio, NOT_FINITE),
            rms_ratio=told(judged.rms_ratio, NOT_FINITE),
            reason=judged.reason,
        )

    return judge
