"""`torchweld bench` shows what was found, in a table and in JSON, and exits accordingly."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from tests.benching.samples import FakeCompare
from torch import Tensor

from torchweld import hardware
from torchweld.benching import Bench, Case, Mlp, running, summarise
from torchweld.cli import bench as bench_verb
from torchweld.cli.main import run
from torchweld.measuring import Verdict

Bencher = Callable[..., tuple[int, str, str]]
SMALL = ("--sizes", "8,16,4", "--rows", "3")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCompare:
    fake = FakeCompare(speedup=3.2)
    monkeypatch.setattr(running, "compare", fake)
    return fake


@pytest.fixture
def bench(capsys: pytest.CaptureFixture[str], fake: FakeCompare) -> Bencher:
    """Runs the verb; gives exit code, stdout and stderr."""

    def call(*arguments: str) -> tuple[int, str, str]:
        code = run(["bench", *arguments])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return call


def squeezed(text: str) -> str:
    return " ".join(text.split())


def test_a_table_and_a_closing_sentence(bench: Bencher) -> None:
    code, out, err = bench(*SMALL, "--backend", "torch", "--backend", "reference")
    assert (code, err) == (0, "")
    header = next(line for line in out.splitlines() if line.startswith("block"))
    assert header.split() == [
        *("block", "rows", "dtype", "eager", "µs", "reference", "torch"),
        *("interval", "verdict", "error", "kernel", "ops", "bufs"),
    ]
    row = next(line for line in out.splitlines() if line.startswith("8→16→4"))
    assert row.split() == [
        *("8→16→4", "3", "fp32", "123", "3.20", "3.20", "2.88–3.52", "faster", "1.00", "aten"),
        *("5→3", "3→2"),
    ]
    assert "torch is 3.20x as fast as eager (geometric mean of 1 cell); least" in squeezed(out)
    assert "at most 1.00x of eager's" in squeezed(out)
    assert "no copy of the weights." in squeezed(out)


@pytest.mark.parametrize("width", [100, 80])
@pytest.mark.parametrize("verdict", ["faster", "same", "not measured"])
def test_the_widest_cells_fit_and_nothing_is_cut(
    fake: FakeCompare, verdict: Verdict, width: int
) -> None:
    fake.verdict, fake.speedup = verdict, 12.345
    cases = bench_verb.choose_cases((), "8,16,4", None, False, (3,), ())
    done = bench_verb.run_cases(running.plan(cases, ("torch", "reference")), cases, None)
    (cell,) = done.cells
    names = ("cpu:natural", "torch", "torch:mkldnn")
    wide = Mlp(sizes=(2048, 5632, 2048), activation="silu", gated=True)
    first, other = (replace(r, kernel="repacked columns") for r in cell.results)
    results = zip((first, other, other), names, strict=True)
    cell = replace(
        cell,
        case=Case(mlp=wide, rows=4096, dtype="bf16"),
        eager_ops=8,
        results=tuple(replace(result, backend=name) for result, name in results),
    )
    done = replace(done, cells=(cell, cell), backends=names, cpu="A long name " * 19)
    screen = io.StringIO()
    console = Console(file=screen, width=width)
    table = bench_verb.table_of(done, width)
    legend = bench_verb.legend(table, done.backends)
    parts = (bench_verb.heading(done), table, legend, *bench_verb.closing(summarise(done)))
    for part in parts:
        console.print(part)
    shown = screen.getvalue()
    assert max(len(line) for line in shown.splitlines()) <= width
    assert "…" not in shown
    for text in ("2048→5632→2048", "silu gated", verdict, "123"):
        assert text in shown
    assert ("8→3" in shown) == (width == 100)
    assert ("On a wider terminal: kernel, bufs, ops" in squeezed(shown)) == (width == 80)


@pytest.mark.skipif(hardware.build_problem() is not None, reason="needs the compiled kernels")
def test_packed_weights_are_accounted_for(bench: Bencher) -> None:
    _, out, _ = bench(*SMALL)
    assert squeezed(out).endswith("MB of packed weights beside 0.00 MB.")
    assert f"kernels for {hardware.isa_in_use()}" in out
    row = next(line for line in out.splitlines() if line.startswith("8→16→4"))
    assert row.split()[-4:] == ["packed", "single", "5→1", "3→1"]


def test_json_is_all_that_is_printed_and_loads_again(bench: Bencher) -> None:
    code, out, err = bench(
        *SMALL, "--dtype", "fp32", "--dtype", "bf16", "--backend", "torch", "--json"
    )
    assert (code, err) == (0, "")
    loaded = Bench.from_dict(json.loads(out))
    assert [cell.case.dtype for cell in loaded.cells] == ["fp32", "bf16"]
    assert loaded.backends == ("torch",)
    assert not loaded.interrupted


def test_options_reach_the_timing(bench: Bencher, fake: FakeCompare) -> None:
    bench(*SMALL, "--backend", "torch", "--seconds", "0.25", "--cold", "--seed", "4")
    assert fake.calls == [{"names": ["eager", "torch"], "budget_s": 0.25, "cold": True, "seed": 4}]


def test_every_combination_of_lists_is_measured(bench: Bencher) -> None:
    options = ("--rows", "1", "--rows", "2", "--dtype", "fp32", "--dtype", "fp64", "--json")
    _, out, _ = bench("--block", "tiny", "--sizes", "8x4", *options, "--backend", "torch")
    cells = Bench.from_dict(json.loads(out)).cells
    found = [(c.case.mlp.shape_text, c.case.dtype, c.case.rows) for c in cells]
    assert found == [
        (text, dtype, rows)
        for text in ("64→256→64", "8→4")
        for dtype in ("fp32", "fp64")
        for rows in (1, 2)
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--block", "tinny"), "unknown block 'tinny'; did you mean 'tiny'?"),
        (("--dtype", "float32"), "unknown dtype 'float32'; did you mean 'fp32'?"),
        (("--backend", "refrence"), "unknown backend 'refrence'; did you mean 'reference'?"),
        (("--backend", "torch:mkl"), "unknown mode of backend torch 'mkl'; did you mean 'mkldnn'?"),
        (("--sizes", "8,4", "--activation", "glu"), "unknown activation 'glu'"),
        (("--sizes", "8,4", "--gated"), "expected exactly three whole numbers"),
        (("--gated",), "give its --sizes too"),
        (("--rows", "0"), "0 is not in the range"),
        (("--seconds", "-1"), "seconds is -1.0"),
    ],
)
def test_mistakes_are_named_with_the_nearest(
    bench: Bencher, fake: FakeCompare, arguments: tuple[str, ...], message: str
) -> None:
    code, out, err = bench(*arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert fake.calls == []


def test_a_broken_rule_is_reported_with_exit_code_1(
    bench: Bencher, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = running._side

    def wrong(x: Tensor) -> Tensor:
        return torch.ones(len(x), 4)

    def side(*given: object) -> running._Side:
        return replace(honest(*given), run=wrong)  # type: ignore[arg-type]

    monkeypatch.setattr(running, "_side", side)
    code, out, _ = bench(*SMALL, "--backend", "torch")
    assert code == 1
    assert "breaks the numerical rule, so not timed: 3 × 8→16→4 gelu fp32, torch" in squeezed(out)
    row = next(line for line in out.splitlines() if line.startswith("8→16→4"))
    assert "wrong" in row
    assert "not timed" in row
    code, out, _ = bench(*SMALL, "--backend", "torch", "--json")
    assert code == 1
    assert json.loads(out)["cells"][0]["results"][0]["comparison"] is None


def test_nothing_measured_is_exit_code_2_with_the_reason(bench: Bencher, fake: FakeCompare) -> None:
    fake.verdict = "not measured"
    code, out, _ = bench(*SMALL, "--backend", "torch")
    assert code == 2
    assert "not measured: 3 × 8→16→4 gelu fp32: because we say so" in squeezed(out)
    assert squeezed(out).endswith("torch: nothing was measured.")
    assert "3.2" not in out


@pytest.mark.parametrize("as_json", [False, True])
def test_an_interrupt_shows_what_there_is(
    bench: Bencher, fake: FakeCompare, monkeypatch: pytest.MonkeyPatch, as_json: bool
) -> None:
    def interrupted(*sides: object, **options: object) -> object:
        if len(fake.calls) == 2:
            raise KeyboardInterrupt
        return fake(*sides, **options)

    monkeypatch.setattr(running, "compare", interrupted)
    rows = [option for count in "1234" for option in ("--rows", count)]
    code, out, err = bench("--sizes", "8,4", *rows, "--backend", "torch", *["--json"] * as_json)
    assert code == 130
    assert "interrupted" in err
    if as_json:
        loaded = Bench.from_dict(json.loads(out))
        assert loaded.interrupted
        assert [cell.case.rows for cell in loaded.cells] == [1, 2]
    else:
        assert "geometric mean of 2 cells" in squeezed(out)


def test_without_kernels_it_works_and_says_so(
    bench: Bencher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "build_problem", lambda: "there is no compiler; get one")
    code, out, _ = bench(*SMALL)
    assert code == 0
    assert "no compiled kernels" in out
    assert "not used: cpu: there is no compiler; get one" in out
    assert "torch is 3.20x as fast as eager" in squeezed(out)


def test_on_a_terminal_the_table_grows(fake: FakeCompare) -> None:
    cases = bench_verb.choose_cases((), "8,4", None, False, (1, 2), ())
    planned = running.plan(cases, ("torch",))
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=100)
    done = bench_verb.run_cases(planned, cases, console)
    assert len(done.cells) == 2
    shown = screen.getvalue()
    assert "1 of 2: 1 × 8→4 gelu fp32 …" in shown
    assert "2 of 2: 2 × 8→4 gelu fp32 …" in shown


def test_help_has_an_example(bench: Bencher) -> None:
    code, out, _ = bench("--help")
    assert code == 0
    assert "torchweld bench --sizes" in squeezed(out)
    assert all(
        option in out for option in ("--block", "--rows", "--seconds", "--backend", "--json")
    )
