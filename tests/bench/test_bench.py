"""A bench verifies before it times, counts exactly, and keeps what it found."""

from __future__ import annotations

import json
import os
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.bench_samples import (
    GATED,
    PEAKS,
    PLAIN,
    FakeCompare,
    case,
    check_of,
    comparison_of,
)
from tests.support.busy import busy_cores

from torchweld.bench import (
    Bench,
    Case,
    MlpShape,
    bench_participants,
    concurrent_callers,
    measure,
    plan,
    runtime_server,
    stage_timing,
    summarise,
)
from torchweld.bench.bench_cases import SEED
from torchweld.bench.bench_grid import BLOCKS
from torchweld.bench.block_truth import BlockTruth
from torchweld.bench.cell_bench import cost_of
from torchweld.bench.eager_block import eager_block, tensors_of
from torchweld.bench.runtimes.onnx_runtime import OnnxRuntime
from torchweld.bench.runtimes.runtime import Runtime
from torchweld.bench.runtimes.torch_runtimes import EagerRuntime, MkldnnRuntime
from torchweld.bench.runtimes.torchweld_runtimes import FusedMlpRuntime
from torchweld.core.errors import NotMeasuredError, TorchweldError, UnsupportedError
from torchweld.core.model_inputs import Workload
from torchweld.core.not_measured import NotMeasured
from torchweld.machine import kernel_build, measured_peaks
from torchweld.ops.backends import mkldnn_linears, reference_backend
from torchweld.report.bench_text import bench_head, bench_sections
from torchweld.report.text_style import to_text
from torchweld.timing import CallableSide

DATA = Path(__file__).parent.parent / "data"

NEEDS_KERNELS = pytest.mark.skipif(
    kernel_build.build_problem() is not None, reason="needs the compiled kernels"
)
NEEDS_MKLDNN = pytest.mark.skipif(
    bool(mkldnn_linears.reasons(torch.float32, torch.device("cpu"))),
    reason="needs oneDNN's linears",
)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCompare:
    fake = FakeCompare()
    monkeypatch.setattr(stage_timing, "compare", fake)
    return fake


def measured(cases: list[Case], backends: tuple[str, ...], against: tuple[str, ...] = ()) -> Bench:
    bench = plan(cases, backends, against)
    return replace(bench, cells=tuple(measure(bench, cases)))


# ---- what is measured ----


@pytest.mark.parametrize(
    "mlp",
    [
        PLAIN,
        GATED,
        BLOCKS["deep"],
        MlpShape(sizes=(5, 3)),
        MlpShape(sizes=(5, 3, 4), activation="elu:2"),
    ],
)
def test_the_eager_block_computes_the_chain_of_its_forms(mlp: MlpShape) -> None:
    block = eager_block(mlp, torch.float64, seed=1)
    x = torch.randn(3, mlp.sizes[0], dtype=torch.float64)
    tensors = tensors_of(mlp, torch.float64, seed=1)
    torch.testing.assert_close(block(x), reference_backend.chain(x, tensors, mlp.forms))


def test_the_same_seed_gives_the_same_weights_and_leaves_torchs_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    first, second = (PLAIN.linears(seed=3)[0].weight for _ in range(2))
    assert np.array_equal(first, second)
    assert not np.array_equal(first, PLAIN.linears(seed=4)[0].weight)
    assert torch.equal(torch.rand(1), expected)
    assert np.array_equal(PLAIN.inputs(5), PLAIN.inputs(64)[:5])
    assert all(own.bias is None for own in GATED.linears())
    assert 0.9 < np.abs(first).max() * np.sqrt(first.shape[1]) <= 1.0


@pytest.mark.parametrize(
    ("sizes", "gated", "message"),
    [((8,), False, "two or more"), ((8, 0), False, "at least 1"), ((8, 4), True, "exactly three")],
)
def test_sizes_that_make_no_mlp(sizes: tuple[int, ...], gated: bool, message: str) -> None:
    with pytest.raises(TorchweldError, match=message):
        MlpShape(sizes=sizes, gated=gated)


# ---- the truth ----


