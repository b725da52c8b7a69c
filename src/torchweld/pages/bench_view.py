"""A bench as a page shows it: speeds over rows, who is fastest where, errors, rounds as strips.

In: a `Bench`. Out: records of a page.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

from torchweld.bench.bench_cases import Case
from torchweld.bench.bench_results import Bench, Cell, Result, largest_of
from torchweld.bench.kernel_goals import KernelVerdictWord, kernel_verdicts
from torchweld.bench.relative_speeds import over_best
from torchweld.core.not_measured import NotMeasured
from torchweld.pages.page_numbers import brief, ends, ratios
from torchweld.pages.page_records import (
    CrossoverMap,
    Curve,
    CurvePlot,
    CurvePoint,
    ErrorRow,
    LaunchedRow,
    MapCell,
    Strip,
)

# Strips of all sides if they are not more than this; else of our first backend alone.
MOST_STRIPS = 60
ONLY_RATIOS = NotMeasured("a bench keeps ratios of errors, not the errors")
WHOLE_MODELS = "whole models"


# ---- curves ----


def bench_curves(bench: Bench) -> tuple[CurvePlot, ...]:
    """One plot for each block in each dtype, with a curve for everybody but eager."""
    plots: dict[str, list[tuple[Case, Cell]]] = {}
    for cell in bench.cells:
        if cell.case is not None:
            plots.setdefault(_block_title(cell.case), []).append((cell.case, cell))
    return tuple(
        CurvePlot(title=title, source="bench", curves=_curves(bench, cells))
        for title, cells in plots.items()
    )


def _block_title(case: Case) -> str:
    training = ", training" if case.training is not None else ""
    label = f"{case.label}: " if case.label else ""
    return f"{label}{case.mlp.shape_text} {case.kind_text} {case.dtype_text}{training}"


def _curves(bench: Bench, cells: Sequence[tuple[Case, Cell]]) -> tuple[Curve, ...]:
    ordered = sorted(cells, key=lambda pair: (pair[0].rows, pair[0].lead))
    return tuple(
        Curve(name=name, points=tuple(_point(case, cell.result(name)) for case, cell in ordered))
        for name in reversed(bench.names[1:])
    )


def _point(case: Case, result: Result) -> CurvePoint:
    compared = result.comparison
    if compared is None:
        why = NotMeasured(result.refused or result.why_not)
        return CurvePoint(x=case.rows, speedup=why, interval=None, verdict="not measured")
    speedup = compared.speedup
    return CurvePoint(
        x=case.rows,
        speedup=brief(speedup) if isinstance(speedup, float) else speedup,
        interval=ends(compared.interval),
        verdict=compared.verdict,
    )


# ---- who is fastest where ----


def bench_maps(bench: Bench) -> tuple[CrossoverMap, ...]:
    """One map for each dtype: blocks down, rows across; and one for whole models."""
    by_dtype: dict[str, list[tuple[str, str, int, Cell]]] = {}
    for cell in bench.cells:
        case = cell.case
        if case is None:
            by_dtype.setdefault(WHOLE_MODELS, []).append((cell.name, cell.dtype, 0, cell))
        else:
            place = (_row_name(case), case.rows_text, case.rows, cell)
            by_dtype.setdefault(case.dtype_text, []).append(place)
    return tuple(_map(bench, title, places) for title, places in by_dtype.items())


def _row_name(case: Case) -> str:
    return f"{case.label or case.mlp.shape_text} {case.kind_text}"


def _map(bench: Bench, title: str, places: Sequence[tuple[str, str, int, Cell]]) -> CrossoverMap:
    rows = list(dict.fromkeys(row for row, *_ in places))
    widths = {text: count for _, text, count, _ in places}
    columns = sorted(widths, key=lambda text: (widths[text], text))
    return CrossoverMap(
        title=title,
        rows=tuple(rows),
        columns=tuple(columns),
        cells=tuple(
            _spot(bench, cell, rows.index(row), columns.index(column))
            for row, column, _, cell in places
        ),
    )


def _spot(bench: Bench, cell: Cell, row: int, column: int) -> MapCell:
    found = over_best(bench, cell)
    if found is None:
        why = cell.result(bench.first).refused or cell.result(bench.first).why_not
        return MapCell(row=row, column=column, best="", speedup=NotMeasured(why))
    name, speed = found
    best = bench.first if speed.ahead else name if speed.behind else f"{bench.first} or {name}"
    return MapCell(row=row, column=column, best=best, speedup=brief(speed.value))


# ---- what a GPU runs ----


def bench_launches(bench: Bench) -> tuple[LaunchedRow, ...]:
    """Of every side that ran, in every cell; none for a bench on the CPU."""
    if not bench.on_gpu:
        return ()
    verdicts = {(one.cell, one.name): one.verdict for one in kernel_verdicts(bench)}
    return tuple(
        _launched(cell, result, verdicts.get((cell.name, result.name), ""))
        for cell in bench.cells
        for result in cell.results
        if not result.refused
    )


def _launched(cell: Cell, result: Result, verdict: KernelVerdictWord | Literal[""]) -> LaunchedRow:
    found = result.cost.kernels
    if found is None:
        found = NotMeasured("nobody counted them")

    def figure(name: str) -> Any:
        return found if isinstance(found, NotMeasured) else getattr(found, name)

    return LaunchedRow(
        cell=cell.name,
        side=result.name,
        kernels=figure("kernels"),
        kinds="" if isinstance(found, NotMeasured) else found.words,
        kernel_us=figure("kernel_us"),
        launch_us=figure("launch_us"),
        host_us=result.cost.host_us,
        call_us=result.us,
        verdict=verdict,
        rows=() if isinstance(found, NotMeasured) else found.rows,
    )


# ---- numerics ----


def bench_errors(bench: Bench) -> tuple[ErrorRow, ...]:
    """Of our own sides; a peer with wrong outputs is left out of the bench."""
    return tuple(
        ErrorRow(
            block=f"{cell.name}, {name}",
            tensor="output and gradients" if bench.training else "output",
            eager=ONLY_RATIOS,
            fused=ONLY_RATIOS,
            of_allowed=largest_of([check.row_ratio, check.rms_ratio]),
            ok=check.ok,
        )
        for cell in bench.cells
        for name in bench.backends
        if (check := cell.result(name).check) is not None
    )


# ---- rounds ----


def bench_strips(bench: Bench) -> tuple[Strip, ...]:
    """Everybody's rounds against eager; of large benches those of our first backend."""
    found = tuple(_strips(bench, bench.names[1:]))
    return found if len(found) <= MOST_STRIPS else tuple(_strips(bench, (bench.first,)))


def strips_left_out(bench: Bench) -> str:
    """What the page does not show of the rounds, in words; "" if it shows all."""
    count = len(list(_strips(bench, bench.names[1:])))
    if count <= MOST_STRIPS:
        return ""
    return f"samples are those of {bench.first} alone: {count} comparisons are too many to show"


def _strips(bench: Bench, names: Sequence[str]) -> Iterator[Strip]:
    for cell in bench.cells:
        for name in names:
            compared = cell.result(name).comparison
            if compared is not None and compared.log_ratios:
                speedup = compared.speedup
                yield Strip(
                    name=f"{cell.name}, {name}",
                    ratios=ratios(compared.log_ratios),
                    control=ratios(compared.control_log_ratios),
                    speedup=brief(speedup) if isinstance(speedup, float) else speedup,
                    interval=ends(compared.interval),
                    verdict=compared.verdict,
                )
