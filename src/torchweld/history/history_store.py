"""The SQLite file: runs, and cells of runs. `History` reads and begins, `RunWriter` writes one run.

Every write is a transaction of its own with a rollback journal, synchronised to disk: after a crash
the file holds all that was added, and it is one file, to be copied or cached as it is. Writers wait
for each other. `user_version` is the version of the tables, `application_id` says that it is ours.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from types import TracebackType
from typing import Any, get_args

from torchweld.core.errors import TorchweldError
from torchweld.core.files import parse_json
from torchweld.core.records import from_plain, json_text
from torchweld.core.typed_names import known
from torchweld.history.history_places import FOLDER, history_path
from torchweld.history.kept_runs import Damaged, Kind, Run, RunCell, RunRow, fingerprint_here
from torchweld.history.sqlite_problems import explained

APPLICATION = int.from_bytes(b"twld", "big")
VERSION = 1
# How long a writer waits for another one, which locks the file for milliseconds.
WAIT_S = 20.0

TABLES = """
CREATE TABLE run (
    id INTEGER PRIMARY KEY AUTOINCREMENT,  -- never reused: another process may still write to it
    name TEXT NOT NULL,
    kind TEXT NOT NULL,
    what TEXT NOT NULL,
    created TEXT NOT NULL,
    fingerprint TEXT NOT NULL,
    settings TEXT NOT NULL,
    summary TEXT,
    finished INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX run_by_name ON run (name);
CREATE TABLE cell (
    run INTEGER NOT NULL REFERENCES run (id) ON DELETE CASCADE,
    number INTEGER NOT NULL,
    cell TEXT NOT NULL,
    data TEXT NOT NULL,
    samples TEXT NOT NULL,
    PRIMARY KEY (run, number)
);
"""
RUN_COLUMNS = "id, name, kind, what, created, fingerprint, settings, summary, finished"

# A run's name has no spaces, and nothing that means something in a shell or in `main~1`.
NAME = re.compile(r"[\w.+@][\w.+@/-]{0,99}")


def check_name(name: str) -> str:
    """A name that can be typed again; letters, digits and . _ + @ / -"""
    if NAME.fullmatch(name) is None:
        raise TorchweldError(
            f"{name!r} cannot be the name of a run; use up to 100 letters, digits and . _ + @ / - "
            "without spaces, as in main or before-the-change"
        )
    return name


class History:
    """An open history; use it as a context manager."""

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self.path = path
        self._connection = connection

    @staticmethod
    def open(path: Path | None = None, *, create: bool = False) -> History:
        """The history at `history_path(path)`, checked. Made if it is not there, with `create`."""
        where = history_path(path)
        if where.is_dir():
            raise TorchweldError(f"{where} is a folder; give the name of a file in it")
        if not where.exists():
            if not create:
                raise TorchweldError(
                    f"there is no history at {where}: nothing was kept yet; --save NAME keeps a "
                    "run, and --history FILE or TORCHWELD_HISTORY names another file"
                )
            _make_folder(where.parent)
        mode = "rwc" if create else "rw"
        with explained(where):
            connection = sqlite3.connect(
                f"{where.resolve().as_uri()}?mode={mode}",
                uri=True,
                timeout=WAIT_S,
                isolation_level=None,
            )
        connection.text_factory = lambda data: data.decode("utf-8", "replace")
        try:
            with explained(where):
                _prepare(connection, where)
        except BaseException:
            connection.close()
            raise
        return History(where, connection)

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> History:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def begin(self, name: str, kind: Kind, what: str, settings: Mapping[str, Any]) -> RunWriter:
        """A new run, unfinished. `what` is the target or the grid in words."""
        check_name(name)
        known(kind, get_args(Kind), "kind of run")
        values = (
            name,
            kind,
            what,
            datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
            json_text(fingerprint_here()),
            json_text(settings, "settings"),
        )
        with self._writing() as connection:
            made = connection.execute(
                "INSERT INTO run (name, kind, what, created, fingerprint, settings) "
                "VALUES (?, ?, ?, ?, ?, ?)",
                values,
            )
        assert made.lastrowid is not None
        return RunWriter(self, made.lastrowid, name)

    def runs(self, name: str | None = None, kind: Kind | None = None) -> list[Run]:
        """The runs of a name and a kind, or all, the newest first; raises if one is damaged."""
        found = self.entries(name, kind)
        for one in found:
            if isinstance(one, Damaged):
                raise self.damaged(one)
        return [one for one in found if isinstance(one, Run)]

    def entries(self, name: str | None = None, kind: Kind | None = None) -> list[Run | Damaged]:
        """The same, including damaged ones."""
        wanted = {"name": name, "kind": kind}
        given = {key: value for key, value in wanted.items() if value is not None}
        clause = " AND ".join(f"{key} = :{key}" for key in given)
        with explained(self.path):
            rows = self._connection.execute(
                f"SELECT {RUN_COLUMNS} FROM run {'WHERE ' + clause if clause else ''} "
                "ORDER BY id DESC",
                given,
            ).fetchall()
        return [self._entry(row) for row in rows]

    def latest(self, name: str, kind: Kind | None = None, what: str | None = None) -> Run | None:
        """The newest run that was finished."""
        found = (run for run in self.runs(name, kind) if run.finished)
        return next((run for run in found if what is None or run.what == what), None)

    def forget(self, name: str) -> int:
        """Deletes all runs of a name; how many there were."""
        with self._writing() as connection:
            return connection.execute("DELETE FROM run WHERE name = ?", (name,)).rowcount

    def _entry(self, row: Sequence[Any]) -> Run | Damaged:
        values = dict(zip(RUN_COLUMNS.split(", "), row, strict=True))
        try:
            for column in ("fingerprint", "settings", "summary"):
                if values[column] is not None:
                    values[column] = parse_json(values[column])
            found = from_plain(RunRow, values, "run")
        except TorchweldError as error:
            return Damaged(
                id=values["id"],
                name=str(values["name"]),
                finished=bool(values["finished"]),
                problem=str(error),
            )
        return Run(
            id=found.id,
            name=found.name,
            kind=found.kind,
            what=found.what,
            created=found.created,
            fingerprint=found.fingerprint,
            settings=found.settings,
            summary=found.summary,
            finished=bool(found.finished),
            read=lambda: self._cells(found.id, found.name),
        )

    def _cells(self, number: int, name: str) -> tuple[RunCell, ...]:
        with explained(self.path):
            rows = self._connection.execute(
                "SELECT cell, data, samples FROM cell WHERE run = ? ORDER BY number", (number,)
            ).fetchall()
        found: list[RunCell] = []
        try:
            for cell, data, samples in rows:
                values = {"cell": cell, "data": parse_json(data), "samples": parse_json(samples)}
                found.append(from_plain(RunCell, values, f"cell {len(found)}"))
        except TorchweldError as error:
            one = Damaged(id=number, name=name, finished=True, problem=str(error))
            raise self.damaged(one) from error
        return tuple(found)

    def damaged(self, one: Damaged) -> TorchweldError:
        """The error for a run that cannot be read."""
        return TorchweldError(
            f"run {one.id} of {one.name[:100]} in {self.path} is damaged: {one.problem}; "
            "torchweld history forget deletes all runs of a name"
        )

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """One transaction: all of it is on disk afterwards, or nothing."""
        with explained(self.path):
            # IMMEDIATE: a transaction that begins by reading can be refused when it writes.
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise


class RunWriter:
    """One run that is being written; what was added is kept, even if it is never finished."""

    def __init__(self, history: History, number: int, name: str) -> None:
        self._history, self._number, self.name = history, number, name

    def add(
        self,
        cell: str,
        data: Mapping[str, Any],
        samples: Mapping[str, Sequence[float]] | None = None,
    ) -> None:
        """One measured thing, on disk when this returns. `kept_samples.py` has the names."""
        series = {name: list(map(float, values)) for name, values in (samples or {}).items()}
        values = (self._number, cell, json_text(data, "data"), json_text(series, "samples"))
        with self._writing() as connection:
            connection.execute(
                "INSERT INTO cell (run, number, cell, data, samples) VALUES (?1, (SELECT "
                "COALESCE(MAX(number), -1) + 1 FROM cell WHERE run = ?1), ?2, ?3, ?4)",
                values,
            )

    def finish(self, summary: Mapping[str, Any] | None = None) -> None:
        """Marks the run as complete."""
        text = None if summary is None else json_text(summary, "summary")
        with self._writing() as connection:
            connection.execute(
                "UPDATE run SET finished = 1, summary = ? WHERE id = ?", (text, self._number)
            )

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        with self._history._writing() as connection:
            there = connection.execute("SELECT 1 FROM run WHERE id = ?", (self._number,))
            if there.fetchone() is None:
                raise TorchweldError(
                    f"the run {self.name!r} was forgotten while it was measured; measure it again"
                )
            yield connection


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Our own folder in the user's work tree: git should ignore it.
        if folder.name == FOLDER and not (folder / ".gitignore").exists():
            with (folder / ".gitignore").open("x") as file:
                file.write("*\n")
    except FileExistsError:  # made by another process meanwhile
        return
    except OSError as error:
        raise TorchweldError(
            f"the history cannot be made in {folder}: {error.strerror or error}; choose a folder "
            "that can be written, with --history FILE or TORCHWELD_HISTORY"
        ) from error


def _prepare(connection: sqlite3.Connection, path: Path) -> None:
    """Checks that the file is whole and ours; makes the tables in an empty one."""
    connection.execute("PRAGMA trusted_schema = OFF")  # no function runs because a file says so
    connection.execute("PRAGMA foreign_keys = ON")
    connection.execute("PRAGMA synchronous = FULL")
    (said,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    if said != "ok":
        raise sqlite3.DatabaseError(f"database disk image is malformed: {said}")
    if _is_empty(connection):
        connection.execute("BEGIN IMMEDIATE")
        if _is_empty(connection):  # no other process was faster
            for statement in filter(None, TABLES.split(";\n")):
                connection.execute(statement)
            connection.execute(f"PRAGMA application_id = {APPLICATION}")
            connection.execute(f"PRAGMA user_version = {VERSION}")
        connection.execute("COMMIT")
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if application != APPLICATION:
        raise TorchweldError(
            f"{path} is a database of another program; give another file with --history FILE"
        )
    if version < 1:
        raise TorchweldError(
            f"{path} is damaged: its tables have version {version}, which no torchweld wrote; give "
            "another file with --history FILE"
        )
    if version > VERSION:
        raise TorchweldError(
            f"{path} was written by a newer torchweld: its tables have version {version}, this one "
            f"reads up to {VERSION}; upgrade torchweld, or give another file with --history FILE"
        )


def _is_empty(connection: sqlite3.Connection) -> bool:
    return connection.execute("SELECT 1 FROM sqlite_master").fetchone() is None
