"""What training steps of a bench keep, the page faults they meet, and the peak of memory.

In: a `Bench`. Out: a table for a width, and the words below it.
"""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.text import Text

from torchweld.bench.bench_results import Bench, Cell, TrainingCost
from torchweld.bench.runtimes.runtime_names import TRAINED
from torchweld.bench.training_step import TrainingStep
from torchweld.core.not_measured import NotMeasured
from torchweld.core.number_text import size
from torchweld.core.safe_text import clean
from torchweld.report.bench_tables import Cells, fitted, shape_columns, shown, wider
from torchweld.report.text_style import heading

SAVED, OF_EAGER, FAULTS, PEAK = "saved", "of eager's", "faults per step", "peak MB"
SPARE = (PEAK, OF_EAGER)


def training_section(bench: Bench, width: int) -> Iterator[RenderableType]:
    """What a step keeps and touches; empty if no training step was counted."""
    if not bench.training or not any(r.training for cell in bench.cells for r in cell.results):
        return
    yield heading("what a step keeps and touches", "→".join(bench.names))
    table, spare = fitted(_columns(bench), SPARE, width)
    yield table
    yield Text(_legend(spare), style="dim")
    unknown = _unmeasured(bench)
    if unknown:
        yield Text(clean(unknown), style="yellow")


def _columns(bench: Bench) -> dict[str, Cells]:
    columns = shape_columns(bench.cells)
    names = bench.names
    columns[SAVED] = [_saved(cell.result("eager").training) for cell in bench.cells]
    columns[OF_EAGER] = [
        "→".join(shown(cell.saved_ratio(name)) for name in names[1:]) for cell in bench.cells
    ]
    columns[FAULTS] = [
        "→".join(_faults(cell.result(name).training) for name in names) for cell in bench.cells
    ]
    columns[PEAK] = [
        "→".join(_peak(cell.result(name).training) for name in names) for cell in bench.cells
    ]
    return columns


def _saved(cost: TrainingCost | None) -> str:
    if cost is None or isinstance(cost.saved_bytes, NotMeasured):
        return "–"
    return size(cost.saved_bytes)


def _faults(cost: TrainingCost | None) -> str:
    if cost is None or isinstance(cost.faults, NotMeasured):
        return "–"
    return f"{cost.faults:.0f}"


def _peak(cost: TrainingCost | None) -> str:
    if cost is None or isinstance(cost.peak_bytes, NotMeasured):
        return "–"
    return f"{cost.peak_bytes / 1e6:.0f}"


def _legend(spare: list[str]) -> str:
    text = (
        "saved: what eager keeps for the backward, parameters aside; of eager's: what the others "
        "keep. faults: fresh pages of memory."
    )
    if PEAK not in spare:
        text += " peak: of the side's process, with all of its libraries."
    return text + wider(spare)


def _unmeasured(bench: Bench) -> str:
    costs = [result.training for cell in bench.cells for result in cell.results]
    for what in ("faults", "peak_bytes", "saved_bytes"):
        for cost in costs:
            found = getattr(cost, what, None)
            if isinstance(found, NotMeasured):
                return f"{what.replace('_', ' ')} were not measured: {found.reason}"
    return ""


def step_words(bench: Bench) -> str:
    """What a step is, and what marks in the tables mean, of all that occur."""
    steps = [_step(cell) for cell in bench.cells]
    told = ["A step is forward and backward, gradients being None before it."]
    marks = {
        "acc: gradients exist, and are added to": any(step.accumulate for step in steps),
        "amp: by autocast": any(step.autocast for step in steps),
        "adamw, sgd: with this optimizer": any(step.optimizer for step in steps),
        "tuned: malloc keeps freed memory": any(step.malloc == "tuned" for step in steps),
    }
    said = [mark for mark, there in marks.items() if there]
    told += [f"{'; '.join(said)}."] if said else []
    if any(cell.case is not None for cell in bench.cells):
        told += [f"{_sides(bench)}."]
    return " ".join(told)


def _step(cell: Cell) -> TrainingStep:
    if cell.model is not None:
        return cell.model.step
    return (cell.case.training if cell.case is not None else None) or TrainingStep()


def _sides(bench: Bench) -> str:
    keeps = {
        False: "keeps the input and hidden values (recompute=False)",
        True: "the input alone",
        None: "what FusedMLP chooses",
    }
    said = [f"{name} {keeps[TRAINED[name]]}" for name in bench.backends if name in TRAINED]
    return ", ".join(said)
