"""`--json`: standard output has the data and nothing else."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout


@contextmanager
def data_only(wanted: bool) -> Iterator[None]:
    """Inside, if `wanted`, what a model prints goes to standard error: the JSON stays valid.

    This holds for what Python prints, not for a library that writes to the file directly.
    """
    if not wanted:
        yield
        return
    with redirect_stdout(sys.stderr):
        yield
