"""Tables of known speeds: the grid that is measured for one, and the table that a bench makes.

`torchweld bench --table` puts the two together; `plans/known_speeds.py` reads what it wrote. Every
block of up to 16 rows is measured twice, with its weights in cache and with emptied caches, and has
to be faster both times: in a model of one small block weights stay in cache, in others they do not,
and above 16 rows the multiply-adds take longer than to read them. K in, N out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product

from torchweld.bench.bench_cases import Case, MlpShape, itemsize
from torchweld.bench.bench_grid import parse_dtype, parse_rows
from torchweld.bench.bench_results import Bench, Result
from torchweld.core.errors import TorchweldError
from torchweld.core.not_measured import NotMeasured
from torchweld.ops.backends import BACKENDS
from torchweld.plans.known_speeds import SpeedCell, SpeedTable, Way

# Our backend that tables are about, and its two ways by name.
TABLED = next(backend.name for backend in BACKENDS if backend.abilities.in_speed_tables)
WAYS: dict[str, Way] = {TABLED: "packed", f"{TABLED}:natural": "natural"}

ROWS = (1, 4, 16, 64, 256, 1024)
MOST_COLD_ROWS = 16
# More multiply-adds than this, times two, would take more than ten seconds for twenty rounds: eager
# in 16 bits is slow on machines without instructions for it.
MOST_FLOPS, MOST_FLOPS_16 = 10e9, 2.5e9
# Widths of [out, in] weights, then of [in, out] ones. A block between two widths is estimated
# from both.
LINEAR_WIDTHS = (64, 256, 1024, 4096)
MLP_WIDTHS = (64, 256, 768, 2048)  # K and N; the hidden layer is four times as wide
TRANSPOSED_IN, TRANSPOSED_OUT, TRANSPOSED_MLP = (256, 1024), (256, 1024, 4096), (256, 768, 2048)
HEADS = ((512, 16384), (1024, 65536))  # of language models
CHAIN_WIDTHS, CHAIN_LAYERS = (16, 128, 1024), (3, 6)

# These decide on eager's instructions and threads, so they are part of the command.
ENVIRONMENT = (
    "TORCHWELD_ISA",
    "ATEN_CPU_CAPABILITY",
    "ONEDNN_MAX_CPU_ISA",
    "MKL_ENABLE_INSTRUCTIONS",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
)
# torch's word for the instructions that its own kernels use, by ours.
CAPABILITIES = {"avx512": "AVX512", "avx2": "AVX2", "baseline": "DEFAULT"}
HOLD_TO_AVX2 = {
    "TORCHWELD_ISA": "avx2",
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
}


# ---- what is measured ----


def table_cases(rows: Sequence[str] = (), dtypes: Sequence[str] = ()) -> list[Case]:
    """The grid, blocks with the same weights in a row; only these rows and dtypes, if any are."""
    leads = [parse_rows(text) for text in rows] or [(count,) for count in ROWS]
    wanted = [parse_dtype(text) for text in dtypes]
    return with_cold(
        Case(mlp=mlp, lead=lead, dtype=dtype)
        for mlp, own in _blocks()
        for dtype in own
        if not wanted or dtype in wanted
        for lead in leads
        if mlp.flops(math.prod(lead)) <= (MOST_FLOPS if itemsize(dtype) > 2 else MOST_FLOPS_16)
    )


def with_cold(cases: Iterator[Case] | Sequence[Case]) -> list[Case]:
    """Each case, and again with emptied caches where weights count."""
    found: list[Case] = []
    for case in cases:
        found.append(case)
        if case.rows <= MOST_COLD_ROWS:
            found.append(replace(case, cold=True))
    return found


def _blocks() -> Iterator[tuple[MlpShape, tuple[str, ...]]]:
    """Blocks, each with its dtypes. Narrow chains, and Conv1D, are of models kept in float32."""
    single, both = ("float32",), ("float32", "bfloat16")
    for K, N in product(LINEAR_WIDTHS, LINEAR_WIDTHS):
        wide_enough = min(K, N) > min(LINEAR_WIDTHS)
        yield MlpShape(sizes=(K, N), activation="identity"), both if wide_enough else single
    for K, N in HEADS:
        yield MlpShape(sizes=(K, N), activation="identity"), both
    for width in MLP_WIDTHS:
        sizes = (width, 4 * width, width)
        yield MlpShape(sizes=sizes, activation="relu"), both
        yield MlpShape(sizes=sizes, activation="gelu"), both
        yield MlpShape(sizes=sizes, activation="silu", gated=True, bias=False), both
    for width, layers, act in product(CHAIN_WIDTHS, CHAIN_LAYERS, ("relu", "gelu")):
        yield MlpShape(sizes=(width,) * (layers + 1), activation=act), single
    for K, N in product(TRANSPOSED_IN, TRANSPOSED_OUT):
        yield MlpShape(sizes=(K, N), activation="identity", transposed=True), single
    for width, act in product(TRANSPOSED_MLP, ("relu", "gelu")):
        sizes = (width, 4 * width, width)
        yield MlpShape(sizes=sizes, activation=act, transposed=True), single


def held_problem(
    isa: str | None, capability: str, flags: Sequence[str], environment: Mapping[str, str]
) -> str:
    """Why eager would not run as it does on machines of this instruction set; "" if it does.

    `capability`: torch's own word for what its kernels use; `flags`: what the CPU has.
    """
    if isa is None:
        return "there are no compiled kernels here to make a table of"
    wanted = CAPABILITIES.get(isa)
    held = wanted is None or capability == wanted
    if isa == "avx2" and "avx512f" in flags:
        # oneDNN and MKL do not tell what they have chosen; on such a CPU they have to be told.
        held = held and all(environment.get(name) == text for name, text in HOLD_TO_AVX2.items())
    if held:
        return ""
    prefix = " ".join(f"{name}={text}" for name, text in HOLD_TO_AVX2.items())
    remedy = f"put {prefix} before the command" if isa == "avx2" else "set both to the same"
    return (
        f"torchweld's kernels are for {isa}, but torch may use other instructions ({capability}), "
        f"so the table would be of no machine; {remedy}"
    )


# ---- what comes of it ----


def table_of(bench: Bench, command: str, date: str) -> SpeedTable:
    """The table of what the bench measured, both ways in each cell."""
    if bench.isa is None:
        raise TorchweldError("there are no compiled kernels here to make a table of")
    return SpeedTable(
        isa=bench.isa,
        cpu=bench.cpu,
        torch=bench.torch,
        threads=bench.threads,
        command=command,
        date=date,
        cells=tuple(
            _cell(cell.case, way, cell.result(name))
            for cell in bench.cells
            if cell.case is not None
            for name, way in WAYS.items()
            if name in bench.backends
        ),
    )


def _cell(case: Case, way: Way, result: Result) -> SpeedCell:
    found = result.comparison
    reason = (result.refused or "it was not timed") if found is None else found.reason
    cell = SpeedCell(
        kind=case.mlp.kind_text,
        sizes=case.mlp.sizes,
        rows=case.rows,
        dtype=case.dtype,
        way=way,
        cold=case.cold,
        verdict="not measured",
        speedup=NotMeasured(reason),
    )
    if found is None or found.verdict == "not measured":
        return cell
    speedup, interval = found.speedup, found.interval
    assert isinstance(speedup, float), found  # it has a verdict
    assert isinstance(interval, tuple), found
    # Rounded outwards, so that nothing gets more certain.
    low, high = math.floor(1e3 * interval[0]) / 1e3, math.ceil(1e3 * interval[1]) / 1e3
    return replace(cell, verdict=found.verdict, speedup=round(speedup, 3), interval=(low, high))
