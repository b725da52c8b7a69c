"""A bench verifies before it times, counts exactly, and keeps what it found."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from tests.benching.samples import FakeCompare, comparison
from torch import Tensor

from torchweld import hardware
from torchweld.benching import (
    BLOCKS,
    Bench,
    Case,
    Mlp,
    demo_cases,
    measure,
    parse_sizes,
    plan,
    running,
    summarise,
)
from torchweld.benching.cases import eager_model
from torchweld.errors import TorchweldError, UnsupportedError
from torchweld.kernels import mkldnn, reference

NEEDS_KERNELS = pytest.mark.skipif(
    hardware.build_problem() is not None, reason="needs the compiled kernels"
)
NEEDS_MKLDNN = pytest.mark.skipif(
    bool(mkldnn.reasons(torch.bfloat16, torch.device("cpu"))), reason="needs oneDNN's linears"
)
PLAIN = Mlp(sizes=(8, 16, 4))
GATED = Mlp(sizes=(8, 16, 4), activation="silu", gated=True, bias=False)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCompare:
    fake = FakeCompare()
    monkeypatch.setattr(running, "compare", fake)
    return fake


def measured(cases: list[Case], backends: tuple[str, ...]) -> Bench:
    bench = plan(cases, backends)
    return replace(bench, cells=tuple(measure(bench, cases)))


def case(mlp: Mlp = PLAIN, rows: int = 3, dtype: str = "fp32") -> Case:
    return Case(mlp=mlp, rows=rows, dtype=dtype)


# ---- what is measured ----


@pytest.mark.parametrize("mlp", [PLAIN, GATED, BLOCKS["deep"], Mlp(sizes=(5, 3))])
def test_the_eager_model_computes_the_chain_of_its_forms(mlp: Mlp) -> None:
    model, linears = eager_model(mlp, torch.float64, seed=1)
    tensors = [t for linear in linears for t in (linear.weight, linear.bias) if t is not None]
    x = torch.randn(3, mlp.sizes[0], dtype=torch.float64)
    torch.testing.assert_close(model(x), reference.chain(x, tensors, mlp.forms))


def test_the_same_seed_gives_the_same_weights_and_leaves_torchs_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    first, second = (eager_model(PLAIN, torch.float32, seed=3)[1][0].weight for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(torch.rand(1), expected)


def test_the_demo_goes_from_small_to_large_in_two_dtypes() -> None:
    cases = demo_cases()
    assert {case.dtype for case in cases} == {"fp32", "bf16"}
    assert {case.rows for case in cases} == {1, 8, 64}
    assert len(cases) == len(set(cases)) <= 20


def test_sizes_are_read_in_several_spellings() -> None:
    for text in ("8,16,4", "8x16x4", "8→16→4", " 8, 16 , 4 "):
        assert parse_sizes(text) == (8, 16, 4)
    for text in ("", "8,a", "8.5,2", "8,-2"):
        with pytest.raises(TorchweldError, match="such as 768,3072,768"):
            parse_sizes(text)


@pytest.mark.parametrize(
    ("sizes", "gated", "message"),
    [((8,), False, "two or more"), ((8, 0), False, "at least 1"), ((8, 4), True, "exactly three")],
)
def test_sizes_that_make_no_mlp(sizes: tuple[int, ...], gated: bool, message: str) -> None:
    with pytest.raises(TorchweldError, match=message):
        Mlp(sizes=sizes, gated=gated)


# ---- what is refused ----


def test_what_cannot_be_measured_is_refused_before_anything_is() -> None:
    with pytest.raises(TorchweldError, match=r"'fp23'; did you mean 'fp32'\?"):
        plan([case(dtype="fp23")])
    with pytest.raises(TorchweldError, match="rows is 0"):
        plan([case(rows=0)])
    with pytest.raises(TorchweldError, match="seconds is 0"):
        plan([case()], seconds=0)
    with pytest.raises(TorchweldError, match="name each once"):
        plan([case()], ("torch", "torch"))
    with pytest.raises(TorchweldError, match=r"'tocrh'; did you mean 'torch'\?"):
        plan([case()], ("tocrh",))
    with pytest.raises(UnsupportedError, match=r"torch in mode mkldnn cannot run .*\n.*float64"):
        plan([case(), case(dtype="fp64")], ("torch:mkldnn",))


def test_without_kernels_torch_serves_and_it_is_said(
    monkeypatch: pytest.MonkeyPatch, fake: FakeCompare
) -> None:
    monkeypatch.setattr(hardware, "build_problem", lambda: "there is no compiler; get one")
    bench = plan([case()])
    assert bench.backends == ("torch",)
    assert bench.notes == ("cpu: there is no compiler; get one",)
    assert bench.isa is None
    (cell,) = measure(bench, [case()])
    assert cell.results[0].kernel == "aten"
    with pytest.raises(UnsupportedError, match="no compiler"):
        plan([case()], ("cpu",))


@NEEDS_KERNELS
def test_the_kernels_come_first_and_torch_beside_them() -> None:
    bench = plan([case()])
    assert (bench.backends, bench.notes) == (("cpu", "torch"), ())
    assert bench.isa == hardware.isa_in_use()


# ---- what is found ----


@NEEDS_KERNELS
@NEEDS_MKLDNN
def test_a_cell_has_counts_kernels_and_memory_of_every_backend(fake: FakeCompare) -> None:
    bench = measured([case()], ("cpu", "cpu:natural", "torch", "torch:mkldnn", "reference"))
    (cell,) = bench.cells
    assert (cell.eager_ops, cell.eager_buffers) == (5, 3)
    assert cell.weight_bytes == (8 * 16 + 16 + 16 * 4 + 4) * 4
    found = {r.backend: (r.kernel.split()[0], r.ops, r.buffers) for r in cell.results}
    assert found == {
        "cpu": ("packed", 1, 1),
        "cpu:natural": ("natural", 1, 1),
        "torch": ("aten", 3, 2),
        "torch:mkldnn": ("mkldnn", 2, 2),
        "reference": ("eager", 5, 3),
    }
    copied = {r.backend: r.copied_bytes > 0 for r in cell.results}
    assert [name for name, copies in copied.items() if copies] == ["cpu", "torch:mkldnn"]
    checks = {r.backend: r.check for r in cell.results}
    assert all(check.ok for check in checks.values())
    assert checks["reference"].error_ratio == checks["torch"].error_ratio == 1.0


def test_timing_gets_what_was_planned(fake: FakeCompare) -> None:
    cases = [case(rows=1), case(rows=2), case(GATED)]
    bench = plan(cases, ("torch", "reference"), seconds=0.25, cold=True, seed=7)
    cells = list(measure(bench, cases))
    assert [cell.case for cell in cells] == cases
    wanted = {"names": ["eager", "torch", "reference"], "budget_s": 0.25, "cold": True, "seed": 7}
    assert fake.calls == [wanted] * 3


def wrong(x: Tensor) -> Tensor:
    return torch.zeros(len(x), 4) + 3.0


def test_a_wrong_result_is_reported_and_never_timed(
    monkeypatch: pytest.MonkeyPatch, fake: FakeCompare
) -> None:
    honest = running._side

    def side(text: str, *rest: object) -> running._Side:
        found = honest(text, *rest)  # type: ignore[arg-type]
        return replace(found, run=wrong) if text == "torch" else found

    monkeypatch.setattr(running, "_side", side)
    bench = measured([case()], ("torch", "reference"))
    (cell,) = bench.cells
    bad, good = cell.results
    assert not bad.check.ok
    assert bad.check.row_ratio > 1.0
    assert bad.comparison is None
    assert good.comparison is not None
    assert fake.calls[0]["names"] == ["eager", "reference"]
    summary = summarise(bench)
    assert len(summary.failed) == 1
    assert "3 × 8→16→4 gelu fp32, torch: row" in summary.failed[0]
    assert summary.measured == 0


def test_it_is_real_from_end_to_end() -> None:
    """Nothing faked: whatever the machine's mood, there is a verdict with its reason."""
    torch.set_num_threads(1)
    cases = [case()]
    bench = plan(cases, ("torch",), seconds=0.3)
    (cell,) = measure(bench, cases)
    timed = cell.results[0].comparison
    assert timed is not None
    assert timed.verdict in ("faster", "slower", "same", "not measured")
    assert timed.reason
    assert timed.baseline == "eager"


