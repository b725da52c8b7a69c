"""`torchweld bench`: eager against fused blocks, verified and measured; a table and a sentence."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from torchweld.benching import (
    BLOCKS,
    DTYPES,
    Bench,
    Case,
    Cell,
    Mlp,
    Result,
    Summary,
    demo_cases,
    measure,
    parse_sizes,
    plan,
    summarise,
)
from torchweld.errors import TorchweldError
from torchweld.names import known

WIDTH = 100
DISPENSABLE = ("kernel", "bufs", "ops", "interval", "error")
COLOURS = {"faster": "green", "slower": "red", "same": "", "not measured": "yellow"}


# ---- what to measure ----


def choose_cases(
    blocks: Sequence[str],
    sizes: str | None,
    activation: str | None,
    gated: bool,
    rows: Sequence[int],
    dtypes: Sequence[str],
) -> list[Case]:
    """The demo's cases if nothing was asked for; else every combination of what was."""
    if sizes is None and (gated or activation):
        raise TorchweldError(
            "--activation and --gated describe an MLP of your own; give its --sizes too, such as "
            "--sizes 768,3072,768"
        )
    if not (blocks or sizes or rows or dtypes):
        return demo_cases()
    mlps = [BLOCKS[known(name, BLOCKS, "block")] for name in blocks]
    if sizes is not None:
        own = Mlp(
            sizes=parse_sizes(sizes), activation=activation or "gelu", gated=gated, bias=not gated
        )
        mlps.append(own)
    mlps = mlps or list(dict.fromkeys(case.mlp for case in demo_cases()))
    return [
        Case(mlp=mlp, rows=count, dtype=known(dtype, DTYPES, "dtype"))
        for mlp in mlps
        for dtype in dtypes or ("fp32",)
        for count in rows or (1, 8, 64)
    ]


# ---- how it looks ----


def figure(value: float) -> str:
    """Three digits that count: 0.98, 3.20, 12.3, 2749."""
    if not math.isfinite(value):
        return "–"
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def megabytes(count: int) -> str:
    return f"{figure(count / 1e6)} MB"


def ratio(result: Result) -> Text:
    """The speedup in the verdict's colour; no figure where none was measured."""
    if result.comparison is None:
        return Text("wrong", style="red")
    verdict = result.comparison.verdict
    if verdict == "not measured":
        return Text("–", style=COLOURS[verdict])
    sign = "≈" if verdict == "same" else ""
    return Text(sign + figure(result.comparison.speedup), style=COLOURS[verdict])


def block_texts(cells: Sequence[Cell]) -> list[str]:
    """The first column: a block is named once, its sizes beside the first cell, its kind below."""
    texts = []
    for i, cell in enumerate(cells):
        mlp = cell.case.mlp
        before = [other.case.mlp for other in cells[:i]]
        alone = i + 1 == len(cells) or cells[i + 1].case.mlp != mlp
        if not before or before[-1] != mlp:
            texts.append(f"{mlp.shape_text}\n{mlp.kind_text}" if alone else mlp.shape_text)
        else:
            texts.append(mlp.kind_text if len(before) < 2 or before[-2] != mlp else "")
    return texts


def columns_of(bench: Bench) -> dict[str, list[str | Text]]:
    """The table by columns, a row a cell."""
    first, *others = bench.backends
    names = ("block", "rows", "dtype", "eager µs", *others, first)
    names += ("interval", "verdict", "error", "kernel", "ops", "bufs")
    columns: dict[str, list[str | Text]] = {name: [] for name in names}
    for text, cell in zip(block_texts(bench.cells), bench.cells, strict=True):
        main = cell.results[0]
        timed = main.comparison
        verdict = timed.verdict if timed is not None else "not timed"
        interval = ""
        if timed is not None and verdict != "not measured":
            interval = "–".join(figure(end) for end in timed.interval)
        eager_us = [r.comparison.baseline_us for r in cell.results if r.comparison is not None]
        row: dict[str, str | Text] = {
            "block": text,
            "rows": str(cell.case.rows),
            "dtype": cell.case.dtype,
            "eager µs": figure(eager_us[0]) if eager_us else "–",
            **{result.backend: ratio(result) for result in cell.results},
            "interval": interval,
            "verdict": Text(verdict, style=COLOURS.get(verdict, "red")),
            "error": figure(main.check.error_ratio),
            "kernel": main.kernel,
            "ops": "–" if main.ops is None else f"{cell.eager_ops}→{main.ops}",
            "bufs": "–" if main.buffers is None else f"{cell.eager_buffers}→{main.buffers}",
        }
        for name, value in row.items():
            columns[name].append(value)
    return columns


def table_of(bench: Bench, width: int) -> Table:
    """What does not fit is left out, the least important first, rather than cut short."""
    columns = columns_of(bench)
    for name in (None, *DISPENSABLE):
        if name is not None:
            del columns[name]
        table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
        for header in columns:
            left = header in ("block", "dtype", "interval", "verdict", "kernel")
            justify: Literal["left", "right"] = "left" if left else "right"
            table.add_column(header.replace(":", ":\n"), justify=justify, no_wrap=True)
        for row in zip(*columns.values(), strict=True):
            table.add_row(*row)
        if Console(width=10 * WIDTH).measure(table).maximum <= width:
            break
    return table


def heading(bench: Bench) -> str:
    kernels = f"kernels for {bench.isa}" if bench.isa else "no compiled kernels"
    cache = "cold" if bench.cold else "hot"
    threads = f"{bench.threads} thread{'s' if bench.threads > 1 else ''}"
    return f"torch {bench.torch}, {kernels}, {threads}, weights {cache}; {bench.cpu}"