def test_of_many_rows_some_are_judged_the_first_and_the_last_among_them() -> None:
    truth = BlockTruth.of(PLAIN, torch.float32, 300, SEED, most=64)
    good = BlockTruth.of(PLAIN, torch.float32, 300, SEED).outputs.float()
    assert truth.judge(good, good).ok
    for row, seen in ((0, True), (299, True), (1, False)):
        bad = good.clone()
        bad[row] += 1.0
        assert truth.judge(bad, good).ok != seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_wrong_element_is_found(dtype: torch.dtype) -> None:
    truth = BlockTruth.of(BLOCKS["deep"], dtype, 8)
    good = truth.outputs.to(dtype)
    assert truth.judge(good, good).reason is None
    bad = good.clone()
    bad[3, 4] += 0.2
    assert "row 3" in str(truth.judge(bad, good).reason)
    assert truth.judge(torch.zeros_like(good), good).reason is not None


@pytest.mark.parametrize("mlp", [BLOCKS["deep"], GATED])
def test_the_truth_is_that_of_eager_in_fp64(mlp: MlpShape) -> None:
    x = torch.from_numpy(mlp.inputs(2)).double()
    with torch.no_grad():
        expected = eager_block(mlp, torch.float64)(x)
    torch.testing.assert_close(BlockTruth.of(mlp, torch.float32, 2).outputs, expected)


# ---- what is refused ----


def test_what_cannot_be_measured_is_refused_before_anything_is() -> None:
    with pytest.raises(TorchweldError, match="the grid is empty"):
        plan([])
    with pytest.raises(TorchweldError, match="rows is 0"):
        plan([case(rows=0)])
    with pytest.raises(TorchweldError, match="seconds is 0"):
        plan([case()], seconds=0)
    with pytest.raises(TorchweldError, match="name each once"):
        plan([case()], ("torch", "torch"))
    with pytest.raises(TorchweldError, match=r"'tocrh'; did you mean 'torch'\?"):
        plan([case()], ("tocrh",))
    with pytest.raises(TorchweldError, match=r"unknown peer 'onnx'; did you mean 'onnxruntime'\?"):
        plan([case()], (), ("onnx",))
    with pytest.raises(UnsupportedError, match=r"torch in mode mkldnn cannot run .*\n.*float64"):
        plan([case(), case(dtype="float64")], ("torch:mkldnn",))


def test_without_kernels_torch_serves_and_it_is_said(
    monkeypatch: pytest.MonkeyPatch, fake: FakeCompare
) -> None:
    monkeypatch.setattr(kernel_build, "build_problem", lambda: "there is no compiler; get one")
    bench = plan([case()])
    assert bench.backends == ("torch",)
    assert bench.notes == ("not used: cpu: there is no compiler; get one",)
    assert bench.isa is None
    (cell,) = measure(bench, [case()])
    assert cell.result("torch").kernel == "aten"
    with pytest.raises(UnsupportedError, match="no compiler"):
        plan([case()], ("cpu",))


@NEEDS_KERNELS
def test_the_kernels_come_first_and_torch_beside_them_where_nobody_else_is() -> None:
    bench = plan([case()])
    assert (bench.backends, bench.notes, bench.left_out) == (("cpu", "torch"), (), {})
    assert bench.names == ("eager", "torch", "cpu")
    assert bench.isa == kernel_build.isa_in_use()
    assert plan([case()], (), ("eager", "mkldnn")).names == ("eager", "mkldnn", "cpu")


def test_a_peer_that_is_not_installed_is_left_out_with_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(OnnxRuntime, "needs", ("no_such_runtime",))
    bench = plan([case()], ("torch",), ("mkldnn", "onnxruntime"))
    assert bench.against == ("mkldnn",)
    assert "no_such_runtime not installed: pip install" in bench.left_out["onnxruntime"]


def test_peaks_that_a_probe_exceeds_are_measured_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def peaks(measure: bool = False) -> measured_peaks.Peaks:
        asked.append(measure)
        return PEAKS

    monkeypatch.setattr(measured_peaks, "peaks", peaks)
    monkeypatch.setattr(measured_peaks, "holds", lambda kept, dtypes: True)
    monkeypatch.setattr(bench_participants, "_reads_hold", lambda kept: True)
    assert bench_participants.machine_peaks() == (PEAKS, ())
    monkeypatch.setattr(bench_participants, "_reads_hold", lambda kept: False)
    found, notes = bench_participants.machine_peaks()
    assert found is PEAKS
    assert asked == [False, False, True]
    assert "since those kept from before were exceeded" in notes[0]


