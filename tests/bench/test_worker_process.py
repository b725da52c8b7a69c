"""Worker processes: what they answer, how they are stopped, and that none outlives its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from torchweld.bench.bench_grid import parse_sizes
from torchweld.bench.workers.worker_process import WorkerError, WorkerProcess

pytestmark = pytest.mark.skipif(
    sys.platform == "win32", reason="processes are parked by POSIX signals"
)
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def state(pid: int) -> str:
    """A letter: T is stopped, Z and "" are gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


@pytest.fixture(scope="module")
def worker() -> Iterator[WorkerProcess]:
    """One for several tests: each takes seconds to start."""
    with WorkerProcess("a list", list, "ab") as worker:
        yield worker


def test_a_worker_holds_an_object_and_its_methods_are_commands(worker: WorkerProcess) -> None:
    assert worker.ask("copy") == ["a", "b"]
    worker.ask("append", "c")
    assert worker.ask("index", "c") == 2


def test_an_error_is_one_line_and_the_worker_goes_on(worker: WorkerProcess) -> None:
    with pytest.raises(WorkerError, match=r"^IndexError: pop index out of range$"):
        worker.ask("pop", 100)
    with pytest.raises(WorkerError, match=r"^AttributeError: .*no attribute 'shout'"):
        worker.ask("shout")
    assert worker.ask("count", "a") == 1


@LINUX
def test_a_parked_worker_is_stopped_and_goes_on_when_woken(worker: WorkerProcess) -> None:
    worker.ready()
    worker.park()
    assert state(worker.pid) == "T"
    worker.wake()
    assert worker.ask("count", "b") == 1


def test_ctrl_c_is_left_to_the_parent(worker: WorkerProcess) -> None:
    worker.ready()
    os.kill(worker.pid, signal.SIGINT)
    assert worker.ask("count", "a") == 1


def test_an_object_that_cannot_be_made_is_said_and_own_errors_have_no_class_before_them() -> None:
    with (
        WorkerProcess("sizes", parse_sizes, "768") as worker,
        pytest.raises(WorkerError, match=r"^sizes '768': expected two whole numbers"),
    ):
        worker.ready()


def test_a_process_that_ends_shows_its_log() -> None:
    code = "print('what it said last', flush=True); import os; os._exit(3)"
    with (
        WorkerProcess("a worker", exec, code) as worker,
        pytest.raises(WorkerError, match=r"the process of a worker ended with 3: what it said"),
    ):
        worker.ready()


def interrupted(worker: WorkerProcess) -> None:
    with worker:
        worker.ready()
        worker.park()
        raise KeyboardInterrupt


@LINUX
def test_a_worker_ends_with_its_block_even_when_parked() -> None:
    worker = WorkerProcess("a list", list)
    with pytest.raises(KeyboardInterrupt):
        interrupted(worker)
    assert state(worker.pid) == ""


PARENT = """
import sys, time
from torchweld.bench.workers.worker_process import WorkerProcess
worker = WorkerProcess("a list", list)
worker.ready()
worker.park()
print(worker.pid, flush=True)
time.sleep(60)
"""


@LINUX
def test_a_parked_worker_dies_with_its_parent() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent.stdout:
        pid = int(parent.stdout.readline())
    assert state(pid) == "T"
    parent.kill()
    parent.wait()
    end_s = time.monotonic() + 10
    while state(pid) not in ("", "Z") and time.monotonic() < end_s:
        time.sleep(0.01)
    assert state(pid) in ("", "Z")


def test_files_of_the_current_folder_do_not_stand_in_for_libraries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "statistics.py").write_text("raise OSError('the wrong one')")
    monkeypatch.chdir(tmp_path)
    with WorkerProcess("a module", __import__, "statistics") as worker:
        assert worker.ask("median", [1, 2, 9]) == 2
