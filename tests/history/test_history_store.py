"""The history file: what is kept, what a crash leaves, who is refused and how."""

from __future__ import annotations

import math
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from torchweld.core.errors import TorchweldError
from torchweld.core.not_measured import NotMeasured
from torchweld.history import History, RunWriter, fingerprint_here, history_store, of_comparison
from torchweld.history.kept_samples import to_comparison
from torchweld.history.run_comparison import figures_of
from torchweld.machine import fingerprint, kernel_build
from torchweld.timing import compare

NOBODY = 65534


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "history.sqlite"


def begin(history: History, name: str = "main", what: str = "gpt 8x768") -> RunWriter:
    return history.begin(name, "bench", what, {"seconds": 3.0})


def write(path: Path, name: str = "main", cells: int = 1) -> None:
    with History.open(path, create=True) as history:
        run = begin(history, name)
        for i in range(cells):
            run.add(f"cell {i}", {"speedup": 1.5 + i}, {"log_ratios": [0.4, 0.5]})
        run.finish({"cells": cells})


# ---- keeping ----


def test_what_was_kept_is_read_again(path: Path) -> None:
    write(path, cells=3)
    with History.open(path) as history:
        (run,) = history.runs()
        assert (run.name, run.kind, run.what, run.finished) == ("main", "bench", "gpt 8x768", True)
        assert run.settings == {"seconds": 3.0}
        assert run.summary == {"cells": 3}
        assert [cell.cell for cell in run.cells] == ["cell 0", "cell 1", "cell 2"]
        assert run.cells[1].data == {"speedup": 2.5}
        assert run.cells[1].samples == {"log_ratios": (0.4, 0.5)}
        assert run.created.endswith("+00:00")


def test_a_figure_that_was_not_measured_is_kept_with_its_reason(path: Path) -> None:
    with History.open(path, create=True) as history:
        run = begin(history)
        run.add("cell", {"fused": {"speedup": NotMeasured("too busy"), "eager_us": 3.0}})
        run.finish()
    with History.open(path) as history:
        (cell,) = history.runs()[0].cells
    assert cell.data == {"fused": {"speedup": {"not_measured": "too busy"}, "eager_us": 3.0}}
    assert [one.label for one in figures_of(cell)] == ["fused eager_us"]


def test_a_run_says_where_it_was_measured(path: Path) -> None:
    write(path)
    with History.open(path) as history:
        found = history.runs()[0].fingerprint
    assert found == fingerprint_here()
    assert found.key == fingerprint.key_here()
    assert found.torchweld == "0.1.0"
    build = kernel_build.build_info()
    assert found.kernels == (build.source_hash if build is not None else None)


def test_the_newest_finished_run_is_the_latest(path: Path) -> None:
    with History.open(path, create=True) as history:
        for what in ("a", "b", "a"):
            begin(history, what=what).finish({"what": what})
        begin(history, what="a")  # never finished
        begin(history, "other").finish()
        assert [run.what for run in history.runs("main")] == ["a", "a", "b", "a"]
        assert [run.finished for run in history.runs("main")] == [False, True, True, True]
        latest = history.latest("main")
        assert latest is not None
        assert (latest.id, latest.what) == (3, "a")
        older = history.latest("main", what="b")
        assert older is not None
        assert older.id == 2
        assert history.latest("main", "gate") is None
        assert history.latest("nobody") is None


def test_numbers_that_json_cannot_hold_are_kept(path: Path) -> None:
    with History.open(path, create=True) as history:
        data = {"interval": (-math.inf, math.inf), "speedup": math.nan}
        begin(history).add("a", data, {"us": [math.nan, 1.0]})
        (cell,) = history.runs()[0].cells
    assert cell.data == {"interval": ["-inf", "inf"], "speedup": "nan"}
    assert math.isnan(cell.samples["us"][0])


