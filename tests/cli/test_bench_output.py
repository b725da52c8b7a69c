"""What `torchweld bench` prints, writes and keeps, and how it ends."""

from __future__ import annotations

import csv
import errno
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.bench_samples import FakeCompare
from tests.support.screen_texts import line_with, squeezed

from torchweld.bench import Bench, stage_timing
from torchweld.bench.runtimes.torchweld_runtimes import BackendRuntime
from torchweld.cli.main import run
from torchweld.core import files
from torchweld.core.errors import TorchweldError
from torchweld.core.model_inputs import Workload
from torchweld.history import History, RunWriter
from torchweld.history.kept_records import cell_of, whole_record
from torchweld.machine import kernel_build

Bencher = Callable[..., tuple[int, str, str]]
SMALL = ("--block", "gelu", "--sizes", "8x16x4", "--rows", "3")


# ---- JSON, CSV, files, history ----


def test_json_is_all_that_is_printed_and_loads_again(bench: Bencher) -> None:
    code, out, err = bench(*SMALL, "--dtype", "fp32,bfloat16", "--backend", "torch", "--json")
    assert (code, err) == (0, "")
    loaded = Bench.from_dict(json.loads(out))
    assert [one.dtype for one in loaded.cells] == ["float32", "bfloat16"]
    assert loaded.backends == ("torch",)
    assert not loaded.interrupted


def test_csv_is_all_that_is_printed(bench: Bencher) -> None:
    code, out, err = bench(*SMALL, "--backend", "torch", "--csv")
    assert (code, err) == (0, "")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert [row["implementation"] for row in rows] == ["eager", "torch"]
    assert rows[1]["speedup"] == "3.2"


