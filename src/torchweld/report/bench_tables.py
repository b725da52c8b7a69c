"""The tables of a bench: speeds by implementation, and what a call does, eager beside fused.

In: a `Bench`. Out: `rich` tables for a width. What does not fit is left out, the least important
first, rather than cut short.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from torchweld.bench.bench_cases import step_dtype_text
from torchweld.bench.bench_results import Bench, Cell, Result
from torchweld.core.measured_speed import Speed
from torchweld.core.not_measured import NotMeasured
from torchweld.core.number_text import figure
from torchweld.core.safe_text import clean

Cells = list[str | Text]
COLOURS = {"faster": "green", "slower": "red", "same": "", "not measured": "yellow"}
HEADERS = {"onnxruntime": "ONNX\nRuntime", "openvino": "Open\nVINO", "compile-max": "compile\nmax"}
LEFT = (
    *("block", "input", "model", "step", "dtype", "interval", "verdict", "kernel"),
    *("side", "kernels"),
)

# Columns that are left out if the width is short, the first ones first. The walk-through is about
# ops and launching them, so its table leaves out others.
SPEED_SPARE = ("kernel", "error", "verdict", "interval")
WORK_SPARE = ("CPU µs", "bufs", "GB/s", "GFLOP/s", "of peak")
WALK_SPARE = ("bufs", "GB/s", "GFLOP/s", "of peak")


def shape_columns(cells: Sequence[Cell]) -> dict[str, Cells]:
    """What the rows are: blocks, rows and dtypes; inputs of a model; models and kinds of steps."""
    if all(cell.case is None and cell.model is None for cell in cells):
        return {"input": [clean(cell.name) for cell in cells]}
    if all(cell.case is None for cell in cells):
        return {"model": list(block_texts(cells)), "step": [_dtype_text(cell) for cell in cells]}
    return {
        "block": list(block_texts(cells)),
        "rows": [cell.case.rows_text if cell.case is not None else "" for cell in cells],
        "dtype": [_dtype_text(cell) for cell in cells],
    }


def _dtype_text(cell: Cell) -> str:
    if cell.case is not None:
        return cell.case.dtype_text
    step = cell.model.step if cell.model is not None else None
    return f"{step_dtype_text(cell.dtype, step)} {step.marks if step else ''}".rstrip()


def block_texts(cells: Sequence[Cell]) -> list[str]:
    """A block is named once: its lines stand beside its cells, the rest beside the last."""
    names = [_lines(cell) for cell in cells]
    texts: list[str] = []
    place = 0
    for i, lines in enumerate(names):
        place = place + 1 if i and names[i - 1] == lines else 0
        last = i + 1 == len(names) or names[i + 1] != lines
        texts.append("\n".join(lines[place:] if last else lines[place : place + 1]))
    return texts


def _lines(cell: Cell) -> list[str]:
    if cell.case is None:
        model = cell.model
        return [clean(cell.name)] if model is None else [clean(model.target), clean(model.inputs)]
    label, shape = cell.case.label, cell.case.mlp.shape_text
    return [*([clean(label)] if label else []), shape, cell.case.kind_text]


# ---- speeds ----


def speed_text(result: Result, best: bool) -> Text:
    """The speed over eager's in the verdict's colour, bold for the best; ~ where it is noisy."""
    compared = result.comparison
    if result.check is not None and not result.check.ok:
        return Text("wrong", style="red")
    if compared is None or isinstance(compared.speedup, NotMeasured):
        return Text("–", style="yellow" if compared is not None else "dim")
    sign = {"same": "≈", "not measured": "~"}.get(compared.verdict, "")
    style = f"{'bold ' if best else ''}{COLOURS[compared.verdict]}".strip()
    return Text(sign + figure(compared.speedup), style=style)


def best_of(cell: Cell) -> str:
    """Who is the fastest, eager included."""
    speeds = {"eager": 1.0}
    for result in cell.results:
        speedup = result.comparison.speedup if result.comparison is not None else None
        if isinstance(speedup, float):
            speeds[result.name] = speedup
    return max(speeds, key=lambda name: speeds[name])


def speed_columns(bench: Bench) -> dict[str, Cells]:
    columns = shape_columns(bench.cells)
    others = bench.names[1:]
    names = ("eager µs", *others, "interval", "verdict", "error", "kernel")
    columns |= {name: [] for name in names}
    for cell in bench.cells:
        best, main = best_of(cell), cell.result(bench.first)
        eager_us = shown(cell.result("eager").us)
        row: dict[str, str | Text] = {
            "eager µs": Text(eager_us, style="bold" if best == "eager" else ""),
            **{name: speed_text(cell.result(name), name == best) for name in others},
            "interval": interval_text(main),
            "verdict": verdict_text(main),
            "error": shown(main.check.error_ratio if main.check is not None else None),
            "kernel": main.kernel,
        }
        for name, value in row.items():
            columns[name].append(value)
    return columns


def interval_text(result: Result) -> str:
    speed = result.comparison.speed if result.comparison is not None else None
    return "–".join(map(figure, speed.interval)) if isinstance(speed, Speed) else ""


def verdict_text(result: Result) -> Text:
    if result.check is not None and not result.check.ok:
        return Text("not timed", style="red")
    verdict = result.comparison.verdict if result.comparison is not None else "not measured"
    return Text(verdict, style=COLOURS[verdict])


def speed_table(bench: Bench, width: int) -> tuple[Table, list[str]]:
    """The table, and the columns that it has no room for; in the end, peers go too."""
    return fitted(speed_columns(bench), (*SPEED_SPARE, *bench.against), width)


# ---- work ----


def work_columns(bench: Bench) -> dict[str, Cells]:
    """Pairs, eager's and the first backend's; without columns that have no figures."""

    def pairs(value: Callable[[Cell, str], float | NotMeasured | None]) -> Cells:
        found = [(value(cell, "eager"), value(cell, bench.first)) for cell in bench.cells]
        if all(one is None for pair in found for one in pair):
            return []
        return ["→".join(map(shown, pair)) for pair in found]

    def cost(field: str) -> Cells:
        return pairs(lambda cell, name: getattr(cell.result(name).cost, field))

    columns = shape_columns(bench.cells)
    figures: dict[str, Cells] = {
        "µs": pairs(lambda cell, name: cell.result(name).us),
        "GFLOP/s": pairs(lambda cell, name: cell.gflops(name) if cell.flops else None),
        "GB/s": pairs(lambda cell, name: cell.gbps(name)),
        "of peak": [peak_text(bench, cell) for cell in bench.cells] if bench.peaks_known else [],
        "ops": cost("ops"),
        "bufs": cost("buffers"),
        "host µs": cost("host_us"),
        "CPU µs": cost("cpu_us"),
        "CUDA µs": cost("cuda_us"),
    }
    return columns | {header: cells for header, cells in figures.items() if cells}


def shown(value: float | NotMeasured | None) -> str:
    """Three digits, or a count; a dash where there is none."""
    if value is None or isinstance(value, NotMeasured):
        return "–"
    return str(value) if isinstance(value, int) else figure(value)


def peak_text(bench: Bench, cell: Cell) -> str:
    """`41→88 % c`: shares of the peak that holds this shape back, compute's or memory's."""
    pair = [bench.of_peak(cell, name) for name in ("eager", bench.first)]
    known = [one for one in pair if isinstance(one, tuple)]
    if not known:
        return "–"
    shares = "→".join(f"{100 * one[0]:.0f}" if isinstance(one, tuple) else "–" for one in pair)
    return f"{shares} % {known[0][1][0]}"


def work_table(bench: Bench, width: int) -> tuple[Table, list[str]]:
    spare = WALK_SPARE if bench.preset == "blog" else WORK_SPARE
    return fitted(work_columns(bench), spare, width)


# ---- what fits ----


def wider(spare: list[str]) -> str:
    """A note about the columns that a wider terminal would show."""
    return f" On a wider terminal: {', '.join(spare)}." if spare else ""


def fitted(
    columns: Mapping[str, Cells], spare: Sequence[str], width: int
) -> tuple[Table, list[str]]:
    """The widest table that fits, and what was left out for it."""
    kept, missing = dict(columns), []
    table = _table(kept)
    for name in spare:
        if Console(width=1000).measure(table).maximum <= width:
            break
        if kept.pop(name, None) is not None:
            missing.append(name)
            table = _table(kept)
    return table, missing


def _table(columns: Mapping[str, Cells]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    for name in columns:
        justify: Literal["left", "right"] = "left" if name in LEFT else "right"
        header = HEADERS.get(name, name.replace(":", ":\n"))
        table.add_column(header, justify=justify, no_wrap=name != "input")
    for row in zip(*columns.values(), strict=True):
        table.add_row(*row)
    return table
