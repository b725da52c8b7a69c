"""A run by the name that a person types: `main`, or `main~1` for the one before."""

from __future__ import annotations

import re

from torchweld.core.errors import TorchweldError
from torchweld.core.number_text import counted
from torchweld.core.typed_names import known
from torchweld.history.history_store import History
from torchweld.history.kept_runs import Damaged, Run

REFERENCE = re.compile(r"([^~]+)(?:~(\d+))?")


def find_run(history: History, reference: str) -> Run:
    """The newest run of a name, or that many before it; finished or not."""
    match = REFERENCE.fullmatch(reference)
    if match is None or len(match[2] or "") > 9:
        raise TorchweldError(
            f"{reference!r} names no run; give a name, or name~1 for the run before the newest"
        )
    name, back = match[1], int(match[2] or 0)
    runs = entries_of(history, name)
    if back >= len(runs):
        raise TorchweldError(
            f"there is no {reference}: {counted(len(runs), 'run')} of that name, the oldest is "
            f"{reference_of(name, len(runs) - 1)}"
        )
    found = runs[back]
    if isinstance(found, Damaged):
        raise history.damaged(found)
    return found


def entries_of(history: History, name: str) -> list[Run | Damaged]:
    """All runs of a name, the newest first; an unknown name is an error with the nearest one."""
    there = history.entries()
    if not there:
        raise TorchweldError(f"the history {history.path} is empty; --save NAME keeps a run")
    known(name, sorted({run.name for run in there}), "run")
    return [run for run in there if run.name == name]


def reference_of(name: str, back: int) -> str:
    return name if back == 0 else f"{name}~{back}"
