"""More sections of a bench: single calls, several callers, where fused wins. Renderables out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.cells import cell_len
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from torchweld.bench.bench_results import PERCENTILES, Bench, Cell
from torchweld.bench.bench_rows import calls_per_s
from torchweld.bench.bench_summary import Map, Outcome, Spot, maps
from torchweld.core.not_measured import NotMeasured
from torchweld.core.number_text import counted, figure
from torchweld.core.safe_text import clean
from torchweld.report.bench_tables import COLOURS, shown
from torchweld.report.text_style import LEAST_LABEL, Column, Sheet, cut, heading, indented

SIGNS: dict[Outcome, tuple[str, str]] = {
    "wins": ("+", "green"),
    "loses": ("−", "red"),
    "same": ("=", ""),
    "unknown": ("?", "yellow"),
}
WORDS: dict[Outcome, str] = {
    "wins": "wins",
    "loses": "loses",
    "same": "as fast",
    "unknown": "not measured",
}


# ---- single calls ----


def latency_section(bench: Bench, width: int) -> Iterator[RenderableType]:
    """p50, p95 and p99 of every implementation, cell by cell."""
    cells = [cell for cell in bench.cells if cell.results[0].latency is not None]
    if not cells:
        return
    yield heading("single calls, µs", f"taken in turn{_hot(bench)}; – fewer than 5 calls beyond it")
    columns = [
        Column("", _name_width(bench), left=True),
        *(Column(f"p{percent}", 7) for percent in PERCENTILES),
        Column("calls", 7, spare=True),
    ]
    sheet = _sheet(cells, columns, width)
    for cell in cells:
        label = cut(clean(cell.name), sheet.label_width - 2)
        for result in cell.results:
            if result.latency is None:
                continue
            row = {f"p{p}": shown(result.latency.percentile(p)) for p in PERCENTILES}
            row |= {"": result.name, "calls": str(len(result.latency.calls_us))}
            sheet.add(f"  {label}", row)
            label = ""
    yield sheet.table


def _hot(bench: Bench) -> str:
    """Says that weights are hot although the rest is cold: calls follow each other."""
    return ", weights hot" if bench.cold else ""


def _name_width(bench: Bench) -> int:
    return max(map(len, bench.names))


def _sheet(cells: Sequence[Cell], columns: Sequence[Column], width: int) -> Sheet:
    """No wider than the names of the cells need; columns give way to names, the last first."""
    longest = max(LEAST_LABEL, *(2 + cell_len(clean(cell.name)) for cell in cells))
    kept = list(columns)
    for column in reversed(columns):
        if column.spare and longest + sum(c.width + 1 for c in kept) > width:
            kept.remove(column)
    return Sheet("cell", kept, min(width, longest + sum(c.width + 1 for c in kept)))


# ---- several callers ----


def callers_section(bench: Bench, width: int) -> Iterator[RenderableType]:
    """Calls per second by several threads at once, and how that compares with eager's."""
    cells = [cell for cell in bench.cells if any(r.callers is not None for r in cell.results)]
    if not cells:
        return
    title = f"calls per second, {counted(bench.callers, 'caller')} at once"
    yield heading(title, f"windows in turn{_hot(bench)}; speed over eager's")
    columns = [
        Column("", _name_width(bench), left=True),
        Column("calls/s", 9),
        Column("speed", 7),
        Column("interval", 11, left=True, spare=True),
        Column("verdict", 12, left=True, spare=True),
    ]
    sheet = _sheet(cells, columns, width)
    for cell in cells:
        label = cut(clean(cell.name), sheet.label_width - 2)
        for row in _callers_rows(cell):
            sheet.add(f"  {label}", row)
            label = ""
    yield sheet.table


def _callers_rows(cell: Cell) -> Iterator[dict[str, str | Text]]:
    for result in cell.results:
        compared = result.callers
        rate = calls_per_s(cell, result)
        if rate is None:
            continue
        row: dict[str, str | Text] = {"": result.name, "calls/s": shown(rate)}
        if compared is not None:
            style = COLOURS[compared.verdict]
            speed, figures = compared.speed, shown(compared.speedup)
            noisy = "~" if isinstance(speed, NotMeasured) and figures != "–" else ""
            row["speed"] = Text(noisy + figures, style=style)
            row["verdict"] = Text(compared.verdict, style=style)
            if not isinstance(speed, NotMeasured):
                row["interval"] = "–".join(map(figure, speed.interval))
        yield row


# ---- the map ----


def map_section(bench: Bench) -> Iterator[RenderableType]:
    """Where the first backend is ahead of eager, over rows and widths."""
    for one in maps(bench):
        yield heading(
            f"where {bench.first} wins: {one.kind} {one.dtype}",
            "+ faster than eager, − slower, = as fast, ? not measured",
        )
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
        table.add_column("  rows \\ hidden", no_wrap=True)
        for width in one.widths:
            table.add_column(width, justify="right", no_wrap=True)
        for rows, spots in zip(one.rows, one.spots, strict=True):
            table.add_row(Text(f"  {rows}", style="dim"), *map(_spot_text, spots))
        yield table
        yield from (indented(sentence) for sentence in crossings(one))


def _spot_text(spot: Spot | None) -> Text:
    if spot is None:
        return Text("")
    sign, style = SIGNS[spot.outcome]
    known = "" if isinstance(spot.speedup, NotMeasured) else figure(spot.speedup)
    return Text(sign + known, style=style)


def crossings(one: Map) -> Iterator[str]:
    """For each width with more than one outcome, says which outcome holds at which rows."""
    for number, width in enumerate(one.widths):
        runs = one.along(number)
        if len(runs) > 1:
            parts = [f"{WORDS[outcome]} at {_span(rows)}" for outcome, rows in runs]
            yield f"hidden {width}: {', '.join(parts)} rows"


def _span(rows: list[str]) -> str:
    return rows[0] if len(rows) == 1 else f"{rows[0]} to {rows[-1]}"
