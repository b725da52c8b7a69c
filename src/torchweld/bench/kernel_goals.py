"""Whether calls on a GPU launch what they should: counts of kernels, which no noise can change.

Eager launches a product for every weight and a kernel for every activation and gate, a compiled
block one kernel between two products. Our backends say what they launch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from torchweld.bench.bench_results import Bench, Cell, Result
from torchweld.bench.kernel_counts import KernelCost, kernel_words
from torchweld.bench.runtimes.runtime_names import RUNTIMES
from torchweld.core.not_measured import NotMeasured

KernelVerdictWord = Literal["as expected", "differs", "not measured"]


@dataclass(frozen=True, kw_only=True)
class KernelVerdict:
    """One side in one cell."""

    cell: str
    name: str
    verdict: KernelVerdictWord
    expected: dict[str, int]
    found: dict[str, int]
    why: str = ""

    def __str__(self) -> str:
        if self.verdict == "not measured":
            return f"kernels of {self.name} at {self.cell} are not measured: {self.why}"
        return (
            f"{self.name} at {self.cell} launches {kernel_words(self.found)}; expected "
            f"{kernel_words(self.expected)}"
        )


def kernel_verdicts(bench: Bench) -> list[KernelVerdict]:
    """Verdicts on every side whose kernels are known beforehand; none for a bench on the CPU."""
    if not bench.on_gpu:
        return []
    return [verdict for cell in bench.cells for verdict in _of_cell(cell)]


def _of_cell(cell: Cell) -> Iterator[KernelVerdict]:
    for result in cell.results:
        if cell.case is None or result.refused:
            continue
        expected = RUNTIMES[result.name]().expected_kernels(cell.case.mlp)
        if expected is not None:
            yield _verdict(cell, result, expected)


def _verdict(cell: Cell, result: Result, expected: dict[str, int]) -> KernelVerdict:
    found = result.cost.kernels
    counted = found.by_category if isinstance(found, KernelCost) else {}
    word: KernelVerdictWord = "as expected" if counted == expected else "differs"
    why = ""
    if not isinstance(found, KernelCost):
        word = "not measured"
        why = found.reason if isinstance(found, NotMeasured) else "nobody counted them"
    return KernelVerdict(
        cell=cell.name, name=result.name, verdict=word, expected=expected, found=counted, why=why
    )
