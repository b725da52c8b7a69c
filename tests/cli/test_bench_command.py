"""`torchweld bench` shows what was found, in tables, JSON and CSV, and exits accordingly."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from tests.support.bench_samples import FakeCompare, case, cell, comparison, comparison_of
from tests.support.bench_samples import bench as made_bench
from tests.support.busy import busy_cores
from tests.support.screen_texts import line_with, squeezed

from torchweld.bench import Bench, Case, Latency, MlpShape, bench_participants, summarise
from torchweld.bench.runtimes.openvino_runtime import OpenVinoRuntime
from torchweld.cli import bench_command as bench_verb
from torchweld.cli import bench_progress
from torchweld.cli.bench_progress import Keeper
from torchweld.core.not_measured import NotMeasured
from torchweld.machine import kernel_build, machine_load
from torchweld.models import MODELS
from torchweld.plans import planner
from torchweld.report.bench_text import bench_head, bench_sections
from torchweld.report.text_style import to_text
from torchweld.timing import Verdict

Bencher = Callable[..., tuple[int, str, str]]
SMALL = ("--block", "gelu", "--sizes", "8x16x4", "--rows", "3")
NEEDS_KERNELS = pytest.mark.skipif(
    kernel_build.build_problem() is not None, reason="needs the compiled kernels"
)


# ---- tables ----


def test_tables_and_a_closing_sentence(bench: Bencher) -> None:
    code, out, err = bench(*SMALL, "--backend", "torch,reference")
    assert (code, err) == (0, "")
    speeds, work = (line for line in out.splitlines() if line.startswith("block"))
    assert speeds.split() == [
        *("block", "rows", "dtype", "eager", "µs", "reference", "torch"),
        *("interval", "verdict", "error", "kernel"),
    ]
    assert work.split() == [
        *("block", "rows", "dtype", "µs", "GFLOP/s", "GB/s", "of", "peak", "ops", "bufs"),
        *("host", "µs", "CPU", "µs"),
    ]
    row, second = (line for line in out.splitlines() if line.startswith("8→16→4"))
    assert row.split() == [
        *("8→16→4", "3", "fp32", "123", "3.20", "3.20", "2.88–3.52", "faster", "1.00", "aten"),
    ]
    assert second.split()[:4] == ["8→16→4", "3", "fp32", "123→38.6"]
    assert "5→3" in second
    assert "3→2" in second
    assert "torch is 3.20x as fast as eager at 3 × 8→16→4 gelu fp32; output" in squeezed(out)
    assert "at most 1.00x of eager's" in squeezed(out)
    assert squeezed(out).endswith("no copy of the weights.")


def wide_bench(verdict: Verdict) -> Bench:
    """A bench with the widest cells: six other sides, long names, large figures."""
    wide = MlpShape(sizes=(2048, 5632, 2048), activation="silu", gated=True)
    against = ("mkldnn", "compile", "compile-max", "onnxruntime", "openvino")
    names = (*against, "cpu:natural")
    compared = {name: comparison(12.345, verdict, name, us=123456.0) for name in names}
    what = Case(mlp=wide, lead=(8, 4096), dtype="bfloat16")
    one = cell(what, compared, us=123456.0)
    latency = Latency(calls_us=tuple(float(i) for i in range(1001)))
    results = tuple(
        replace(r, latency=latency, callers=r.comparison and comparison(2.0)) for r in one.results
    )
    one = replace(one, results=results)
    return made_bench(
        [one, replace(one, name=one.name + "!")],
        against=against,
        backends=("cpu:natural",),
        cpu="A long name " * 19,
        callers=4,
    )


@pytest.mark.parametrize("width", [100, 80])
@pytest.mark.parametrize("verdict", ["faster", "same", "not measured"])
def test_the_widest_cells_fit_and_what_has_no_room_is_named(verdict: Verdict, width: int) -> None:
    done = wide_bench(verdict)
    parts = [*bench_head(done), *bench_sections(done, summarise(done), width)]
    shown = to_text(parts, width)
    assert max(len(line) for line in shown.splitlines()) <= width
    assert "…" not in shown.replace(", …)", "")
    for text in ("2048→5632→2048", "silu-gated", "8×4096", "bf16", "123456"):
        assert text in shown
    assert "On a wider terminal: kernel" in squeezed(shown)
    assert ("12.3" in shown) == (verdict != "not measured")
    assert ("≈12.3" in shown) == (verdict == "same")


def test_the_best_is_bold_and_noise_is_marked() -> None:
    compared = {
        "mkldnn": comparison(0.5, "slower"),
        "cpu": replace(comparison(1.5), verdict="not measured", speedup=1.5, interval=(0.9, 2.0)),
    }
    done = made_bench([cell(case(), compared)], against=("mkldnn",))
    coloured = to_text(bench_sections(done, summarise(done), 100), 100, colour=True)
    assert "\x1b[1;33m~1.50" in coloured
    slow = made_bench([cell(case(), {"cpu": comparison(0.5, "slower")})])
    coloured = to_text(bench_sections(slow, summarise(slow), 100), 100, colour=True)
    assert "\x1b[1m123\x1b" in coloured.replace(" ", "")


def test_a_map_is_drawn_over_rows_and_widths(bench: Bencher) -> None:
    grid = ("--block", "gelu", "--sizes", "8x16,8x32", "--rows", "1,2", "--backend", "torch")
    _, out, _ = bench(*grid)
    assert "where torch wins: gelu fp32" in out
    assert line_with("rows \\ hidden", out).split() == ["rows", "\\", "hidden", "16", "32"]
    assert "+3.20 +3.20" in squeezed(out)


def test_presets_name_their_rows(bench: Bencher) -> None:
    code, out, _ = bench("--preset", "blog", "--rows", "1x2", "--backend", "torch")
    assert code == 0
    for label in ("nn.Linear", "MLP, gelu", "GeGLU"):
        assert label in out
    work = line_with(" ops ", out)
    assert "CPU µs" in work
    assert "host µs" in work


def test_single_calls_and_callers_have_tables_of_their_own(bench: Bencher) -> None:
    options = ("--backend", "torch", "--latency", "--callers", "2", "--seconds", "0.05")
    code, out, _ = bench(*SMALL, *options)
    assert code == 0
    assert line_with("p50", out).split() == ["cell", "p50", "p95", "p99", "calls"]
    assert "calls per second, 2 callers at once" in out
    rows = [line.split() for line in out.splitlines() if line.startswith("  3 × 8→16→4 gelu fp32")]
    assert [row[5] for row in rows] == ["eager", "eager"]


def test_single_calls_and_callers_are_hot_and_say_so_where_the_rest_is_cold(
    bench: Bencher,
) -> None:
    options = ("--backend", "torch", "--latency", "--callers", "2", "--seconds", "0.05", "--cold")
    _, out, _ = bench(*SMALL, *options)
    assert "weights cold" in out
    assert "taken in turn, weights hot; –" in out
    assert "windows in turn, weights hot; speed" in out


@NEEDS_KERNELS
def test_packed_weights_are_accounted_for(bench: Bencher) -> None:
    _, out, _ = bench(*SMALL)
    assert "of packed weights beside 768 B." in squeezed(out)
    assert f"kernels for {kernel_build.isa_in_use()}" in out
    assert line_with("8→16→4", out).split()[-2:] == ["packed", "single"]


@pytest.mark.skipif(not machine_load.STAT.exists(), reason="this system does not tell its load")
def test_a_load_that_is_there_is_seen(bench: Bencher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_verb, "busy_cores", machine_load.busy_cores)
    with busy_cores(1):
        code, out, _ = bench(*SMALL, "--backend", "torch")
    assert code == 0
    assert out.startswith("This machine is busy: other processes use ")


# ---- what is asked for ----


def test_options_reach_the_timing(bench: Bencher, fake: FakeCompare) -> None:
    options = ("--backend", "torch", "--seconds", "0.25", "--cold", "--seed", "4", "--json")
    _, out, _ = bench(*SMALL, *options)
    (given,) = fake.calls
    assert given["names"] == ["eager", "torch"]
    assert given["budget_s"] >= 0.25
    assert given["seed"] == 4
    assert comparison_of(Bench.from_dict(json.loads(out)).cells[0], "torch").cold


def test_every_combination_of_lists_is_measured(bench: Bencher) -> None:
    options = ("--rows", "1,2", "--dtype", "fp32", "--dtype", "fp64", "--json")
    blocks = ("--block", "tiny,linear", "--sizes", "8x4")
    _, out, _ = bench(*blocks, *options, "--backend", "torch")
    cases = [cell.case for cell in Bench.from_dict(json.loads(out)).cells]
    found = [(c.mlp.shape_text, c.dtype, c.rows) for c in cases if c is not None]
    assert found == [
        (text, dtype, rows)
        for text in ("64→256→64", "8→4")
        for dtype in ("float32", "float64")
        for rows in (1, 2)
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--block", "tinny"), "unknown block 'tinny'; did you mean 'tiny'?"),
        (("--dtype", "float23"), "unknown dtype 'float23'; did you mean 'float"),
        (("--backend", "refrence"), "unknown backend 'refrence'; did you mean 'reference'?"),
        (("--backend", "torch:mkl"), "unknown mode of backend torch 'mkl'; did you mean 'mkldnn'?"),
        (("--against", "openvno"), "unknown peer 'openvno'; did you mean 'openvino'?"),
        (("--preset", "model"), "unknown preset 'model'; did you mean 'models'?"),
        (("--preset", "blog", "--block", "gelu"), "--preset has blocks of its own"),
        (("--block", "glu", "--sizes", "8x4"), "unknown block 'glu'"),
        (("--block", "swiglu", "--sizes", "8x4x4x8"), "expected exactly three whole numbers"),
        (("--sizes", "768,3072,768"), "such as 768x3072"),
        (("--rows", "0"), "rows '0': expected a whole number of at least 1"),
        (("--rows", ","), "the grid is empty"),
        (("--seconds", "-1"), "seconds is -1.0"),
        (("--against", ""), "--against '' names nothing"),
        (("--preset", ""), "unknown preset ''"),
        (("--callers", "0"), "0 is not in the range"),
        (("--callers", "5000"), "callers are 5000; expected at most 1000"),
        (("--seed", "-1"), "seed is -1; expected a whole number from 0"),
        (("gpt", "--seed", "4294967296"), "seed is 4294967296; expected"),
        (("--history", "runs.sqlite"), "is where --save NAME keeps a run; add --save NAME"),
        (("--json", "--csv"), "give one, and --out for the other"),
        (("--input", "8x8"), "--input goes with a TARGET"),
        (("--plan", "plan.json"), "--plan goes with a TARGET"),
        (("gpt", "--rows", "3"), "--rows measures blocks"),
        (("gpt", "--against", "mkldnn"), "unknown peer 'mkldnn'"),
        (("gptt",), "unknown built-in model 'gptt'; did you mean 'gpt'?"),
        (("gpt", "--plan", "no-such-plan.json"), "cannot be read as a plan"),
    ],
)
def test_mistakes_are_named_with_the_nearest(
    bench: Bencher, fake: FakeCompare, arguments: tuple[str, ...], message: str
) -> None:
    code, out, err = bench(*arguments)
    assert code == 2
    assert message in err
    assert "Traceback" not in err
    assert fake.calls == []
    assert "eager µs" not in out


def test_a_peer_that_is_not_installed_is_left_out_and_it_is_said(
    bench: Bencher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OpenVinoRuntime, "needs", ("no_such_runtime",))
    code, out, _ = bench(*SMALL, "--against", "openvino", "--backend", "torch")
    assert code == 0
    said = 'left out: openvino: no_such_runtime not installed: pip install "torchweld[bench]"'
    assert said in squeezed(out)


# ---- a whole model ----


@pytest.fixture
def policy_plan(tmp_path: Path, one_thread: None) -> str:
    """A file with a plan for the built-in policy that welds by force: tuning is not tested here."""
    model, given = MODELS["policy"].build()
    planner.plan(model, given, force=True).save(tmp_path / "plan.json")
    return str(tmp_path / "plan.json")


@pytest.mark.usefixtures("brief_profiles")
def test_a_model_is_measured_on_its_inputs(bench: Bencher, policy_plan: str) -> None:
    code, out, err = bench("policy", "--seconds", "0.05", "--plan", policy_plan)
    assert (code, err) == (0, "")
    assert out.startswith("policy; torch")
    assert "plan: " in out
    assert line_with("eager µs", out).split()[:4] == ["input", "eager", "µs", "torchweld"]
    assert "1x64 float32" in out
    assert "host: starting ops, and Python" in squeezed(out)


def test_a_model_that_cannot_be_timed_leaves_nothing_behind(
    bench: Bencher, fake: FakeCompare, tmp_path: Path
) -> None:
    file = tmp_path / "mutates.py"
    file.write_text(
        "import torch\nfrom torch import nn\n"
        "class Adds(nn.Linear):\n"
        "    def forward(self, x):\n        return super().forward(x.add_(1.0))\n"
        "def make():\n    return Adds(8, 8), torch.randn(2, 8)\n"
    )
    before = len(fake.calls)
    code, _, err = bench(f"{file}:make", "--out", str(tmp_path / "found.json"))
    assert code == 2
    assert "Adds changes its input '2x8 float32': rounds would not do the same work" in err
    assert len(fake.calls) == before
    assert not (tmp_path / "found.json").exists()


@pytest.mark.usefixtures("brief_profiles")
def test_what_a_model_prints_is_no_part_of_the_data(bench: Bencher, tmp_path: Path) -> None:
    file = tmp_path / "prints.py"
    file.write_text(
        "import torch\nfrom torch import nn\n"
        "def make():\n    print('made')\n    return nn.Tanh(), torch.randn(2, 8)\n"
    )
    _, out, err = bench(f"{file}:make", "--seconds", "0.05", "--json")
    assert Bench.from_dict(json.loads(out)).target == f"{file}:make"
    assert "made" in err


# ---- progress ----


def test_on_a_terminal_the_table_grows_and_the_time_left_is_told(fake: FakeCompare) -> None:
    cases = [case(rows=1), case(rows=2)]
    planned = bench_participants.plan(cases, ("torch",))
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=100)
    done = bench_progress.run_cases(planned, cases, False, console, Keeper(None, None))
    assert len(done.cells) == 2
    shown = screen.getvalue()
    assert "1 of 2, about" in shown
    assert "left: 1 × 8→16→4 gelu fp32 …" in shown
    assert "2 of 2, about" in shown
    assert "eager µs" in shown


def test_help_has_examples(bench: Bencher) -> None:
    code, out, _ = bench("--help")
    assert code == 0
    assert "torchweld bench --block gelu,swiglu --rows 1,8,64,512" in squeezed(out)
    options = ("--block", "--rows", "--sizes", "--against", "--backend", "--preset", "--latency")
    assert all(option in out for option in (*options, "--callers", "--save", "--csv", "--out"))


def test_figures_that_are_not_known_are_dashes(bench: Bencher, fake: FakeCompare) -> None:
    one = cell(case(), {"cpu": None})
    done = made_bench(
        [replace(one, results=(one.results[0].left_out("it cannot"), one.results[1]))]
    )
    shown = to_text(bench_sections(done, summarise(done), 100), 100)
    assert "–→–" in shown
    assert "left out in 3 × 8→16→4 gelu fp32: eager, cpu: it cannot" in shown


def test_a_share_above_the_peak_is_a_dash_and_says_what_renews_the_peaks() -> None:
    one = cell(case(), {"cpu": comparison(2.0, us=0.1)}, us=100.0)
    done = made_bench([one])
    shown = squeezed(to_text(bench_sections(done, summarise(done), 100), 100))
    assert "→– % m" in shown
    assert "1 of 2 shares of the peak are not measured: the call took less than" in shown
    assert "torchweld info --measure renews them" in shown


def test_a_host_time_that_is_not_known_says_why() -> None:
    one = cell(case(), {"cpu": comparison(2.0)})
    eager, ours = one.results
    ours = replace(ours, cost=replace(ours.cost, host_us=NotMeasured("it was busier")))
    done = made_bench([replace(one, results=(eager, ours))])
    shown = squeezed(to_text(bench_sections(done, summarise(done), 100), 100))
    assert "9.00→–" in shown
    assert "1 of 2 host times are not measured: it was busier" in shown


def test_what_was_not_measured_reads_so_everywhere() -> None:
    never = comparison(1.0, "not measured")
    never = replace(never, baseline_us=NotMeasured("busy"), candidate_us=NotMeasured("busy"))
    sizes = [MlpShape(sizes=(8, hidden, 8)) for hidden in (16, 32)]
    cells = [
        cell(case(mlp, rows=rows), {"cpu": comparison(2.0) if rows == 1 else never})
        for mlp in sizes
        for rows in (1, 2)
    ]
    latency = Latency(calls_us=(1.0, 2.0))
    cells = [
        replace(
            one,
            results=tuple(
                replace(r, us=r.comparison.candidate_us, latency=latency, callers=r.comparison)
                if r.comparison is not None
                else r
                for r in one.results
            ),
        )
        for one in cells
    ]
    done = made_bench(cells, callers=2)
    shown = to_text([*bench_head(done), *bench_sections(done, summarise(done), 100)], 100)
    words = shown.replace("→", " ").replace("–", " ").split()
    assert not {"nan", "inf", "NaN", "None"} & set(words)
    assert "hidden 16: wins at 1, not measured at 2 rows" in squeezed(shown)
    assert "2 of 4 cells not measured; on this machine --seconds 6 may help." in squeezed(shown)
    assert "because we say so (1 more cell likewise)" in squeezed(shown)


def test_the_load_of_the_machine_comes_before_any_figure(
    bench: Bencher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_verb, "busy_cores", lambda: 1.5)
    _, out, _ = bench(*SMALL, "--backend", "torch")
    assert out.startswith("This machine is busy: other processes use 1.5 of its")
    _, out, _ = bench(*SMALL, "--backend", "torch", "--json")
    assert Bench.from_dict(json.loads(out)).busy_cores == 1.5


def test_one_reason_of_all_sides_is_told_once() -> None:
    one = cell(case(), {"cpu": None, "torch": None})
    one = replace(one, results=tuple(replace(r, refused="no room") for r in one.results))
    done = made_bench([one])
    shown = squeezed(to_text(bench_sections(done, summarise(done), 100), 100))
    assert "left out in 3 × 8→16→4 gelu fp32: eager, cpu, torch: no room" in shown
    assert shown.count("no room") == 1


def test_an_error_that_cannot_be_told_is_not_shown_as_a_figure() -> None:
    one = cell(case(), {"cpu": comparison(2.0)})
    eager, ours = one.results
    assert ours.check is not None
    ours = replace(ours, check=replace(ours.check, error_ratio=NotMeasured("eager is exact")))
    done = made_bench([replace(one, results=(eager, ours))])
    shown = squeezed(to_text(bench_sections(done, summarise(done), 100), 100))
    assert "; output error 0.50 of what the numerical rule allows; " in shown
