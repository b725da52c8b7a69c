"""What `torchweld profile FILE` takes for a recording, and what it says about everything else."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from tests.support.block_profiles import blocks, on_device
from tests.support.made_profiles import make_peaks
from tests.support.measured import measured

import torchweld as tw
from torchweld.cli.main import run
from torchweld.cli.recorded_files import load_recorded, recorded_file
from torchweld.core.errors import TorchweldError
from torchweld.machine import hardware, measured_peaks
from torchweld.profiles.profile import Profile
from torchweld.report import chrome_trace

Captured = pytest.CaptureFixture[str]


def trace_text(own: bool = False) -> str:
    """A trace of a CPU; `own`: with what torchweld says of the machine."""
    data = chrome_trace(blocks())
    if not own:
        del data["torchweld_machine"]
    return json.dumps(data)


# ---- told by content ----


@pytest.mark.parametrize("name", ["trace.json", "trace.txt", "trace", "trace.json.old", "a.b.c"])
@pytest.mark.parametrize("zipped", [False, True])
def test_a_recording_is_told_by_what_it_holds(tmp_path: Path, name: str, zipped: bool) -> None:
    path = tmp_path / name
    data = trace_text().encode()
    path.write_bytes(gzip.compress(data, mtime=0) if zipped else data)
    assert recorded_file(str(path)) == path
    assert load_recorded(path).about.source == "trace"
    saved = blocks()
    saved.save(tmp_path / "saved.json")
    path.write_bytes((tmp_path / "saved.json").read_bytes())
    assert load_recorded(path) == saved


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"hello, this is a text\nof two lines", "begins with 'hello, this is a tex'"),
        (b"", "is empty"),
        (b"  \n\n", "is empty"),
        (b"\x80\x02}q\x00X\x01\x00", "binary content"),
        ("Größe: 3".encode("latin-1"), "binary content"),
        ("Größe: 3".encode(), "begins with 'Größe: 3'"),
        (gzip.compress(b"a text", mtime=0), "a compressed file that begins with 'a text'"),
        (gzip.compress(b"\x00\x01\x02", mtime=0), "a compressed file with binary content"),
        (gzip.compress(b"{}" * 9, mtime=0)[:9], "cannot be read"),
    ],
)
@pytest.mark.parametrize("name", ["notes.txt", "notes", "notes.json"])
def test_any_other_file_is_named_for_what_it_is(
    tmp_path: Path, capsys: Captured, name: str, content: bytes, says: str
) -> None:
    (tmp_path / name).write_bytes(content)
    assert run(["profile", str(tmp_path / name)]) == 2
    error = capsys.readouterr().err
    assert says in error
    for form in (".json.gz", "path/to/file.py:factory", "hf:<model type>", "built-in model", "gpt"):
        assert form in error


def test_a_directory_is_said_to_be_one(tmp_path: Path, capsys: Captured) -> None:
    assert run(["profile", str(tmp_path)]) == 2
    assert "is a folder" in capsys.readouterr().err
    (tmp_path / "host.pt.trace.json.gz").touch()
    assert run(["profile", str(tmp_path)]) == 2
    assert "is a directory; give one trace in it, such as" in capsys.readouterr().err
    (tmp_path / "a.json").mkdir()
    assert run(["profile", str(tmp_path / "a.json")]) == 2
    assert "is a directory" in capsys.readouterr().err


def test_a_file_that_is_not_there_is_said_to_be_missing(tmp_path: Path, capsys: Captured) -> None:
    assert run(["profile", str(tmp_path / "nothing.txt")]) == 2
    assert "there is no file" in capsys.readouterr().err


@pytest.mark.parametrize("target", [None, "gpt", "hf:gpt2", "pack.age:make", "my/model.py:make"])
def test_models_are_no_files(
    target: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt").write_text("a file of the same name")
    assert recorded_file(target) is None


# ---- as recorded here ----


@pytest.fixture
def measured_here(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = hardware.hardware().threads
    made = make_peaks(gflops=1000.0, gbps=100.0, threads=threads)
    monkeypatch.setattr(measured_peaks, "peaks", lambda measure=False: made)
    monkeypatch.setattr(measured_peaks, "holds", lambda kept: True)


@pytest.mark.usefixtures("measured_here")
def test_a_trace_is_priced_as_this_machine_if_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(trace_text())
    elsewhere, here = tw.read_trace(path), tw.read_trace(path, this_machine=True)
    assert elsewhere.peaks is None
    assert here.peaks is not None
    assert here.op_cost_us > 0
    assert any("priced as if recorded on this machine" in notice for notice in here.notices)
    before, after = tw.account(elsewhere), tw.account(here)
    assert measured(before.step).useful_us == 0.0
    assert measured(after.step).useful_us > 0.0
    assert any("--this-machine" in notice for notice in before.notices)
    assert not any("--this-machine" in notice for notice in after.notices)


@pytest.mark.usefixtures("measured_here")
def test_the_option_does_the_same(tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "trace.json"
    path.write_text(trace_text())
    assert run(["profile", str(path), "--this-machine"]) == 0
    out = capsys.readouterr().out
    assert "arithmetic and necessary traffic" in " ".join(out.split())
    assert "priced as if recorded on this machine" in " ".join(out.split())


@pytest.mark.usefixtures("measured_here")
def test_what_is_no_trace_of_this_machine_is_refused(tmp_path: Path, capsys: Captured) -> None:
    saved = tmp_path / "saved.json"
    blocks().save(saved)
    assert run(["profile", str(saved), "--this-machine"]) == 2
    assert "is a saved profile" in capsys.readouterr().err
    assert run(["profile", "gpt", "--this-machine"]) == 2
    assert "--this-machine goes with a trace" in capsys.readouterr().err
    own = tmp_path / "own.json"
    own.write_text(trace_text(own=True))
    with pytest.raises(TorchweldError, match="recorded on Example CPU"):
        tw.read_trace(own, this_machine=True)
    gpu = tmp_path / "gpu.json"
    data = chrome_trace(on_device(blocks(2, live=False)))
    del data["torchweld_machine"]
    gpu.write_text(json.dumps(data))
    with pytest.raises(TorchweldError, match="kernels of a device"):
        tw.read_trace(gpu, this_machine=True)
    assert isinstance(tw.read_trace(gpu), Profile)