def test_a_comparison_comes_back_whole(path: Path) -> None:
    found = compare(lambda: sum(range(50)), lambda: sum(range(90)), budget_s=0.2)
    with History.open(path, create=True) as history:
        begin(history).add("a", *of_comparison(found))
        (cell,) = history.runs()[0].cells
    assert to_comparison(cell.data, cell.samples) == found


def test_forgetting_takes_all_runs_of_a_name_and_their_cells(path: Path) -> None:
    write(path, "a", 2)
    write(path, "a", 2)
    write(path, "b", 2)
    with History.open(path) as history:
        assert history.forget("a") == 2
        assert history.forget("a") == 0
        assert [run.name for run in history.runs()] == ["b"]
    with sqlite3.connect(path) as raw:
        assert raw.execute("SELECT COUNT(*) FROM cell").fetchone() == (2,)
    raw.close()


def test_a_run_that_was_forgotten_takes_nothing_more(path: Path) -> None:
    with History.open(path, create=True) as history, History.open(path) as other:
        run = begin(history)
        other.forget("main")
        begin(other, "next")
        for write_more in (lambda: run.add("a", {}), lambda: run.finish()):
            with pytest.raises(TorchweldError, match="was forgotten while it was measured"):
                write_more()
        assert [cell for one in other.runs() for cell in one.cells] == []


@pytest.mark.parametrize("name", ["", "two words", "-x", "main~1", "a" * 101, "x\n"])
def test_a_name_that_cannot_be_typed_again_is_refused(path: Path, name: str) -> None:
    with (
        History.open(path, create=True) as history,
        pytest.raises(TorchweldError, match="cannot be the name"),
    ):
        begin(history, name)


def test_what_json_has_no_word_for_is_refused_and_nothing_written(path: Path) -> None:
    with History.open(path, create=True) as history:
        run = begin(history)
        with pytest.raises(TorchweldError, match=r"data\[a\]\[1\] is a set"):
            run.add("x", {"a": [1, {2}]})
        assert history.runs()[0].cells == ()


# ---- crashes, and two at once ----

WRITER = """
import sys
from pathlib import Path
from torchweld.history import History
path, name, cells = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
with History.open(path, create=True) as history:
    run = history.begin(name, "bench", "x", {})
    for i in range(cells):
        run.add(f"cell {i}", {"i": i}, {"us": [float(i)] * 2000})
        print(i, flush=True)
    run.finish()
"""