def test_exceeded_peaks_that_cannot_be_measured_anew_are_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def peaks(measure: bool = False) -> measured_peaks.Peaks:
        if measure:
            raise NotMeasuredError("the machine is busy; try again")
        return PEAKS

    asked: list[tuple[str, ...]] = []

    def holds(kept: measured_peaks.Peaks, dtypes: tuple[str, ...]) -> bool:
        asked.append(dtypes)
        return False

    monkeypatch.setattr(measured_peaks, "peaks", peaks)
    monkeypatch.setattr(measured_peaks, "holds", holds)
    found, (note,) = bench_participants.machine_peaks(("bfloat16",))
    assert found is None  # every share would be too high
    assert asked == [("bfloat16",)]
    assert "those kept from before were exceeded, and could not be measured anew" in note


@NEEDS_KERNELS
def test_a_memory_that_reads_faster_than_its_peak_exceeds_it() -> None:
    def reading(gbps: float) -> measured_peaks.Peaks:
        row = replace(PEAKS.read[0], working_set_bytes=1 << 20, gbps=gbps)
        return replace(PEAKS, read=(replace(row, threads=torch.get_num_threads()),))

    assert bench_participants._reads_hold(reading(1e6))
    assert not bench_participants._reads_hold(reading(1e-3))


def test_peaks_that_cannot_be_measured_are_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def peaks(measure: bool = False) -> None:
        if measure:
            raise NotMeasuredError("the machine is busy; try again")

    monkeypatch.setattr(measured_peaks, "peaks", peaks)
    found, notes = bench_participants.machine_peaks()
    assert found is None
    assert notes == ("no share of this machine's peak is shown: the machine is busy; try again",)


# ---- what is found ----


@NEEDS_KERNELS
@NEEDS_MKLDNN
def test_a_cell_has_counts_kernels_and_memory_of_every_backend(fake: FakeCompare) -> None:
    backends = ("cpu", "cpu:natural", "torch", "torch:mkldnn", "reference")
    (cell,) = measured([case()], backends, ("mkldnn",)).cells
    assert cell.weight_bytes == (8 * 16 + 16 * 4) * 4
    found = {r.name: (r.kernel.split()[:1], r.cost.ops, r.cost.buffers) for r in cell.results}
    assert found == {
        "eager": ([], 5, 3),
        "mkldnn": ([], 2, 2),
        "cpu": (["packed"], 1, 1),
        "cpu:natural": (["natural"], 1, 1),
        "torch": (["aten"], 3, 2),
        "torch:mkldnn": (["mkldnn"], 2, 2),
        "reference": (["eager"], 5, 3),
    }
    copies = [result.name for result in cell.results if result.copied_bytes]
    assert copies == ["torch:mkldnn", "cpu"]
    for result in cell.results:
        for us in (result.cost.cpu_us, result.cost.host_us):
            assert us is not None
            assert isinstance(us, NotMeasured) or us > 0
        if result.name == "eager":
            assert result.check is None
        else:
            assert check_of(cell, result.name).ok
    assert check_of(cell, "reference").error_ratio == 1.0


@NEEDS_KERNELS
def test_one_linear_and_a_batch_of_sequences_are_cells_too(fake: FakeCompare) -> None:
    linear = Case(mlp=MlpShape(sizes=(8, 16), activation="identity"), lead=(2, 3))
    (cell,) = measured([linear], ("cpu", "torch")).cells
    assert cell.name == "2×3 × 8→16 linear fp32"
    assert not any(result.refused for result in cell.results)
    assert cell.result("eager").cost.ops == 4  # view, t, addmm, view
    assert cell.flops == 2 * 6 * 8 * 16


