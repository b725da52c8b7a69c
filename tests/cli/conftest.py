"""`torchweld bench` without timing anything: comparisons are made up, and so are the peaks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from tests.support.bench_samples import PEAKS, FakeCompare

from torchweld.bench import stage_timing
from torchweld.cli import bench_command as bench_verb
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
    monkeypatch.setattr(stage_timing, "compare", fake)
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
