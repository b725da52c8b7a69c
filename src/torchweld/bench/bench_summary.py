"""The summary of a bench: means, the worst cell, and where fused wins, loses, or is not judged."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from torchweld.bench.bench_cases import SHORT_DTYPES, MlpShape
from torchweld.bench.bench_results import Bench, Cell, Result, largest_of
from torchweld.bench.relative_speeds import geometric_mean
from torchweld.core.not_measured import NotMeasured

Outcome = Literal["wins", "loses", "same", "unknown"]
# If the seconds did not suffice, try this many times as many first.
MORE = 4
OUTCOMES: dict[str, Outcome] = {"faster": "wins", "slower": "loses", "same": "same"}


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The first backend over all cells. Means are geometric, of the cells that were measured.

    `failed` (of any backend of ours) and `unmeasured` say which and why; `refused` has peers that
    were not timed: "onnxruntime: float32 only" and the cells where that was so. `verdicts` counts
    those on anybody; `remedy` is the option that may give some where rounds did not suffice.
    """

    backend: str
    cells: int
    measured: int
    verdicts: int
    remedy: str | None
    failed: tuple[str, ...]
    unmeasured: tuple[str, ...]
    refused: dict[str, tuple[str, ...]]
    mean: float | NotMeasured
    means: dict[str, float]  # by dtype
    worst: tuple[str, float] | NotMeasured
    largest_error_ratio: float | NotMeasured
    largest_share_of_limit: float | NotMeasured  # 1 is all that the numerical rule allows
    weight_bytes: int
    copied_bytes: int
    training: bool = False


def summarise(bench: Bench) -> Summary:
    first = [(cell, cell.result(bench.first)) for cell in bench.cells]
    speeds = [
        (cell, result.comparison.speed) for cell, result in first if result.comparison is not None
    ]
    speedups = [
        (cell, speed.speedup) for cell, speed in speeds if not isinstance(speed, NotMeasured)
    ]
    # Cells of one block and dtype share its weights, and all of a model do.
    memory = {
        (cell.case and (cell.case.mlp, cell.case.blocks), cell.dtype): (
            cell.weight_bytes,
            result.copied_bytes,
        )
        for cell, result in first
    }
    checks = [result.check for _, result in first if result.check is not None]
    dtypes = dict.fromkeys(_short(cell.dtype) for cell, _ in speedups)
    worst = min(speedups, key=lambda pair: pair[1], default=None)
    unmeasured = [(cell, result) for cell, result in first if _unmeasured(result)]
    why = "no cell was measured"
    return Summary(
        backend=bench.first,
        cells=len(first),
        measured=len(speedups),
        verdicts=sum(result.measured for cell in bench.cells for result in cell.results),
        remedy=_remedy(bench, [result for _, result in unmeasured]),
        failed=tuple(_failures(bench)),
        unmeasured=tuple(f"{cell.name}: {result.why_not}" for cell, result in unmeasured),
        refused=_refusals(bench),
        mean=geometric_mean(ratio for _, ratio in speedups) if speedups else NotMeasured(why),
        means={
            d: geometric_mean(r for cell, r in speedups if _short(cell.dtype) == d) for d in dtypes
        },
        worst=NotMeasured(why) if worst is None else (worst[0].name, worst[1]),
        largest_error_ratio=largest_of([check.error_ratio for check in checks]),
        largest_share_of_limit=largest_of(
            [ratio for check in checks for ratio in (check.row_ratio, check.rms_ratio)]
        ),
        weight_bytes=sum(own for own, _ in memory.values()),
        copied_bytes=sum(copied for _, copied in memory.values()),
        training=bench.training,
    )


def _short(dtype: str) -> str:
    return SHORT_DTYPES.get(dtype, dtype)


def _failures(bench: Bench) -> Iterator[str]:
    """Wrong outputs of our backends. A peer with wrong outputs is left out, and is no failure."""
    for cell in bench.cells:
        for result in cell.results:
            check = result.check
            if result.name in bench.backends and check is not None and not check.ok:
                yield f"{cell.name}, {result.name}: {check.reason}"