def test_files_are_written_whole_and_never_replaced_by_accident(
    bench: Bencher, fake: FakeCompare, tmp_path: Path
) -> None:
    table, data = tmp_path / "a.csv", tmp_path / "a.json"
    assert bench(*SMALL, "--backend", "torch", "--out", str(table))[0] == 0
    assert table.read_text().startswith("cell,")
    bench(*SMALL, "--backend", "torch", "--out", str(data))
    assert Bench.from_dict(json.loads(data.read_text())).cells
    measured = len(fake.calls)
    code, out, err = bench(*SMALL, "--out", str(data))
    assert (code, out) == (2, "")
    assert "is there already; --force replaces it" in err
    assert len(fake.calls) == measured
    assert "has to end in .json or .csv" in bench(*SMALL, "--out", str(tmp_path / "a.txt"))[2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.csv", "a.json"]


def test_a_full_disk_does_not_take_the_tables_along(
    bench: Bencher, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, "_replace", full)
    code, out, err = bench(*SMALL, "--backend", "torch", "--out", str(tmp_path / "a.json"))
    assert code == 2
    assert "cannot be written: [Errno 28] No space left on device" in err
    assert "torch is 3.20x as fast as eager" in squeezed(out)
    assert list(tmp_path.iterdir()) == []


def test_a_run_is_kept_cell_by_cell(bench: Bencher, tmp_path: Path) -> None:
    file = tmp_path / "runs.sqlite"
    options = ("--rows", "1,2", "--backend", "torch", "--save", "main", "--history", str(file))
    assert bench("--block", "gelu", "--sizes", "8x16", *options)[0] == 0
    with History.open(file) as history:
        run_ = history.latest("main", "bench")
        assert run_ is not None
        assert run_.what == "--block gelu --sizes 8x16 --rows 1,2"
        assert run_.settings["backends"] == ["torch"]
        cells = run_.cells
        whole = whole_record(run_, Bench)
    *names, last = (one.cell for one in cells)
    assert names == ["1 × 8→16→8 gelu fp32", "2 × 8→16→8 gelu fp32"]
    assert last == cell_of(Bench)
    assert whole is not None
    assert [one.name for one in whole.cells] == names
    assert cells[0].data["torch"]["speedup"] == 3.2
    assert cells[0].samples["torch log_ratios"] == (0.5, 0.6)
    code, out, _ = bench("--block", "tiny", "--save", "not a name", "--history", str(file))
    assert (code, out) == (2, "")


def test_a_history_that_is_full_takes_nothing_from_the_run(
    bench: Bencher, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The first cell is kept; then the disk is full, and all that was measured is shown."""
    real = RunWriter.add

    def add(self: RunWriter, name: str, *values: Any) -> None:
        if name.startswith("2 ×"):
            raise TorchweldError("the disk is full; free some space")
        real(self, name, *values)

    monkeypatch.setattr(RunWriter, "add", add)
    file, out_file = tmp_path / "runs.sqlite", tmp_path / "found.json"
    options = ("--rows", "1,2,3", "--backend", "torch", "--save", "main", "--history", str(file))
    code, out, err = bench("--block", "gelu", "--sizes", "8x16", *options, "--out", str(out_file))
    assert code == 2
    assert "the disk is full; free some space" in err
    assert "geometric mean of 3 cells" in squeezed(out)
    assert len(Bench.from_dict(json.loads(out_file.read_text())).cells) == 3
    with History.open(file) as history:
        (kept,) = history.runs("main")
        assert not kept.finished
        assert [one.cell[:3] for one in kept.cells] == ["1 ×"]


# ---- how it ends ----


def test_a_broken_rule_is_reported_with_exit_code_1(
    bench: Bencher, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(self: object, workload: Workload) -> object:
        (x,) = workload.tensors()
        return lambda: torch.ones(len(x), 4)

    monkeypatch.setattr(BackendRuntime, "bind", wrong)
    code, out, _ = bench(*SMALL, "--backend", "torch")
    assert code == 1
    assert "breaks the numerical rule, so not timed: 3 × 8→16→4 gelu fp32, torch" in squeezed(out)
    row = line_with("8→16→4", out)
    assert "wrong" in row
    assert "not timed" in row
    code, out, _ = bench(*SMALL, "--backend", "torch", "--json")
    assert code == 1
    assert json.loads(out)["cells"][0]["results"][1]["comparison"] is None


def test_nothing_measured_is_exit_code_2_with_the_reason(bench: Bencher, fake: FakeCompare) -> None:
    fake.verdict = "not measured"
    code, out, _ = bench(*SMALL, "--backend", "torch")
    assert code == 2
    assert "not measured: 3 × 8→16→4 gelu fp32: because we say so" in squeezed(out)
    said = "torch: nothing was measured; on this machine --seconds 6 may help."
    assert squeezed(out).endswith(said)
    assert "3.20" not in out  # as a speed-up is shown; times have one digit less


def test_a_verdict_on_anybody_is_exit_code_0(bench: Bencher, fake: FakeCompare) -> None:
    fake.verdicts["torch"] = "not measured"
    code, out, _ = bench(*SMALL, "--backend", "torch,reference")
    assert code == 0
    assert "torch: nothing was measured; on this machine --seconds 6" in squeezed(out)
    assert "3.20" in out


def test_a_run_in_which_nothing_was_measured_is_kept_and_shown(
    bench: Bencher,
    fake: FakeCompare,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fake.verdict = "not measured"
    runs = tmp_path / "runs.sqlite"
    code, _, err = bench(*SMALL, "--backend", "torch", "--save", "main", "--history", str(runs))
    assert (code, err) == (2, "")
    with History.open(runs) as history:
        (kept,) = history.runs("main")
        assert kept.summary is not None
        assert kept.summary["mean"] == {"not_measured": "no cell was measured"}
        assert kept.cells[0].data["torch"]["speedup"] == {"not_measured": "because we say so"}
    assert run(["history", "show", "main", "--history", str(runs)]) == 0
    shown = squeezed(capsys.readouterr().out)
    cell = "3 × 8→16→4 gelu fp32 torch"
    assert f"not measured: {cell} speedup, {cell} low, {cell} high: because we say so" in shown
    assert "torch speed-up" not in shown  # its two samples are not a figure


@pytest.mark.parametrize("form", ["table", "json", "csv"])
def test_an_interrupt_shows_and_keeps_what_there_is(
    bench: Bencher,
    fake: FakeCompare,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    form: str,
) -> None:
    def interrupted(*sides: object, **options: object) -> object:
        if len(fake.calls) == 2:
            raise KeyboardInterrupt
        return fake(*sides, **options)

    monkeypatch.setattr(stage_timing, "compare", interrupted)
    out_file, runs = tmp_path / "found.json", tmp_path / "runs.sqlite"
    arguments = ["--block", "linear", "--sizes", "8x4", "--rows", "1,2,3,4", "--backend", "torch"]
    arguments += ["--out", str(out_file), "--save", "main", "--history", str(runs)]
    code, out, err = bench(*arguments, *([] if form == "table" else [f"--{form}"]))
    assert code == 130
    assert "interrupted" in err
    loaded = Bench.from_dict(json.loads(out_file.read_text()))
    assert loaded.interrupted
    assert [one.case.rows if one.case else None for one in loaded.cells] == [1, 2]
    if form == "table":
        assert "geometric mean of 2 cells" in squeezed(out)
    elif form == "json":
        assert Bench.from_dict(json.loads(out)) == loaded
    else:
        assert len(out.splitlines()) == 1 + 2 * 2
    with History.open(runs) as history:
        (kept,) = history.runs("main")
        assert not kept.finished
        assert len(kept.cells) == 2


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
def test_ctrl_c_ends_a_real_run_with_what_it_has(tmp_path: Path) -> None:
    """The process gets SIGINT in the middle of its rounds, as if typed."""
    out_file = tmp_path / "found.csv"
    command = [sys.executable, "-m", "torchweld", "bench", "--block", "gelu", "--sizes", "8x16"]
    command += ["--rows", ",".join(map(str, range(1, 200))), "--backend", "torch"]
    command += ["--seconds", "0.05", "--out", str(out_file), "--save", "main"]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",  # a second one waits, where the suite runs beside others
        "TORCHWELD_HISTORY": str(tmp_path / "runs.sqlite"),
    }
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        command,
        stdout=pipe,
        stderr=pipe,
        env=environment,
        text=True,
        # A suite that runs in the background of a shell ignores SIGINT, and so would its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    end_s = time.monotonic() + 60
    while time.monotonic() < end_s and process.poll() is None:
        if cells_kept(tmp_path / "runs.sqlite") >= 2:
            break
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "torchweld: interrupted" in err
    assert "Traceback" not in err
    assert "8→16→8" in out
    assert len(out_file.read_text().splitlines()) >= 1 + 2 * 2


def cells_kept(file: Path) -> int:
    if not file.exists():
        return 0
    with History.open(file) as history:
        return sum(len(one.cells) for one in history.runs("main"))


def test_without_kernels_it_works_and_says_so(
    bench: Bencher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_build, "build_problem", lambda: "there is no compiler; get one")
    code, out, _ = bench(*SMALL)
    assert code == 0
    assert "no compiled kernels" in out
    assert "not used: cpu: there is no compiler; get one" in out
    assert "torch is 3.20x as fast as eager" in squeezed(out)
