"""SQLite's errors as errors that a user can act on."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torchweld.core.errors import TorchweldError

ELSEWHERE = "name another file with --history FILE or TORCHWELD_HISTORY"
# Part of the message -> what it means, and the remedy. Codes would say more, but Python has them
# only from 3.11 on. The messages are part of SQLite's documentation.
MEANINGS = {
    "not a database": f"it is not an SQLite file; {ELSEWHERE}",
    "malformed": f"it is damaged; move it away to begin a new one, or {ELSEWHERE}",
    "locked": "another process holds a lock on it; end that process, or try again later",
    "readonly": f"it, or its folder, cannot be written; {ELSEWHERE}",
    "unable to open": f"it, or its folder, cannot be written or read; {ELSEWHERE}",
    "no such": f"its tables are not those of a history; {ELSEWHERE}",
    "full": f"the disk is full, and nothing of this was written; free some space, or {ELSEWHERE}",
    "disk I/O": f"the disk failed to read or write it; {ELSEWHERE}",
}


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Inside, what SQLite raises becomes a TorchweldError with the remedy."""
    try:
        yield
    except sqlite3.Error as error:
        said = str(error)
        meant = next((text for key, text in MEANINGS.items() if key in said), ELSEWHERE)
        raise TorchweldError(f"the history {path} cannot be used ({said}): {meant}") from error
    except UnicodeDecodeError as error:  # a message of SQLite that quotes what is damaged
        raise TorchweldError(
            f"the history {path} cannot be used: {MEANINGS['malformed']}"
        ) from error