def _refusals(bench: Bench) -> dict[str, tuple[str, ...]]:
    """Who was left out and why -> the cells; sides with the same reason together."""
    found: dict[str, list[str]] = {}
    for cell in bench.cells:
        names: dict[str, list[str]] = {}
        for result in cell.results:
            if result.refused and (result.name not in bench.backends or result.check is None):
                names.setdefault(result.refused, []).append(result.name)
        for reason, sides in names.items():
            found.setdefault(f"{', '.join(sides)}: {reason}", []).append(cell.name)
    return {reason: tuple(cells) for reason, cells in found.items()}


def _unmeasured(result: Result) -> bool:
    return not result.measured and (result.check is None or result.check.ok)


def _remedy(bench: Bench, unmeasured: Sequence[Result]) -> str | None:
    """What to add to the command if rounds were timed but gave no verdict."""
    compared = [result.comparison for result in unmeasured if result.comparison is not None]
    if not compared:
        return None
    asked = [one.wanted_s for one in compared if one.wanted_s is not None]
    seconds = f"--seconds {max([math.ceil(MORE * bench.seconds), *asked])}"
    # A team waits for its last thread, so every further thread is one more that can be disturbed.
    if bench.threads > 1 and any(one.discarded > one.rounds for one in compared):
        return f"{seconds}, or OMP_NUM_THREADS=1 before the command,"
    return seconds


# ---- the crossover map ----


@dataclass(frozen=True, kw_only=True)
class Spot:
    """How the first backend fares against eager in one cell."""

    outcome: Outcome
    speedup: float | NotMeasured


@dataclass(frozen=True, kw_only=True)
class Map:
    """Rows × hidden widths of one kind of block in one dtype; None where there is no cell."""

    kind: str
    dtype: str
    rows: tuple[str, ...]
    widths: tuple[str, ...]
    spots: tuple[tuple[Spot | None, ...], ...]  # [row][width]

    def along(self, width: int) -> list[tuple[Outcome, list[str]]]:
        """Down one column: outcomes, each with the rows at which it holds, in order."""
        pairs = [
            (row[width].outcome, text)  # type: ignore[union-attr]
            for row, text in zip(self.spots, self.rows, strict=True)
            if row[width] is not None
        ]
        runs = groupby(pairs, key=lambda pair: pair[0])
        return [(outcome, [text for _, text in run]) for outcome, run in runs]


def maps(bench: Bench) -> list[Map]:
    """One for each kind and dtype that has two numbers of rows and two widths, or more.

    Cells with labels are a list, not a grid.
    """
    groups: dict[tuple[str, str], list[Cell]] = {}
    for cell in bench.cells:
        if cell.case is not None and not cell.case.label:
            groups.setdefault((cell.case.kind_text, cell.case.dtype_text), []).append(cell)
    found = [_map(bench.first, kind, dtype, cells) for (kind, dtype), cells in groups.items()]
    return [one for one in found if len(one.rows) > 1 and len(one.widths) > 1]


def _map(backend: str, kind: str, dtype: str, cells: Sequence[Cell]) -> Map:
    by_place = {(c.case.lead, c.case.mlp.sizes): c for c in cells if c.case is not None}
    leads = sorted({lead for lead, _ in by_place}, key=lambda lead: (math.prod(lead), lead))
    sizes = sorted({size for _, size in by_place}, key=lambda size: (size[1], size))
    hidden = [size[1] for size in sizes]
    alone = len(set(hidden)) == len(hidden)
    return Map(
        kind=kind,
        dtype=dtype,
        rows=tuple("×".join(map(str, lead)) for lead in leads),
        widths=tuple(str(size[1]) if alone else MlpShape(sizes=size).shape_text for size in sizes),
        spots=tuple(
            tuple(_spot(by_place.get((lead, size)), backend) for size in sizes) for lead in leads
        ),
    )


def _spot(cell: Cell | None, backend: str) -> Spot | None:
    if cell is None:
        return None
    result = cell.result(backend)
    compared = result.comparison
    if compared is None:
        return Spot(outcome="unknown", speedup=NotMeasured(result.why_not))
    outcome = OUTCOMES.get(compared.verdict, "unknown")
    return Spot(outcome=outcome, speedup=compared.speedup)
