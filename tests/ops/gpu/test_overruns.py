"""No kernel reads or writes beyond its tensors: each lies between pages that nobody may touch.

An overrun kills the process, so all of it runs in processes of their own
(tests/support/guarded_runs.py).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
from tests.support.guard_pages import End
from tests.support.guarded_runs import HARMLESS, OVERRUNS, SIZES, SPECS

from torchweld.ops.gpu.gpu_ways import WAYS

ROOT = Path(__file__).parents[3]


def guarded_runs(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-X", "faulthandler", "-m", "tests.support.guarded_runs", *arguments],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("way", WAYS)
def test_no_way_touches_what_is_not_its_own(way: str) -> None:
    """Forward and backward, over sizes that tiles do not divide, at either end of each tensor."""
    done = guarded_runs(way)
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-3000:]
    *ran, last = done.stdout.splitlines()
    assert last == "no overrun"
    assert len(ran) == len(get_args(End)) * len(SPECS) * len(SIZES)


def test_an_overrun_of_one_value_is_seen() -> None:
    """Each kernel is told of one row or column too many, in turn."""
    done = guarded_runs("overruns")
    assert done.returncode == 0, done.stdout + done.stderr
    ended = [line.rsplit(": ", 1) for line in done.stdout.splitlines()]
    assert [how for _, how in ended[: len(HARMLESS)]] == ["0"] * len(HARMLESS)
    assert ended[len(HARMLESS) :] == [[name, "SIGSEGV"] for name, _ in OVERRUNS]