def legend(table: Table, backends: Sequence[str]) -> str:
    names = ", ".join(backends)
    text = (
        f"{names}: speed relative to eager's in the same rounds; ≈ no difference, – not measured."
    )
    shown = {str(column.header) for column in table.columns}
    if "error" in shown:
        text += " error: the largest, relative to eager's, both against fp64."
    if "ops" in shown:
        text += " ops, bufs: what a call dispatches and allocates, eager → fused; – left to torch."
    missing = [name for name in DISPENSABLE if name not in shown]
    return text + (f" On a wider terminal: {', '.join(missing)}." if missing else "")


def closing(summary: Summary) -> Iterator[RenderableType]:
    """The result in one sentence, and what went wrong in one line each."""
    for failure in summary.failed:
        yield Text(f"breaks the numerical rule, so not timed: {failure}", style="red")
    if summary.unmeasured:
        yield Text(f"not measured: {summary.unmeasured[0]}", style="yellow")
    if not summary.measured:
        yield Text(f"{summary.backend}: nothing was measured.", style="bold")
        return
    parts = [f"{figure(mean)}x in {dtype}" for dtype, mean in summary.means.items()]
    cells = f"{summary.measured} cell{'s' if summary.measured > 1 else ''}"
    by_dtype = f": {', '.join(parts)}" if len(parts) > 1 else ""
    assert summary.worst is not None
    worst, least = summary.worst
    sentence = (
        f"{summary.backend} is {figure(summary.mean)}x as fast as eager (geometric mean of "
        f"{cells}{by_dtype}); least, {figure(least)}x, at {worst}; output error at most "
        f"{figure(summary.largest_error_ratio)}x of eager's, "
        f"{figure(summary.largest_share_of_limit)} of what the numerical rule allows; "
    )
    if summary.copied_bytes:
        sentence += (
            f"+{megabytes(summary.copied_bytes)} of packed weights beside "
            f"{megabytes(summary.weight_bytes)}"
        )
    else:
        sentence += "no copy of the weights"
    if summary.unmeasured:
        sentence += f"; {len(summary.unmeasured)} of {summary.cells} cells not measured"
    yield Text(sentence + ".", style="bold")


# ---- the verb ----


def run_cases(bench: Bench, cases: Sequence[Case], console: Console | None) -> Bench:
    """Measures; shows the growing table on a terminal. Ctrl-C ends it with what there is."""
    # Redrawn between cells only: a thread that redraws would be timed along.
    live = Live(console=console, auto_refresh=False, transient=True) if console else None
    if live is not None:
        live.start()
    try:
        cells = measure(bench, cases)
        for i, case in enumerate(cases):
            if console is not None and live is not None:
                progress = Text(f"{i + 1} of {len(cases)}: {case} …", style="dim")
                live.update(Group(table_of(bench, console.width), progress), refresh=True)
            bench = replace(bench, cells=(*bench.cells, next(cells)))
    except KeyboardInterrupt:
        bench = replace(bench, interrupted=True)
    finally:
        if live is not None:
            live.stop()
    return bench


@click.command(
    epilog="Examples:  torchweld bench;  torchweld bench --sizes 512,2048,512 --activation relu "
    "--rows 4 --dtype bf16 --backend cpu --backend torch:mkldnn"
)
@click.option("--block", "blocks", multiple=True, help=f"Built-in MLP: {', '.join(BLOCKS)}.")
@click.option("--sizes", help="An MLP of your own: in, hidden …, out, as in 768,3072,768.")
@click.option("--activation", help="Of the MLP given by --sizes (gelu).")
@click.option("--gated", is_flag=True, help="The MLP given by --sizes is gated, without biases.")
@click.option("--rows", multiple=True, type=click.IntRange(min=1), help="Rows of x (1, 8, 64).")
@click.option("--dtype", "dtypes", multiple=True, help=f"{', '.join(DTYPES)} (fp32).")
@click.option(
    "--backend",
    "backends",
    multiple=True,
    help="cpu, cpu:natural, torch, torch:mkldnn, reference; the first is judged. "
    "(the best there is, torch beside it)",
)
@click.option("--seconds", default=1.5, show_default=True, help="For each backend in each cell.")
@click.option("--cold", is_flag=True, help="Empty the caches before every call.")
@click.option("--seed", default=0, show_default=True, help="Of weights, inputs and timing order.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def bench(
    blocks: tuple[str, ...],
    sizes: str | None,
    activation: str | None,
    gated: bool,
    rows: tuple[int, ...],
    dtypes: tuple[str, ...],
    backends: tuple[str, ...],
    seconds: float,
    cold: bool,
    seed: int,
    as_json: bool,
) -> int:
    """Measure fused MLPs against eager ones on this machine, after checking their numbers.

    Options that take a list are given once for each value. Exit code 1 if an output breaks the
    numerical rule, 2 if nothing could be measured.
    """
    cases = choose_cases(blocks, sizes, activation, gated, rows, dtypes)
    planned = plan(cases, backends, seconds=seconds, cold=cold, seed=seed)
    console = Console(file=sys.stdout, highlight=False, markup=False)
    console.width = min(console.width, WIDTH) if console.is_terminal else WIDTH
    shown = not as_json
    if shown:
        console.print(heading(planned))
        for note in planned.notes:
            console.print(Text(f"not used: {note}", style="yellow"))
    done = run_cases(planned, cases, console if shown and console.is_terminal else None)
    summary = summarise(done)
    if shown:
        table = table_of(done, console.width)
        console.print(table)
        console.print(Text(legend(table, done.backends), style="dim"))
        for part in closing(summary):
            console.print(part)
    else:
        click.echo(done.to_json())
    if done.interrupted:
        raise click.Abort
    if summary.failed:
        return 1
    return 0 if summary.measured else 2