def test_a_cuda_device_is_asked_where_there_is_one(
    monkeypatch: pytest.MonkeyPatch, fake: FakeCompare
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(EagerRuntime, "cuda_us", lambda self: 12.5)
    (cell,) = measured([case()], ("torch",)).cells
    assert cell.result("eager").cost.cuda_us == 12.5
    assert cell.result("torch").cost.cuda_us is None


def test_timing_gets_what_was_planned(fake: FakeCompare) -> None:
    cases = [case(rows=1), case(rows=2), case(GATED)]
    bench = plan(cases, ("torch", "reference"), seconds=0.25, cold=True, seed=7)
    cells = list(measure(bench, cases))
    assert [cell.case for cell in cells] == cases
    assert all(comparison_of(cell, "torch").cold for cell in cells)
    assert len(fake.calls) == 3
    for options in fake.calls:
        assert options["names"] == ["eager", "reference", "torch"]
        assert options["seed"] == 7
        assert options["budget_s"] >= 0.25


def wrong(self: Runtime, workload: Workload) -> object:
    (x,) = workload.tensors()
    return lambda: torch.full((*x.shape[:-1], 4), 3.0)


def test_a_wrong_result_is_reported_and_never_timed(
    monkeypatch: pytest.MonkeyPatch, fake: FakeCompare
) -> None:
    monkeypatch.setattr(MkldnnRuntime, "bind", wrong)
    monkeypatch.setattr(FusedMlpRuntime, "bind", wrong)
    bench = measured([case()], ("cpu:natural", "reference"), ("mkldnn",))
    (cell,) = bench.cells
    bad, good = cell.result("cpu:natural"), cell.result("reference")
    check = check_of(cell, "cpu:natural")
    assert not check.ok
    assert not isinstance(check.row_ratio, NotMeasured)
    assert check.row_ratio > 1.0
    assert bad.comparison is None
    assert good.comparison is not None
    assert fake.calls[0]["names"] == ["eager", "reference"]
    summary = summarise(bench)
    assert len(summary.failed) == 1  # a peer that is wrong fails nobody
    assert "3 × 8→16→4 gelu fp32, cpu:natural: row" in summary.failed[0]
    assert next(iter(summary.refused)).startswith("mkldnn: wrong: row")
    assert summary.measured == 0


def test_a_side_that_raises_is_left_out_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, fake: FakeCompare
) -> None:
    def broken(self: Runtime, workload: Workload) -> object:
        raise RuntimeError("no such kernel\nand more")

    monkeypatch.setattr(MkldnnRuntime, "bind", broken)
    (cell,) = measured([case()], ("torch",), ("mkldnn",)).cells
    assert cell.result("mkldnn").refused == "RuntimeError: no such kernel"
    assert cell.result("torch").comparison is not None
    monkeypatch.setattr(EagerRuntime, "bind", broken)
    (cell,) = measured([case()], ("torch",)).cells
    assert cell.result("torch").refused == "eager did not run: RuntimeError: no such kernel"


def test_it_is_real_from_end_to_end() -> None:
    """Nothing is faked. On a busy machine too, there is a verdict with its reason."""
    torch.set_num_threads(1)
    cases = [case()]
    bench = plan(cases, ("torch",), seconds=0.3, callers=2)
    (cell,) = measure(bench, cases, latency=True)
    result, found = cell.result("torch"), comparison_of(cell, "torch")
    assert found.verdict in ("faster", "slower", "same", "not measured")
    assert found.reason
    assert found.baseline == "eager"
    assert result.callers is not None
    assert result.callers.baseline == "eager"
    for side in cell.results:
        assert side.latency is not None
        assert len(side.latency.calls_us) >= 200
        assert min(side.latency.calls_us) > 0
    assert concurrent_callers._team is None  # or it would slow down what is timed next


def test_a_bench_survives_json(fake: FakeCompare) -> None:
    bench = measured([case(), case(GATED, dtype="float64")], ("torch", "reference"))
    (first, second) = bench.cells
    exact = NotMeasured("eager's own error is 0")  # in fp64 it is the reference
    assert check_of(second, "torch").error_ratio == exact
    loaded = Bench.from_dict(json.loads(replace(bench, cells=(first,), interrupted=True).to_json()))
    eager = loaded.cells[0].result("eager")
    assert loaded == replace(bench, cells=(first,), interrupted=True)
    assert eager.cost.ops == 5
    loaded = Bench.from_dict(json.loads(bench.to_json()))
    assert loaded == bench
    assert check_of(loaded.cells[1], "torch").error_ratio == exact
    with pytest.raises(TorchweldError, match="not a bench that torchweld saved"):
        Bench.from_dict({"kind": "something else"})