def start_writer(path: Path, name: str, cells: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITER, str(path), name, str(cells)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_what_was_added_survives_a_kill_in_the_middle(path: Path) -> None:
    with start_writer(path, "killed", 100_000) as writer:
        assert writer.stdout is not None
        for line in writer.stdout:
            if int(line) >= 20:
                break
        writer.send_signal(signal.SIGKILL)
        acknowledged = max(map(int, writer.stdout.read().split()), default=20)
    assert writer.returncode == -signal.SIGKILL
    with History.open(path) as history:
        (run,) = history.runs("killed")
        assert not run.finished
        found = [cell.data["i"] for cell in run.cells]
        assert found == list(range(len(found)))
        assert len(found) > acknowledged
        begin(history).finish()  # and it can be written to


def test_two_processes_write_at_once(path: Path) -> None:
    writers = [start_writer(path, name, 50) for name in ("a", "b")]
    for writer in writers:
        writer.communicate(timeout=120)
        assert writer.returncode == 0
    with History.open(path) as history:
        for name in ("a", "b"):
            (run,) = history.runs(name)
            assert run.finished
            assert [cell.data["i"] for cell in run.cells] == list(range(50))


# ---- refused ----


def test_nothing_kept_yet_says_how_to_keep(path: Path) -> None:
    with pytest.raises(TorchweldError, match="--save NAME keeps a run"):
        History.open(path)
    assert not path.exists()


@pytest.mark.parametrize("size", [5, 600, 20_000])
def test_a_file_that_is_no_database_is_refused_and_left_alone(path: Path, size: int) -> None:
    path.write_bytes(b"x" * size)
    with pytest.raises(TorchweldError, match="not an SQLite file; name another file"):
        History.open(path, create=True)
    assert path.read_bytes() == b"x" * size


def test_a_damaged_file_is_refused(path: Path) -> None:
    write(path, cells=60)
    content = bytearray(path.read_bytes())
    assert len(content) > 3 * 4096
    content[4096 : 3 * 4096] = b"\xa5" * (2 * 4096)
    path.write_bytes(content)
    with pytest.raises(TorchweldError, match="it is damaged; move it away"):
        History.open(path)


def test_a_row_that_is_damaged_is_named(path: Path) -> None:
    write(path)
    with sqlite3.connect(path) as raw:
        raw.execute("UPDATE run SET fingerprint = '{}'")
    raw.close()
    with (
        History.open(path) as history,
        pytest.raises(
            TorchweldError, match=r"run 1 of main in .* is damaged: run\.fingerprint lacks key"
        ),
    ):
        history.runs()


def test_a_newer_file_is_refused_and_left_alone(path: Path) -> None:
    write(path)
    with sqlite3.connect(path) as raw:
        raw.execute(f"PRAGMA user_version = {history_store.VERSION + 1}")
    raw.close()
    before = path.read_bytes()
    with pytest.raises(TorchweldError, match=r"newer torchweld.*upgrade torchweld"):
        History.open(path, create=True)
    assert path.read_bytes() == before


def test_a_database_of_another_program_is_refused(path: Path) -> None:
    with sqlite3.connect(path) as raw:
        raw.execute("CREATE TABLE mine (x)")
    raw.close()
    with pytest.raises(TorchweldError, match="of another program"):
        History.open(path, create=True)


def test_a_file_that_stays_locked_is_refused_after_a_while(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(path)
    monkeypatch.setattr(history_store, "WAIT_S", 0.2)
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    begun_s = time.monotonic()
    with pytest.raises(TorchweldError, match="another process holds a lock on it"):
        History.open(path)
    assert time.monotonic() - begun_s >= 0.1  # it did wait
    holder.execute("COMMIT")
    with History.open(path) as history:
        holder.execute("BEGIN EXCLUSIVE")
        with pytest.raises(TorchweldError, match="another process holds a lock on it"):
            begin(history)
        holder.execute("COMMIT")
        begin(history)
    holder.close()


@pytest.fixture
def read_only_folder() -> Iterator[Path]:
    """A folder that this process cannot write; root, who can write anywhere, becomes nobody."""
    folder = Path(tempfile.mkdtemp())
    write(folder / "history.sqlite")
    folder.chmod(0o555)
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(NOBODY)
    try:
        yield folder
    finally:
        if is_root:
            os.seteuid(0)
        folder.chmod(0o755)
        (folder / "history.sqlite").unlink()
        folder.rmdir()


def test_a_folder_that_cannot_be_written_is_refused_but_read(read_only_folder: Path) -> None:
    for new in (read_only_folder / "new.sqlite", read_only_folder / "deep" / "new.sqlite"):
        with pytest.raises(TorchweldError, match=r"--history FILE or TORCHWELD_HISTORY"):
            History.open(new, create=True)
    with History.open(read_only_folder / "history.sqlite") as history:
        assert len(history.runs()) == 1
        with pytest.raises(TorchweldError, match="cannot be written"):
            begin(history)


def test_a_folder_in_place_of_the_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TorchweldError, match="is a folder"):
        History.open(tmp_path, create=True)


def test_a_full_disk_is_said_and_what_was_there_stays(path: Path) -> None:
    write(path, cells=2)
    with History.open(path) as history:
        run = begin(history)
        run.add("small", {"a": 1})
        (pages,) = history._connection.execute("PRAGMA page_count").fetchone()
        history._connection.execute(f"PRAGMA max_page_count = {pages}")
        with pytest.raises(TorchweldError, match="the disk is full"):
            run.add("large", {}, {"us": [0.5] * 20_000})
    with History.open(path) as history:
        assert [len(one.cells) for one in history.runs()] == [1, 2]
