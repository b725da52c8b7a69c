"""`torchweld bench --table` writes a table of known speeds, with the command that made it."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.bench_samples import FakeCompare, comparison

from torchweld.bench import stage_timing
from torchweld.bench.cell_bench import ATTEMPTS
from torchweld.bench.speed_tables import ENVIRONMENT
from torchweld.cli import bench_table
from torchweld.cli.bench_asked import check_options
from torchweld.cli.bench_command import bench as bench_verb
from torchweld.cli.bench_progress import Keeper
from torchweld.machine import kernel_build
from torchweld.plans.known_speeds import TABLES, KnownSpeed, SpeedTable, load_table
from torchweld.timing import Comparison

Bencher = Callable[..., tuple[int, str, str]]
TINY = ("--block", "relu,linear", "--sizes", "8x16", "--rows", "1,3")
NEEDS_KERNELS = pytest.mark.skipif(
    kernel_build.build_problem() is not None, reason="needs the compiled kernels"
)


@pytest.fixture(autouse=True)
def held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch may use other instructions than our kernels where tests run."""
    monkeypatch.setattr(bench_table, "held_problem", lambda *_: "")


def parsed(command: str) -> dict[str, object]:
    """The options of a recorded command, as the command line reads them."""
    words = shlex.split(command)
    start = words.index("torchweld")
    assert {word.partition("=")[0] for word in words[:start]} <= set(ENVIRONMENT)
    assert words[start + 1] == "bench"
    context = bench_verb.make_context("bench", words[start + 2 :])
    return dict(context.params)


@NEEDS_KERNELS
def test_a_tiny_grid_makes_a_table_that_loads(
    bench: Bencher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    monkeypatch.delenv("TORCHWELD_ISA", raising=False)  # the suite may run with it
    code, out, err = bench(*TINY, "--table", "tiny.json", "--seconds", "0.25")
    assert (code, err) == (0, "")
    assert "fp32 cold" in out
    table = SpeedTable.load("tiny.json")
    assert table.isa == kernel_build.isa_in_use()
    # Two blocks, two row counts, hot and cold, both ways.
    assert len(table.cells) == 16
    assert {cell.way for cell in table.cells} == {"packed", "natural"}
    found = table.known("relu/b;identity/b", [(16, 8), (16,), (8, 16), (8,)], "float32", 2, True)
    assert isinstance(found, KnownSpeed)
    assert found.faster
    assert table.command.startswith("ATEN_CPU_CAPABILITY=avx2 ")
    options = parsed(table.command)
    assert options["table"] == Path("tiny.json")
    assert options["seconds"] == 0.25
    assert options["block"] == ("relu,linear",)
    # Nothing is overwritten by accident.
    code, _, err = bench(*TINY, "--table", "tiny.json")
    assert code == 2
    assert "--force replaces it" in err


@NEEDS_KERNELS
def test_the_command_has_no_path_of_this_machine(bench: Bencher, tmp_path: Path) -> None:
    bench(*TINY, "--table", str(tmp_path / "tiny.json"))
    assert str(tmp_path) not in SpeedTable.load(tmp_path / "tiny.json").command


@NEEDS_KERNELS
def test_what_noise_hid_is_measured_once_more_and_the_rest_is_not(
    bench: Bencher, fake: FakeCompare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At first, one way of the first cell is not measured, however often; later all is faster."""
    number = 0

    def noisy(*sides: Any, **options: Any) -> list[Comparison]:
        nonlocal number
        number += 1
        fake.speedup = float(number)
        found = fake(*sides, **options)
        assert isinstance(found, list)
        hidden = comparison(1.0, "not measured", "cpu:natural")
        early = number <= ATTEMPTS
        return [hidden if one.candidate == "cpu:natural" and early else one for one in found]

    monkeypatch.setattr(stage_timing, "compare", noisy)
    bench(
        "--block", "linear", "--sizes", "8x16", "--rows", "1", "--table", str(tmp_path / "x.json")
    )
    speedups = {(c.cold, c.way): c.speedup for c in SpeedTable.load(tmp_path / "x.json").cells}
    assert speedups == {
        (False, "packed"): 2.0,
        (False, "natural"): 4.0,
        (True, "packed"): 3.0,
        (True, "natural"): 3.0,
    }
    assert fake.calls[ATTEMPTS + 1]["budget_s"] > 2.5 * fake.calls[0]["budget_s"]


@NEEDS_KERNELS
def test_an_interrupted_bench_leaves_no_table(
    bench: Bencher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Keeper, "add", interrupt)
    code, _, _ = bench(*TINY, "--table", str(tmp_path / "tiny.json"))
    assert code == 130
    assert not list(tmp_path.iterdir())


@NEEDS_KERNELS
@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("mlp",), "does not go with a TARGET"),
        (("--preset", "models"), "does not go with --preset"),
        (("--against", "compile"), "does not go with --against"),
        (("--backend", "torch"), "does not go with --backend"),
        (("--cold",), "does not go with --cold"),
        (("--latency",), "does not go with --latency"),
        (("--callers", "2"), "does not go with --callers"),
    ],
)
def test_what_does_not_go_with_a_table_is_refused(
    bench: Bencher, tmp_path: Path, arguments: tuple[str, ...], complaint: str
) -> None:
    code, _, err = bench("--table", str(tmp_path / "x.json"), *arguments)
    assert code == 2
    assert complaint in err


def test_a_table_is_a_json_file_in_a_folder_that_is_there(bench: Bencher, tmp_path: Path) -> None:
    code, _, err = bench("--table", str(tmp_path / "x.csv"))
    assert code == 2
    assert "has to end in .json" in err
    code, _, err = bench("--table", str(tmp_path / "none" / "x.json"))
    assert code == 2
    assert "there is no folder" in err


def test_a_table_of_two_instruction_sets_is_refused(
    bench: Bencher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_table, "held_problem", lambda *_: "torch may use other instructions")
    code, _, err = bench("--table", str(tmp_path / "x.json"))
    assert code == 2
    assert "--table: torch may use other instructions" in err


@pytest.mark.parametrize("isa", sorted(path.stem for path in TABLES.glob("*.json")))
def test_the_command_of_a_shipped_table_is_a_command(
    isa: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = load_table(isa)
    assert isinstance(table, SpeedTable)
    options = parsed(table.command)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "src" / "torchweld" / "tables").mkdir(parents=True)
    check_options(options)