def test_json_says_what_was_not_measured_and_why(fake: FakeCompare) -> None:
    fake.verdict = "not measured"
    bench = measured([case()], ("torch",))
    text = bench.to_json()
    loaded = Bench.from_dict(json.loads(text))
    assert loaded == bench
    found = comparison_of(loaded.cells[0], "torch")
    assert found.interval == NotMeasured("because we say so")
    assert not {"nan", "inf", "NaN", "Infinity"} & set(text.replace('"', " ").split())


def test_a_bench_of_version_2_still_loads() -> None:
    """The file is from when figures that nobody measured were NaN and infinities."""
    data = json.loads((DATA / "bench_2.json").read_text())
    assert data["version"] == 2
    bench = Bench.from_dict(data)
    one, two, three, four = bench.cells
    assert [result.refused for result in one.results] == [None, "it cannot", None]
    assert one.result("mkldnn").us == NotMeasured("it cannot")
    assert one.result("eager").us == 123.456
    assert two.result("cpu").us == comparison_of(two, "cpu").speedup
    assert two.result("cpu").us == NotMeasured("no round was undisturbed")
    assert comparison_of(two, "mkldnn").speedup == 1.5
    assert check_of(three, "cpu").error_ratio == NotMeasured("eager's own error is 0")
    assert four.result("eager").us == NotMeasured("nothing was timed")
    assert check_of(four, "cpu").row_ratio == NotMeasured("the output is not finite")
    assert four.result("cpu").refused == "wrong: row 0 is not finite"
    assert Bench.from_dict(json.loads(bench.to_json())) == bench
    summary = summarise(bench)
    assert summary.measured == 2
    shown = to_text([*bench_head(bench), *bench_sections(bench, summary, 100)], 100)
    assert not {"nan", "inf", "None"} & set(re.split(r"[^a-zA-Z]+", shown))


def test_a_bench_of_version_3_still_loads() -> None:
    """The file is from before torchweld measured training."""
    data = json.loads((DATA / "bench_3.json").read_text())
    assert data["version"] == 3
    bench = Bench.from_dict(data)
    assert not bench.training
    assert bench.native_bf16 is None
    one, two, three = bench.cells
    assert one.case == case()
    assert two.case == case(GATED, rows=8, dtype="bfloat16", label="a name")
    assert (three.case, three.model, three.what) == (None, None, None)
    assert comparison_of(three, "cpu").speedup == 3.0
    assert Bench.from_dict(json.loads(bench.to_json())) == bench
    shown = to_text([*bench_head(bench), *bench_sections(bench, summarise(bench), 100)], 100)
    assert "training" not in shown


def test_a_bench_of_version_4_still_loads() -> None:
    """The file is from before torchweld measured on GPUs."""
    data = json.loads((DATA / "bench_4.json").read_text())
    assert data["version"] == 4
    bench = Bench.from_dict(data)
    assert (bench.device, bench.gpu, bench.versions, bench.on_gpu) == ("cpu", None, {}, False)
    assert all(result.cost.kernels is None for cell in bench.cells for result in cell.results)
    assert bench.cells[0].case == case()
    assert Bench.from_dict(json.loads(bench.to_json())) == bench
    shown = to_text([*bench_head(bench), *bench_sections(bench, summarise(bench), 100)], 100)
    assert "kernel µs" not in shown


@pytest.mark.parametrize("version", [1, 6, "3", True, None, 2.0])
def test_a_bench_of_a_version_that_there_never_was_is_refused(version: object) -> None:
    data = json.loads((DATA / "bench_2.json").read_text())
    with pytest.raises(TorchweldError, match=r"has bench format .*; this torchweld reads 5"):
        Bench.from_dict({**data, "version": version})


def test_a_host_time_above_the_call_in_an_old_file_is_not_a_figure() -> None:
    data = json.loads((DATA / "bench_2.json").read_text())
    data["cells"][0]["results"][0]["cost"]["host_us"] = 200.0  # in a call of 123
    found = Bench.from_dict(data).cells[0].result("eager").cost.host_us
    assert found == NotMeasured("it was more than the whole call, at another moment")


# ---- parts and wholes ----


