"""What is measured for a table of known speeds, and what a bench makes of it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.support.bench_samples import FakeCompare, bench, case, cell, comparison

from torchweld.bench import Bench, Case, MlpShape, Result, measure, plan, stage_timing
from torchweld.bench.bench_grid import parse_dtype
from torchweld.bench.bench_summary import maps
from torchweld.bench.eager_block import eager_block, linears_of, tensors_of
from torchweld.bench.runtimes.runtime_names import TABLE_RUNTIMES
from torchweld.bench.speed_tables import (
    HOLD_TO_AVX2,
    MOST_COLD_ROWS,
    WAYS,
    held_problem,
    table_cases,
    table_of,
    with_cold,
)
from torchweld.core.blocks import format_spec
from torchweld.core.errors import TorchweldError
from torchweld.core.not_measured import NotMeasured
from torchweld.machine import kernel_build
from torchweld.ops.backends import reference_backend
from torchweld.plans.known_speeds import KnownSpeed, SpeedCell, SpeedTable, table_text

NEEDS_KERNELS = pytest.mark.skipif(
    kernel_build.build_problem() is not None, reason="needs the compiled kernels"
)
BLOCKS = (
    MlpShape(sizes=(5, 7), activation="identity"),
    MlpShape(sizes=(5, 7, 3)),
    MlpShape(sizes=(5, 7, 5), activation="silu", gated=True, bias=False),
    MlpShape(sizes=(5, 7, 6, 3), activation="relu"),
    MlpShape(sizes=(5, 7), activation="identity", transposed=True),
    MlpShape(sizes=(5, 7, 3), activation="gelu_tanh", transposed=True),
)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCompare:
    fake = FakeCompare(speedup=3.2)
    monkeypatch.setattr(stage_timing, "compare", fake)
    return fake


# ---- the grid ----


def test_some_rows_and_dtypes_of_the_grid_can_be_asked_for() -> None:
    some = table_cases(["4", "64"], ["fp32"])
    assert {case.rows for case in some} == {4, 64}
    assert {case.dtype for case in some} == {"float32"}
    assert set(some) < set(table_cases())


def test_the_grid_has_every_kind_layout_and_dtype_hot_and_cold() -> None:
    cases = table_cases()
    assert len(set(cases)) == len(cases)
    kinds = {one.mlp.kind_text for one in cases}
    assert kinds == {
        *("linear", "relu", "gelu", "silu-gated"),
        *("linear-conv1d", "relu-conv1d", "gelu-conv1d"),
    }
    assert {one.dtype for one in cases} == {"float32", "bfloat16"}
    assert all(parse_dtype(one.dtype) == one.dtype for one in cases)
    assert max(len(one.mlp.sizes) for one in cases) > 4
    cold = {replace(one, cold=False) for one in cases if one.cold}
    assert cold == {one for one in cases if not one.cold and one.rows <= MOST_COLD_ROWS}


def test_blocks_with_the_same_weights_follow_each_other() -> None:
    """Loading them, and finding the block, is done once."""
    seen: list[tuple[MlpShape, str]] = []
    for one in table_cases():
        if not seen or seen[-1] != (one.mlp, one.dtype):
            seen.append((one.mlp, one.dtype))
    assert len(set(seen)) == len(seen)


FAMILIAR = {
    "BERT's gelu": ("gelu/b", (768, 3072), 128),
    "ViT's MLP": ("gelu/b;identity/b", (768, 3072, 768), 197),
    "GPT-2's MLP": ("gelu_tanh/b/t;identity/b/t", (768, 3072, 768), 64),
    "GPT-2's attention": ("identity/b/t", (768, 2304), 8),
    "GPT-2's head": ("identity", (768, 50257), 1),
    "a small Llama's MLP": ("silu/separate;identity", (1024, 2816, 1024), 8),
    "an RL policy": ("tanh/b;tanh/b;identity/b", (17, 64, 64, 6), 1),
}


@pytest.mark.parametrize("name", FAMILIAR)
def test_familiar_blocks_lie_inside_the_grid(name: str) -> None:
    form, sizes, rows = FAMILIAR[name]
    everywhere = [cell(one, {"cpu": comparison(2.0)}) for one in table_cases()]
    table = table_of(bench(everywhere), "torchweld bench", "2026-11-17")
    transposed = "/t" in form
    shapes: list[tuple[int, ...]] = []
    for layer, K, N in zip(form.split(";"), sizes, sizes[1:], strict=False):
        weight = (K, N) if transposed else (N, K)
        one = [weight, *([(N,)] if "/b" in layer else [])]
        shapes += one * (2 if "separate" in layer else 1)
    found = table.known(form, shapes, "float32", rows, True)
    assert isinstance(found, KnownSpeed), found
    assert found.faster


def test_cold_cases_are_told_apart() -> None:
    hot, cold = with_cold([case(rows=3)])
    assert (hot.cold, cold.cold) == (False, True)
    assert str(cold) == f"{hot} cold"
    both = [replace(one, lead=(rows,)) for one in (hot, cold) for rows in (1, 2)]
    wide = [replace(one, mlp=replace(one.mlp, sizes=(8, 32, 4))) for one in both]
    cells = [cell(one, {"cpu": comparison()}) for one in both + wide]
    assert [one.dtype for one in maps(bench(cells))] == ["fp32", "fp32 cold"]
    assert with_cold([case(rows=1000)]) == [case(rows=1000)]


# ---- the sides ----


@pytest.mark.parametrize("mlp", BLOCKS, ids=lambda mlp: mlp.name)
def test_the_module_computes_the_chain_of_its_forms(mlp: MlpShape) -> None:
    module = eager_block(mlp, torch.float64, seed=1)
    x = torch.randn(3, 5, dtype=torch.float64)
    tensors = tensors_of(mlp, torch.float64, seed=1)
    torch.testing.assert_close(module(x), reference_backend.chain(x, tensors, mlp.forms))
    assert ("/t" in format_spec(mlp.forms)) == mlp.transposed


def test_other_benches_refuse_transposed_weights() -> None:
    with pytest.raises(TorchweldError, match="bench --table"):
        linears_of(BLOCKS[-1], torch.float32)


@NEEDS_KERNELS
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mlp", BLOCKS, ids=lambda mlp: mlp.name)
def test_welded_modules_are_verified_and_run_the_kernels(
    mlp: MlpShape, dtype: str, fake: FakeCompare
) -> None:
    cases = with_cold([Case(mlp=mlp, lead=(rows,), dtype=dtype) for rows in (1, 6)])
    planned = plan(cases, list(WAYS))
    cells = list(measure(planned, cases, runtimes=TABLE_RUNTIMES))
    assert len(cells) == 4
    for one in cells:
        packed, natural = one.result("cpu"), one.result("cpu:natural")
        for found in (packed, natural):
            assert found.refused is None
            assert found.check is not None
            assert found.check.ok
        assert packed.kernel.startswith("packed")
        assert packed.copied_bytes
        assert not natural.kernel.startswith(("packed", "composed"))
        assert not natural.copied_bytes
        assert one.case is not None
        assert packed.comparison is not None
        assert packed.comparison.cold == one.case.cold


# ---- the table ----


def result_of(one: Result) -> SpeedCell:
    made: Bench = bench([replace(cell(case(), {"cpu": comparison()}), results=(one,))])
    (found,) = table_of(made, "torchweld bench", "2026-11-17").cells
    return found


def test_a_table_has_both_ways_of_every_cell() -> None:
    sides = {"cpu": comparison(2.0), "cpu:natural": comparison(0.5, "slower")}
    cells = [cell(one, dict(sides)) for one in with_cold([case(rows=3)])]
    made = bench(cells, backends=("cpu", "cpu:natural"), cpu="a CPU", isa="avx2", threads=3)
    table = table_of(made, "torchweld bench --table x.json", "2026-11-17")
    assert (table.isa, table.cpu, table.torch, table.threads) == ("avx2", "a CPU", "2.13", 3)
    found = [(one.way, one.cold, one.verdict, one.speedup) for one in table.cells]
    assert found == [
        ("packed", False, "faster", 2.0),
        ("natural", False, "slower", 0.5),
        ("packed", True, "faster", 2.0),
        ("natural", True, "slower", 0.5),
    ]
    assert SpeedTable.from_json(table_text(table)) == table


def test_intervals_are_rounded_outwards() -> None:
    compared = replace(comparison(1.2), speedup=1.23456, interval=(1.11119, 1.44441))
    found = result_of(Result(name="cpu", comparison=compared))
    assert (found.speedup, found.interval) == (1.235, (1.111, 1.445))


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        (Result(name="cpu").left_out("wrong: it is"), "wrong: it is"),
        (Result(name="cpu", comparison=comparison(2.0, "not measured")), "because we say so"),
        (
            Result(
                name="cpu",
                comparison=replace(
                    comparison(2.0), verdict="not measured", speedup=2.0, interval=(0.0, math.inf)
                ),
            ),
            "because we say so",
        ),
    ],
)
def test_what_was_not_measured_says_why(result: Result, reason: str) -> None:
    found = result_of(result)
    assert found.verdict == "not measured"
    assert found.speedup == NotMeasured(reason)
    assert found.interval is None


# ---- which instructions eager runs on ----


@pytest.mark.parametrize(
    ("isa", "capability", "flags", "environment", "good"),
    [
        ("avx512", "AVX512", ("avx2", "avx512f"), {}, True),
        ("avx512", "AVX2", ("avx2", "avx512f"), {}, False),
        ("avx2", "AVX2", ("avx2",), {}, True),
        ("avx2", "AVX2", ("avx2", "avx512f"), {}, False),  # oneDNN and MKL may use more
        ("avx2", "AVX2", ("avx2", "avx512f"), HOLD_TO_AVX2, True),
        ("avx2", "AVX512", ("avx2", "avx512f"), HOLD_TO_AVX2, False),
        ("neon", "DEFAULT", ("asimd",), {}, True),
        (None, "AVX2", ("avx2",), {}, False),
    ],
)
def test_eager_is_held_to_the_instructions_of_the_table(
    isa: str | None, capability: str, flags: tuple[str, ...], environment: Any, good: bool
) -> None:
    problem = held_problem(isa, capability, flags, environment)
    assert (problem == "") == good
    if isa == "avx2" and not good:
        assert "ONEDNN_MAX_CPU_ISA=AVX2" in problem
