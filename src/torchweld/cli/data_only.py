"""`--json`: standard output has the data and nothing else."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout


@contextmanager
def data_only(wanted: bool) -> Iterator[None]:
    """Inside, what a model prints goes to standard error, if `wanted`: a reader would choke on it.

    Only what Python prints: a library that writes to the file itself is not stopped.
    """
    if not wanted:
        yield
        return
    with redirect_stdout(sys.stderr):
        yield
