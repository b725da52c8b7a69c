"""Whether parked processes disturb the one that runs: the words, and one real check."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
from tests.support.bench_samples import comparison

from torchweld.bench.parked_check import ParkedCheck, check_parking
from torchweld.timing import Comparison


def compared(speedup: float, width: float = 1.01) -> Comparison:
    return replace(comparison(speedup), interval=(speedup / width, speedup * width))


@pytest.mark.parametrize(
    ("beside", "said"),
    [
        (compared(1.0), "1.000 of its time alone (0.990 to 1.010), equal"),
        (compared(1.1), "NOT EQUAL: do not trust the cells it took part in"),
        (compared(1.04, width=1.05), "equal as far as can be told"),
        (comparison(verdict="not measured"), "not measured: because we say so"),
    ],
)
def test_equal_is_told_from_not_equal(beside: Comparison, said: str) -> None:
    check = ParkedCheck(beside={"peer": beside}, cpu_ms={"peer": (70.0, 0.0)})
    cpu, equal = check.sentences()
    assert cpu.endswith("70.0 ms of processor time if left to run, 0.0 ms parked")
    assert equal.startswith("eager right after peer: ")
    assert equal.endswith(said)


@pytest.mark.skipif(sys.platform == "win32", reason="processes are parked by POSIX signals")
def test_parked_processes_use_no_processor_time() -> None:
    found = check_parking(["eager", "reference"], threads=1, seconds=0.05, seed=0)
    assert list(found.beside) == ["reference"]
    if sys.platform == "linux":
        assert set(found.cpu_ms) == {"eager", "reference"}
        assert all(parked_ms == 0.0 for _, parked_ms in found.cpu_ms.values())
