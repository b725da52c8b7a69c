"""`torchweld bench` without timing anything: comparisons are made up, and so are the peaks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from tests.benching.samples import PEAKS, FakeCompare

from torchweld.benching import timing
from torchweld.cli import bench as bench_verb
from torchweld.cli.main import run


@pytest.fixture
def known_peaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring them takes seconds, and is not what is tested here."""
    threads = torch.get_num_threads()
    peaks = replace(
        PEAKS,
        fma=tuple(replace(peak, threads=threads) for peak in PEAKS.fma),
        read=tuple(replace(peak, threads=threads) for peak in PEAKS.read),
    )
    monkeypatch.setattr(bench_verb, "machine_peaks", lambda dtypes: (peaks, ()))
    monkeypatch.setattr(bench_verb, "busy_cores", lambda: 0.0)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCompare:
    fake = FakeCompare(speedup=3.2)
    monkeypatch.setattr(timing, "compare", fake)
    return fake


@pytest.fixture
def bench(
    capsys: pytest.CaptureFixture[str], fake: FakeCompare, known_peaks: None
) -> Callable[..., tuple[int, str, str]]:
    """Runs the verb; gives exit code, stdout and stderr."""

    def call(*arguments: str) -> tuple[int, str, str]:
        code = run(["bench", *arguments])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return call
