"""Our first backend beside each peer of a bench, every cell that is lost, and a preset's goals."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from torchweld.bench.bench_goals import GoalVerdict
from torchweld.bench.bench_results import Bench
from torchweld.bench.peer_standings import LostCell, close_cells, lost_cells, standings
from torchweld.core.number_text import counted, figure
from torchweld.core.safe_text import clean
from torchweld.report.bench_tables import shown
from torchweld.report.text_style import heading, indented

STYLES = {"met": "green", "missed": "bold red"}


def peers_section(bench: Bench) -> Iterator[RenderableType]:
    """Our first backend beside each peer; empty if there were no peers."""
    if not bench.against or not bench.cells:
        return
    yield heading(f"{bench.first} beside others", "speed over theirs; ahead, behind: beyond noise")
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    table.add_column("", no_wrap=True)
    for name in ("mean", "ahead", "behind", "too close", "their error / eager's"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in standings(bench):
        counts = (str(count) for count in (one.ahead, one.behind, one.close))
        table.add_row(one.name, shown(one.mean), *counts, shown(one.error))
    yield Padding(table, (0, 0, 0, 2))
    lost = lost_cells(bench)
    close = close_cells(bench)
    yield indented(
        f"behind in {len(lost)} of {counted(len(bench.cells), 'cell')}; too close to call, with "
        f"somebody ahead in the median: {close}"
    )
    for cell in lost:
        yield indented(clean(_loss(cell)))


def _loss(lost: LostCell) -> str:
    winners = ", ".join(
        f"{name} {figure(1 / ratio.value)} times as fast ({figure(1 / ratio.high)}–"
        f"{figure(1 / ratio.low)}; {shown(us)} against {shown(lost.our_us)} µs)"
        for name, (ratio, us) in lost.winners.items()
    )
    return f"{lost.cell}: {winners}"


def goals_section(verdicts: Sequence[GoalVerdict]) -> Iterator[RenderableType]:
    """The goals of a preset and what was found; empty if there are no goals."""
    if not verdicts:
        return
    yield heading("goals", "ratios are our speed over the other's")
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    trained = all(one.goal.steps for one in verdicts)  # no step has emptied caches
    for name in ("goal", "at least", *(["found"] if trained else ["hot", "cold"]), ""):
        table.add_column(name, overflow="fold")
    for one in verdicts:
        word = Text(one.verdict, style=STYLES.get(one.verdict, "yellow"))
        least = f"{one.goal.least:.2f}"
        found = [one.hot] if trained else [one.hot, one.cold]
        table.add_row(one.goal.name, least, *found, word)
    yield Padding(table, (0, 0, 0, 2))
