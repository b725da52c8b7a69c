"""Measured runs, kept in a local SQLite file and found again by name.

`History.open(create=True)`, `begin`, `add` after every cell, `finish`; later `runs` and `latest`.
What was added is on disk when `add` returns, whatever happens to the process afterwards.
"""

from torchweld.history.history_places import history_path
from torchweld.history.history_store import History, RunWriter
from torchweld.history.kept_runs import Kind, Run, RunCell, fingerprint_here, target_words
from torchweld.history.kept_samples import of_comparison
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