def test_a_bench_survives_json(fake: FakeCompare) -> None:
    bench = measured([case(), case(GATED, dtype="fp64")], ("torch", "reference"))
    (first, second) = bench.cells
    assert math.isnan(second.results[0].check.error_ratio)  # eager in fp64 is the reference
    bench = replace(bench, cells=(first,), interrupted=True)
    assert Bench.from_dict(json.loads(bench.to_json())) == bench
    with pytest.raises(TorchweldError, match="must be"):
        Bench.from_dict({"kind": "something else"})


def test_json_holds_what_floats_cannot(fake: FakeCompare) -> None:
    fake.verdict = "not measured"
    bench = measured([case(dtype="fp64")], ("torch",))
    loaded = Bench.from_dict(json.loads(bench.to_json()))
    result = loaded.cells[0].results[0]
    assert math.isnan(result.check.error_ratio)
    assert result.comparison is not None
    assert result.comparison.interval == (0.0, math.inf)


# ---- what it comes to ----


@NEEDS_MKLDNN
def test_the_summary_is_of_the_first_backend_and_of_measured_cells(fake: FakeCompare) -> None:
    cases = [case(rows=1), case(rows=2), case(dtype="bf16"), case(GATED)]
    bench = measured(cases, ("torch:mkldnn", "reference"))
    given = [comparison(8.0), comparison(2.0), comparison(0.5), comparison(9.0, "not measured")]
    cells = tuple(
        replace(cell, results=(replace(cell.results[0], comparison=timed), cell.results[1]))
        for cell, timed in zip(bench.cells, given, strict=True)
    )
    summary = summarise(replace(bench, cells=cells))
    assert (summary.backend, summary.cells, summary.measured) == ("torch:mkldnn", 4, 3)
    assert summary.mean == pytest.approx(2.0)
    assert summary.means == pytest.approx({"fp32": 4.0, "bf16": 0.5})
    assert summary.worst == ("3 × 8→16→4 gelu bf16", 0.5)
    assert summary.unmeasured == ("3 × 8→16→4 silu gated fp32: because we say so",)
    plain, half, gated = (8 * 16 + 16 * 4) * 4, (8 * 16 + 16 * 4) * 2, (2 * 8 * 16 + 16 * 4) * 4
    assert summary.copied_bytes == plain + half + gated  # once for each MLP and dtype
    assert summary.largest_error_ratio == max(c.results[0].check.error_ratio for c in cells)


def test_a_summary_of_nothing() -> None:
    summary = summarise(plan([case()], ("torch",)))
    assert (summary.cells, summary.measured, summary.worst) == (0, 0, None)
    assert math.isnan(summary.mean)
