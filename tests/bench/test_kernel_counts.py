"""What calls launch on a GPU, counted in made events: there is no GPU here."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.support.bench_samples import bench as made_bench
from tests.support.bench_samples import cell, comparison
from tests.support.made_gpu_calls import (
    APART_US,
    COMPILED,
    EAGER,
    GEMM,
    GEMM_US,
    LAUNCH_US,
    OTHER_US,
    SPLIT_SUM,
    WELDED,
    made_calls,
    recorded,
)

from torchweld.bench import Bench, Case, MlpShape
from torchweld.bench.bench_presets import preset_named
from torchweld.bench.bench_rows import csv_text
from torchweld.bench.kernel_counts import KernelCost, kernel_cost, kernels_of
from torchweld.bench.kernel_goals import kernel_verdicts
from torchweld.bench.runtimes.runtime_names import RUNTIMES
from torchweld.bench.runtimes.torch_runtimes import form_of_shape
from torchweld.cli.bench_command import exit_code
from torchweld.cli.bench_device import kernel_goal_code
from torchweld.core.not_measured import NotMeasured
from torchweld.machine.gpu_identity import Gpu
from torchweld.ops.backends import BACKENDS
from torchweld.ops.backends.backend import CountsKernels
from torchweld.pages.bench_view import bench_launches
from torchweld.pages.page_environment import of_bench
from torchweld.report.bench_kernels import kernels_section
from torchweld.report.text_style import to_text

GEGLU = MlpShape(sizes=(768, 3072, 768), activation="gelu", gated=True, bias=False)
A100 = Gpu(
    name="NVIDIA A100-SXM4-40GB", capability="8.0", memory_bytes=40 << 30, runtime="CUDA 13.0",
    driver="580.65",
)  # fmt: skip
OURS = next(b.name for b in BACKENDS if b.abilities.devices == ("cuda",))


def cost(kernels: tuple[str, ...], calls: int = 4) -> KernelCost:
    found = kernel_cost(recorded(made_calls(kernels, calls)), calls)
    assert isinstance(found, KernelCost), found
    return found


# ---- counting ----


def test_the_walk_throughs_table() -> None:
    """Three products and two pointwise kernels; three and one compiled; three and ours."""
    assert cost(EAGER).by_category == {"gemm": 3, "pointwise": 2}
    assert cost(COMPILED).by_category == {"gemm": 3, "triton": 1}
    assert cost(WELDED).by_category == {"gemm": 3, "pointwise": 1}


@pytest.mark.parametrize("calls", [1, 4])
def test_figures_are_those_of_one_call(calls: int) -> None:
    found = cost(EAGER, calls)
    assert (found.kernels, found.launches, found.occupancy_queries) == (5, 5, 3)
    assert found.kernel_us == pytest.approx(3 * GEMM_US + 2 * OTHER_US)
    assert found.launch_us == pytest.approx(5 * LAUNCH_US)
    assert found.idle_us == pytest.approx((5 * calls - 1) * APART_US / calls)
    first = found.rows[0]
    assert (first.name, first.category, first.count) == (GEMM, "gemm", 3)
    assert first.us == pytest.approx(3 * GEMM_US)


def test_no_kernels_are_not_a_count_of_zero() -> None:
    trace = made_calls(EAGER, 2)
    trace.events = [event for event in trace.events if event["cat"] != "kernel"]
    found = kernel_cost(recorded(trace), 2)
    assert isinstance(found, NotMeasured)
    assert "no kernel" in found.reason
    copies = made_calls((), 1).op("aten::to", 0, 9).call("cudaMemcpyAsync", 1, 2, 1)
    found = kernel_cost(recorded(copies.ran("Memcpy HtoD", 20, 5, 1, cat="gpu_memcpy")), 1)
    assert isinstance(found, NotMeasured)


def test_calls_that_launch_different_kernels_are_not_measured() -> None:
    trace = made_calls(EAGER, 4)
    lost = next(event for event in trace.events if event["name"] == GEMM)
    trace.events.remove(lost)
    found = kernel_cost(recorded(trace), 4)
    assert isinstance(found, NotMeasured)
    assert "4 equal calls ran" in found.reason
    assert "11 times" in found.reason


def test_a_product_whose_sums_are_split_is_one_product() -> None:
    assert cost((GEMM, SPLIT_SUM)).by_category == {"gemm": 1, "reduction": 1}


def test_on_a_machine_without_a_gpu_nothing_is_counted() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    found = kernels_of(lambda: torch.ones(2) + 1)
    assert isinstance(found, NotMeasured)


# ---- what should be launched ----


def expected(name: str, label: str) -> dict[str, int] | None:
    rows = preset_named("blog").on_device().rows
    (mlp,) = {row.mlp for row in rows if row.label == label}
    return RUNTIMES[name]().expected_kernels(mlp)


def test_what_the_walk_through_should_launch() -> None:
    assert expected("eager", "nn.Linear") == {"gemm": 1}
    assert expected("compile", "nn.Linear") == {"gemm": 1}
    assert expected("eager", "MLP, gelu") == {"gemm": 2, "pointwise": 1}
    assert expected("compile", "MLP, gelu") == {"gemm": 2, "triton": 1}
    assert expected("eager", "GeGLU") == {"gemm": 3, "pointwise": 2}
    assert expected("compile", "GeGLU") == {"gemm": 3, "triton": 1}
    assert expected(OURS, "GeGLU") == {"gemm": 3, "pointwise": 1}
    assert expected("liger", "GeGLU") is None


def test_every_way_of_ours_on_a_gpu_says_what_it_launches_or_nothing() -> None:
    found = {
        backend.name: backend.expected_kernels(form_of_shape(GEGLU))
        for backend in BACKENDS
        if isinstance(backend, CountsKernels)
    }
    assert found == {
        "cublas": {"gemm": 3, "pointwise": 1}, "triton": {"gemm": 2}, "triton-narrow": {"gemm": 1},
        "cuda": {"gemm": 3, "pointwise": 1},
    }  # fmt: skip


def gpu_bench(*, eager: KernelCost | NotMeasured, ours: KernelCost) -> Bench:
    case = Case(mlp=GEGLU, lead=(64, 128), dtype="bfloat16", label="GeGLU")
    measured = cell(case, {OURS: comparison(1.2, candidate=OURS, us=700.0)}, us=700.0)
    kernels = {"eager": eager, OURS: ours}
    results = tuple(
        replace(r, cost=replace(r.cost, kernels=kernels[r.name])) for r in measured.results
    )
    return made_bench(
        [replace(measured, results=results)], backends=(OURS,), peaks=None, preset="blog",
        device="cuda", gpu=A100, versions={"triton": "3.7.1"},
    )  # fmt: skip


def test_calls_are_held_to_what_they_should_launch() -> None:
    good = kernel_verdicts(gpu_bench(eager=cost(EAGER), ours=cost(WELDED)))
    assert [one.verdict for one in good] == ["as expected", "as expected"]
    assert kernel_goal_code(good) == 0
    bad = kernel_verdicts(gpu_bench(eager=cost(EAGER), ours=cost(EAGER)))
    assert [one.verdict for one in bad] == ["as expected", "differs"]
    assert "launches 3 gemm, 2 pointwise; expected 3 gemm, 1 pointwise" in str(bad[1])
    assert kernel_goal_code(bad) == 1
    unseen = kernel_verdicts(gpu_bench(eager=NotMeasured("nobody saw it"), ours=cost(WELDED)))
    assert unseen[0].verdict == "not measured"
    assert "nobody saw it" in str(unseen[0])
    assert kernel_goal_code(unseen) == kernel_goal_code([]) == 2


def test_with_goals_the_exit_code_says_whether_the_right_kernels_ran() -> None:
    good = gpu_bench(eager=cost(EAGER), ours=cost(WELDED))
    bad = gpu_bench(eager=cost(EAGER), ours=cost(EAGER))
    unseen = gpu_bench(eager=cost(EAGER), ours=cost(WELDED))
    one, nobody = unseen.cells[0], NotMeasured("nobody counted")
    results = tuple(replace(r, cost=replace(r.cost, kernels=nobody)) for r in one.results)
    unseen = replace(unseen, cells=(replace(one, results=results),))
    assert [exit_code(found, True) for found in (good, bad, unseen)] == [0, 1, 2]
    assert [exit_code(found, False) for found in (good, bad, unseen)] == [0, 0, 0]


# ---- what is shown and sent back ----


def test_the_table_has_kernels_times_and_speed() -> None:
    shown = gpu_bench(eager=cost(EAGER), ours=cost(WELDED))
    verdicts = kernel_verdicts(shown)
    lines = to_text(kernels_section(shown, verdicts, 120), 120).splitlines()
    assert "NVIDIA A100-SXM4-40GB" in lines[0]
    eager = next(line for line in lines if " eager " in line)
    ours = next(line for line in lines if f" {OURS} " in line)
    assert "GeGLU 64×128" in eager
    assert "3 gemm, 2 pointwise" in eager
    assert "3 gemm, 1 pointwise" in ours
    assert "1.08–1.32" in ours
    assert "2 of 2 sides launch the kernels they should" in "\n".join(lines)
    assert list(kernels_section(replace(shown, device="cpu"), [], 120)) == []


def test_kernels_that_were_not_seen_are_said_so() -> None:
    shown = gpu_bench(eager=NotMeasured("nobody saw it"), ours=cost(WELDED))
    text = to_text(kernels_section(shown, kernel_verdicts(shown), 120), 120)
    assert "kernels of 1 sides are not measured: nobody saw it" in text
    assert "1 of 2 sides" in text


def test_the_page_says_what_the_gpu_is() -> None:
    rows = dict(of_bench(gpu_bench(eager=cost(EAGER), ours=cost(WELDED))))
    assert rows["GPU"] == "NVIDIA A100-SXM4-40GB"
    assert rows["GPU driver"] == "580.65"
    assert rows["triton"] == "3.7.1"


def test_the_page_has_what_every_side_launched() -> None:
    eager, ours = bench_launches(gpu_bench(eager=cost(EAGER), ours=cost(WELDED)))
    assert (eager.side, ours.side) == ("eager", OURS)
    assert (eager.kernels, eager.kinds) == (5, "3 gemm, 2 pointwise")
    assert (eager.verdict, ours.verdict) == ("as expected", "as expected")
    assert {row.name: row.count for row in eager.rows}[GEMM] == 3
    assert eager.call_us == 700.0
    assert isinstance(ours.call_us, float)
    assert ours.call_us < 700.0
    unseen, _ = bench_launches(gpu_bench(eager=NotMeasured("nobody saw it"), ours=cost(WELDED)))
    assert unseen.kernels == unseen.kernel_us == NotMeasured("nobody saw it")
    assert (unseen.kinds, unseen.rows, unseen.verdict) == ("", (), "not measured")
    on_cpu = replace(gpu_bench(eager=cost(EAGER), ours=cost(WELDED)), device="cpu")
    assert bench_launches(on_cpu) == ()


def test_a_bench_on_a_gpu_saves_and_loads() -> None:
    made = gpu_bench(eager=cost(EAGER), ours=cost(WELDED))
    assert Bench.from_json(made.to_json()) == made
    header, eager, _ = csv_text(made).splitlines()
    figures = dict(zip(header.split(","), eager.split(","), strict=False))
    assert figures["kernels"] == "5"
    assert figures["launches"] == "5"


def test_shares_of_the_peak_are_by_the_vendors_figures() -> None:
    made = gpu_bench(eager=cost(EAGER), ours=cost(WELDED))
    found = made.of_peak(made.cells[0], "eager")
    assert isinstance(found, tuple)
    least_us = made.cells[0].flops / 312e6
    share, what = found
    assert share == pytest.approx(least_us / 700.0)
    assert what == "compute"
    unknown = replace(made, gpu=replace(A100, name="a GPU"))
    assert isinstance(unknown.of_peak(made.cells[0], "eager"), NotMeasured)
    assert not unknown.peaks_known