def found_cost(**changes: object) -> dict[str, object]:
    return {"host_us": 28.6, "cpu_us": 60.0, "cores": 2.0, "ops": 5, **changes}


def test_host_time_is_never_more_than_the_call() -> None:
    assert cost_of(found_cost(), 40.0).host_us == 28.6
    # The share of the same moment is the better witness, and noise only adds.
    assert cost_of(found_cost(host_share=0.5), 27.4).host_us == pytest.approx(13.7)
    assert cost_of(found_cost(host_share=0.9), 40.0).host_us == 28.6
    unknown = cost_of(found_cost(), 27.4).host_us
    assert isinstance(unknown, NotMeasured)
    assert "28.6 µs, and 27.4 µs with all of it" in unknown.reason
    assert isinstance(cost_of(found_cost(host_share=1.1), 27.4).host_us, NotMeasured)
    assert cost_of(found_cost(), NotMeasured("it cannot")).host_us == 28.6


def test_processor_time_is_never_more_than_the_call_on_all_its_cores() -> None:
    assert cost_of(found_cost(), 27.4).cpu_us == pytest.approx(54.8)
    assert cost_of(found_cost(), 40.0).cpu_us == 60.0
    assert cost_of(found_cost(), NotMeasured("it cannot")).cpu_us == 60.0


def test_costs_of_disturbed_calls_are_not_measured(
    monkeypatch: pytest.MonkeyPatch, fake: FakeCompare
) -> None:
    monkeypatch.setattr(
        CallableSide, "preempted", property(lambda self: True, lambda self, v: None), raising=False
    )
    (cell,) = measured([case()], ("torch",)).cells
    for result in cell.results:
        assert isinstance(result.cost.host_us, NotMeasured)
        assert isinstance(result.cost.cpu_us, NotMeasured)
        assert "took the processor away" in result.cost.cpu_us.reason
        assert result.cost.ops is not None
    unknown = NotMeasured("it was disturbed")
    given = found_cost(cpu_us=unknown, cores=unknown, host_us=unknown)
    found = cost_of(given, 27.4)
    assert found.cpu_us == found.host_us == unknown


def test_a_side_that_is_gone_after_it_was_timed_keeps_its_times(
    monkeypatch: pytest.MonkeyPatch, fake: FakeCompare
) -> None:
    def gone(self: runtime_server.RuntimeServer) -> None:
        raise RuntimeError("gone")

    monkeypatch.setattr(runtime_server.RuntimeServer, "cost", gone)
    (cell,) = measured([case()], ("torch",)).cells
    assert cell.result("torch").measured
    assert cell.result("torch").cost.host_us == NotMeasured("RuntimeError: gone")


def test_a_call_that_is_hardly_more_than_its_host_part_is_timed_in_turn_with_it() -> None:
    class Sleeps:
        countable = False

        def idle(self) -> object:
            return lambda: time.sleep(2e-4)

    server = runtime_server.RuntimeServer.__new__(runtime_server.RuntimeServer)
    runtime: Any = Sleeps()
    server.runtime, server.call = runtime, lambda: time.sleep(3e-4)
    server.side = CallableSide(server.call)
    assert set(server._host()) == {"host_us", "host_share"}


def test_on_a_busy_machine_no_part_exceeds_its_whole() -> None:
    cases = [case(rows=1), case(GATED, rows=2)]
    bench = replace(plan(cases, ("torch",), seconds=0.1), peaks=PEAKS)
    with busy_cores(2):
        cells = tuple(measure(bench, cases, latency=True))
    bench = replace(bench, cells=cells)
    cpus = os.cpu_count() or 1
    for cell in cells:
        for result in cell.results:
            us, cost = result.us, result.cost
            if not isinstance(us, NotMeasured):
                assert cost.host_us is not None
                assert cost.cpu_us is not None
                assert isinstance(cost.host_us, NotMeasured) or cost.host_us <= us
                assert isinstance(cost.cpu_us, NotMeasured) or cost.cpu_us <= 1.01 * cpus * us
            peak = bench.of_peak(cell, result.name)
            assert isinstance(peak, NotMeasured) or peak[0] <= 1.0
    assert Bench.from_dict(json.loads(bench.to_json())) == bench
