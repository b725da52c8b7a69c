"""A history that somebody has changed: each run that makes no sense is named, the others shown."""

from __future__ import annotations

import json
import random
import sqlite3
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.bench_samples import comparison
from tests.support.mutations import Mutation, mutations, spoil

from torchweld.cli.main import run
from torchweld.core.errors import TorchweldError
from torchweld.gates.gate_baseline import Baseline, load_baseline, save_baseline
from torchweld.gates.gate_timing import KeptTime
from torchweld.gates.step_counters import Counters
from torchweld.history import History, of_comparison
from torchweld.plans.plan import Plan
from torchweld.report.gate_text import accepted_data, accepted_lines
from torchweld.report.text_style import to_text

DATA = Path(__file__).parent.parent / "data"
EVERY_DAY = 3  # spoilt texts of each column

ODD = [None, 7, -1, 2**62, 1.5, b"\xff\xfe\x00", "", "x", "a\x1b[2Jb\n\u202e", "[" * 5000, "NaN"]
RUN = ["name", "kind", "what", "created", "fingerprint", "settings", "summary", "finished"]
CELL = ["cell", "data", "samples", "number"]
Captured = pytest.CaptureFixture[str]


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A history with two benches of one name, one of another, and a baseline."""
    path = tmp_path / "history.sqlite"
    monkeypatch.setenv("TORCHWELD_HISTORY", str(path))
    with History.open(path, create=True) as history:
        for name in ("main", "main", "other"):
            recording = history.begin(name, "bench", "a grid", {"rows": [1, 8], "seconds": 3.0})
            recording.add("a cell", *of_comparison(comparison()))
            recording.add("times", {"fused": {"speedup": 2.0}}, {"eager_us": [1.0, 2.0]})
            recording.finish({"cells": 2})
        kept = KeptTime(workload="x", comparisons=(comparison(), comparison()))
        counters = Counters(own={"": {"ops": 3}, "mlp": {"ops": 2}}, welded=("mlp",))
        made = Baseline(plan=Plan.load(DATA / "plan_0_1.json"), counters=counters, times=(kept,))
        save_baseline(history, "gate", "model", made, {"target": "model"})
    return path


def tamper(path: Path, statement: str, *values: Any) -> None:
    raw = sqlite3.connect(path)
    raw.execute("PRAGMA ignore_check_constraints = ON")
    try:
        raw.execute(statement, values)
        raw.commit()
    finally:
        raw.close()


def shown(text: str) -> None:
    odd = [c for c in text if c != "\n" and unicodedata.category(c) in ("Cc", "Cf", "Cs")]
    assert not odd, odd


def everything(path: Path, capsys: Captured) -> None:
    """All that reads a history; what it raises is an error of ours."""
    commands = (
        ["history"],
        ["history", "list", "main"],
        ["history", "show", "main"],
        ["history", "show", "main~1"],
        ["history", "show", "other"],
        ["history", "compare", "main~1", "main"],
        ["history", "compare", "other", "main"],
    )
    for command in commands:
        for more in ([], ["--json"]):
            code = run([*command, *more])
            out, err = capsys.readouterr()
            assert code in (0, 2)
            shown(out)
            shown(err)
            if more and code == 0:
                json.loads(out)
    try:
        with History.open(path) as history:
            found = load_baseline(history, "gate", "model", "torchweld gate")
            shown(to_text(accepted_lines("gate", "model", found, "")))
            accepted_data("gate", "model", found)
    except TorchweldError as error:
        shown(str(error))


def attempt(
    path: Path, capsys: Captured, statement: str, column: str, value: Any, good: bytes
) -> str:
    path.write_bytes(good)
    try:
        tamper(path, statement, value)
    except (sqlite3.Error, OverflowError):  # SQLite itself does not have it
        return ""
    try:
        everything(path, capsys)
    except Exception as error:
        return f"{column} = {str(value)[:80]!r}: {type(error).__name__}: {error}"
    return ""


def spoilt_texts(path: Path, statement: str, count: int | None) -> list[str]:
    """The JSON in a column, spoilt; what is no JSON gives nothing."""
    raw = sqlite3.connect(path)
    (text,) = raw.execute(statement).fetchone()
    raw.close()
    try:
        document = json.loads(text)
    except (TypeError, ValueError):
        return []
    if not isinstance(document, (dict, list)):
        return []
    chosen: list[Mutation] = mutations(document)
    if count is not None:
        chosen = random.Random(1).sample(chosen, min(count, len(chosen)))
    return [spoil(document, one) for one in chosen]


PLACES = [
    *(("run", column, f"WHERE id = {number}") for column in RUN for number in (2, 4)),
    *(("cell", column, f"WHERE run = {number}") for column in CELL for number in (2, 4)),
    *(("cell", column, "WHERE run = 4 AND cell LIKE 'time%'") for column in ("data", "samples")),
]


def check(path: Path, capsys: Captured, place: tuple[str, str, str], count: int | None) -> None:
    table, column, where = place
    good = path.read_bytes()
    statement = f"UPDATE {table} SET {column} = ? {where}"
    values = [*ODD, *spoilt_texts(path, f"SELECT {column} FROM {table} {where}", count)]
    found = [attempt(path, capsys, statement, column, value, good) for value in values]
    assert not [text for text in found if text]


@pytest.mark.parametrize("place", PLACES, ids=" ".join)
def test_a_tampered_column_is_one_clear_error_or_none(
    path: Path, capsys: Captured, place: tuple[str, str, str]
) -> None:
    check(path, capsys, place, EVERY_DAY)


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES, ids=" ".join)
def test_every_tampered_column_in_every_way(
    path: Path, capsys: Captured, place: tuple[str, str, str]
) -> None:
    check(path, capsys, place, 3000)


def test_one_bad_run_is_named_and_the_others_are_shown(path: Path, capsys: Captured) -> None:
    tamper(path, "UPDATE run SET fingerprint = '{}' WHERE id = 2")
    assert run(["history"]) == 0
    out, _ = capsys.readouterr()
    assert "run 2 of main is damaged: run.fingerprint lacks key" in out
    assert "main~1" in out
    assert "other" in out
    assert run(["history", "show", "main"]) == 2
    _, err = capsys.readouterr()
    assert "run 2 of main" in err
    assert "damaged" in err
    assert run(["history", "show", "main~1"]) == 0
    assert run(["history", "show", "other"]) == 0
    assert run(["history", "forget", "main"]) == 0
    assert run(["history", "list", "--json"]) == 0


def test_a_damaged_baseline_is_no_reason_to_take_an_older_one(path: Path) -> None:
    with History.open(path) as history:
        found = load_baseline(history, "gate", "model", "this")
        save_baseline(history, "gate", "model", found, {})
    tamper(path, "UPDATE run SET settings = '[]' WHERE id = 5")
    with (
        History.open(path) as history,
        pytest.raises(TorchweldError, match=r"run 5 of gate .* is damaged.*this makes it"),
    ):
        load_baseline(history, "gate", "model", "this")


SCHEMAS: dict[str, Callable[[sqlite3.Connection], object]] = {
    "no cells": lambda raw: raw.execute("DROP TABLE cell"),
    "no runs": lambda raw: raw.execute("DROP TABLE run"),
    "a column less": lambda raw: raw.execute("ALTER TABLE run RENAME COLUMN what TO why"),
    "version 0": lambda raw: raw.execute("PRAGMA user_version = 0"),
    "version -1": lambda raw: raw.execute("PRAGMA user_version = -1"),
    "version 99": lambda raw: raw.execute("PRAGMA user_version = 99"),
    "another program": lambda raw: raw.execute("PRAGMA application_id = 1"),
    "a view": lambda raw: raw.executescript(
        "DROP TABLE run; CREATE VIEW run AS SELECT load_extension('x') AS id"
    ),
}


@pytest.mark.parametrize("change", SCHEMAS)
def test_other_tables_are_one_clear_error(path: Path, capsys: Captured, change: str) -> None:
    raw = sqlite3.connect(path)
    SCHEMAS[change](raw)
    raw.commit()
    raw.close()
    assert run(["history", "show", "main"]) == 2
    _, err = capsys.readouterr()
    assert err.startswith("torchweld: ")
    assert str(path) in err
    everything(path, capsys)


def test_a_file_with_flipped_or_missing_bytes_is_one_clear_error_or_none(
    path: Path, capsys: Captured
) -> None:
    good, draw = path.read_bytes(), random.Random(0)
    for _ in range(25):
        data = bytearray(good)
        for _ in range(draw.choice((1, 5, 200))):
            data[draw.randrange(len(data))] = draw.randrange(256)
        path.write_bytes(data)
        everything(path, capsys)
    for size in (0, 10, 99, 100, 1000, 4096, 5000, len(good) // 2, len(good) - 1):
        path.write_bytes(good[:size])
        everything(path, capsys)
