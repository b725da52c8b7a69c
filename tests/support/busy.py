"""A load that tests make themselves, so that they mean the same on quiet and busy machines."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def busy_cores(count: int = 1) -> Iterator[None]:
    """Inside, `count` other processes compute all the time, each on a core's worth of it."""
    burning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in burning:
            process.kill()
            process.wait()
