"""Measured runs, kept in a local SQLite file and found again by name.

`History.open(create=True)`, `begin`, `add` after every cell, `finish`; later `runs` and `latest`.
What was added is on disk when `add` returns, whatever happens to the process afterwards.
"""

from torchweld.history.places import history_path
from torchweld.history.runs import Kind, Run, RunCell, fingerprint_here, target_words
from torchweld.history.samples import of_comparison
from torchweld.history.store import History, RunWriter
from torchweld.machine.fingerprint import Fingerprint

__all__ = [
    "Fingerprint",
    "History",
    "Kind",
    "Run",
    "RunCell",
    "RunWriter",
    "fingerprint_here",
    "history_path",
    "of_comparison",
    "target_words",
]
